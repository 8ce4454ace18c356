"""A layout that an engine's ranks cannot have is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import VOCAB, tiny_run

from megatron_rl.generate.refit.rank_engine import build_inference_policy
from megatron_rl.recipe.errors import ConfigurationError


def test_ranks_that_cannot_share_heads_refuse_by_key_and_value(platform: Any) -> None:
    four: Any = SimpleNamespace(tensor=SimpleNamespace(size=lambda: 4))
    with pytest.raises(ConfigurationError, match=r"^placement\.inference\.tp 4 is more than model\.num_query_groups 2"):
        build_inference_policy(tiny_run(), VOCAB, platform, four)
