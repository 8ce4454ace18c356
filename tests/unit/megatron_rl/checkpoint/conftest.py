"""A published model and its conversion, which several files read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hf_helpers import PUBLISHED, publish  # transformers, which others here do without

    folder = tmp_path_factory.mktemp("published") / "hf"
    publish(folder, PUBLISHED["Qwen2"])
    return folder


@pytest.fixture(scope="module")
def converted(published: Path, platform: Any, groups: Any) -> Path:
    from hf_helpers import SHARD

    from megatron_rl.checkpoint.hf.to_megatron import to_megatron

    to_megatron(published, published.parent / "megatron", platform, shard_bytes=SHARD)
    return published.parent / "megatron"
