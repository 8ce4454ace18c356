"""The output of mrl-submit names the overrides that follow from that of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.mrl_submit import main

HEADS = ("model.num_attention_heads=2", "model.num_query_groups=2")  # of a size that vLLM has on a CPU


def test_a_dry_run_names_what_the_engine_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["demo", "inference.engine=vllm", *HEADS, "--dry-run", "--cluster", "local"])
    assert "note: inference.engine=vllm also sets placement.mode=partitioned" in done.stderr
    assert "resume.partial=keep" in done.stderr
