"""A published model, its conversion and the checkpoint of a run with its weights, shared by several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hf_helpers import PUBLISHED, publish  # imports transformers, which other tests here do not need

    folder = tmp_path_factory.mktemp("published") / "hf"
    publish(folder, PUBLISHED["Qwen2"])
    return folder


@pytest.fixture(scope="module")
def saved(published: Path, platform: Any, groups: Any) -> Path:
    from hf_helpers import saved_run

    return saved_run(published, published.parent / "run", platform)


@pytest.fixture(scope="module")
def converted(published: Path, platform: Any, groups: Any) -> Path:
    from hf_helpers import SHARD

    from megatron_rl.checkpoint.hf.to_megatron import to_megatron

    to_megatron(published, published.parent / "megatron", platform, shard_bytes=SHARD)
    return published.parent / "megatron"
