"""Suggestions for unknown keys."""

from __future__ import annotations

import pytest

from launcher.recipe.load import _known_keys
from launcher.recipe.suggest import SYNONYMS, did_you_mean


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("optimizer.lr", "learning_rate"),
        ("training.epochs", "steps"),
        ("training.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("model.path", "huggingface"),
        ("model.name", "huggingface"),
        ("training.batch_size", "grpo.prompts_per_step"),
        ("model.supervised.batchsize", "batch_size"),
        ("grpo.group_sizes", "group_size"),
        ("grpo.kl_betta", "kl_beta"),
        ("group_size", "grpo.group_size"),
        ("training.temperature", "sampling.temperature"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("optimiser.weight_decays", "optimizer.weight_decay"),
        ("grpo.something", None),
    ],
)
def test_an_unknown_key_gets_a_suggestion(unknown, meant):
    said = did_you_mean(tuple(unknown.split(".")), _known_keys())
    assert said == (f" (did you mean {meant}?)" if meant else "")


def test_every_synonym_stands_for_a_key_and_is_not_a_key():
    known = _known_keys()
    assert set(SYNONYMS.values()) <= known.keys()
    assert not {(word,) for word in SYNONYMS} & known.keys()
