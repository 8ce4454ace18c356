"""A prober measures log-probs of a short text under the trainer's weights."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from core_helpers import answer_logprobs, stir, tiny_policy

from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.run.prober import TOKENS, Prober, probe_text

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_probe_has_the_log_probs_of_the_current_weights(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform)
    prober = Prober(policy, TEXT, groups)
    for seed in (1, 2):
        stir(policy, 0.3, seed)
        probe = prober.measure()
        assert probe is not None and probe.tokens == (*TEXT,)
        probe.check(answer_logprobs(policy, TEXT[:1], TEXT[1:]).tolist())
        assert probe.difference(answer_logprobs(policy, TEXT[:1], TEXT[1:]).tolist()) < 1e-5


def test_weights_that_are_not_finite_are_not_probed(
    platform: Any, groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy(platform)
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with caplog.at_level(logging.WARNING):
        assert Prober(policy, TEXT, groups).measure() is None
    assert "not probed with these weights" in caplog.text


@pytest.mark.parametrize(("prompts", "longest", "length"), [(["12+3="], 100, TOKENS), (["12+3=", "7+8="], 20, 19)])
def test_text_is_that_of_the_first_prompts(prompts: list[str], longest: int, length: int) -> None:
    tokenizer = CharacterTokenizer("0123456789+=")
    tokens = probe_text(prompts, tokenizer, longest)
    assert len(tokens) == length
    assert tokenizer.decode(tokens).startswith("".join(prompts))
