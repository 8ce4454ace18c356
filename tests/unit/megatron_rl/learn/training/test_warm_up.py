"""The taught base model has the same bits with and without the cache, which only saves time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import quiet_safe_points, tiny_model, tiny_run
from torch import Tensor

from megatron_rl.agent.api import Demonstrator
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.learn.supervised.example_rows import token_example
from megatron_rl.learn.training import warm_up
from megatron_rl.learn.training.warm_up import NoDemonstrations, cache_path
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError


class Shop:
    """Environment with two worked examples."""

    def demonstrations(self) -> list[tuple[str, str]]:
        return [("1+1=", "2"), ("9-2=", "7")]


Demonstrator.register(Shop)


def recipe(steps: int = 6) -> RunConfig:
    taught = {"steps": steps, "batch_size": 8, "learning_rate": 3e-3, "seed": 1}
    return tiny_run(model=tiny_model(init="supervised", supervised=taught).model_dump())


def taught_policy(config: RunConfig, platform: Any, environment: object, *, writer: bool) -> Policy:
    tokenizer = build_tokenizer(config.tokenizer)
    platform.seed(config.model.supervised.seed)
    policy = build_policy(config.model, tokenizer.vocab_size, platform)
    warm_up.teach(policy, config, environment, tokenizer, quiet_safe_points(), writer=writer)
    return policy


def weights(config: RunConfig, platform: Any, *, writer: bool = True, environment: Any = None) -> list[Tensor]:
    policy = taught_policy(config, platform, Shop() if environment is None else environment, writer=writer)
    return [weight.detach().clone() for weight in policy.parameters()]


def place(config: RunConfig) -> Path:
    """Cache file of the weights that this environment teaches."""
    tokenizer = build_tokenizer(config.tokenizer)
    return cache_path(config, [token_example(*each, tokenizer) for each in Shop().demonstrations()])


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def teachings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a model is taught without the cache."""
    counted: list[int] = []
    train = warm_up._train

    def counting(*args: Any) -> None:
        counted.append(1)
        train(*args)

    monkeypatch.setattr(warm_up, "_train", counting)
    return counted


def test_the_bits_are_the_same_with_and_without_the_cache(
    platform: Any, groups: Any, teachings: list[int], cache: Path
) -> None:
    taught = weights(recipe(), platform)
    torch.manual_seed(99)  # the state of the global generator does not matter
    cached = weights(recipe(), platform)
    assert len(teachings) == 1
    place(recipe()).unlink()
    taught_again = weights(recipe(), platform)
    assert len(teachings) == 2
    assert same(taught, cached)
    assert same(taught, taught_again)
    assert [path.name for path in (cache / "supervised").iterdir()] == [place(recipe()).name]  # no debris


class OtherShop(Shop):
    def demonstrations(self) -> list[tuple[str, str]]:
        return [("1+1=", "3"), ("9-2=", "7")]


def test_a_changed_environment_is_taught_again(platform: Any, groups: Any, teachings: list[int]) -> None:
    before = weights(recipe(), platform)
    assert not same(weights(recipe(), platform, environment=OtherShop()), before)
    assert len(teachings) == 2


def test_it_teaches(platform: Any, groups: Any) -> None:
    config = recipe(steps=60)
    tokenizer = build_tokenizer(config.tokenizer)
    policy = taught_policy(config, platform, Shop(), writer=True)
    engine = Engine(policy, config.model, config.inference, tokenizer.end_ids)
    greedy = config.sampling.model_copy(update={"temperature": 0.0})
    for prompt, answer in Shop().demonstrations():
        (completion,) = asyncio.run(engine.generate(GenerationRequest(tokenizer.encode(prompt), 1, greedy, 0)))
        assert tokenizer.decode(completion.tokens) == answer
        assert completion.finish_reason == "stop"


def test_failed_teaching_is_an_error_and_not_cached(platform: Any, groups: Any) -> None:
    config = recipe()
    taught = config.model.supervised.model_copy(update={"learning_rate": 1e36})
    config = config.model_copy(update={"model": config.model.model_copy(update={"supervised": taught})})
    with pytest.raises(ConfigurationError, match=r"its loss is (nan|inf) after 6 steps. Lower model.supervised.learn"):
        weights(config, platform)
    assert not place(config).exists()


@pytest.mark.parametrize("junk", [b"no checkpoint at all", None], ids=["garbage", "cut short"])
def test_a_corrupt_cache_is_logged_and_taught_again(
    platform: Any, groups: Any, teachings: list[int], caplog: pytest.LogCaptureFixture, junk: bytes | None
) -> None:
    taught = weights(recipe(), platform)
    path = place(recipe())
    path.write_bytes(path.read_bytes()[:-1000] if junk is None else junk)
    with caplog.at_level(logging.WARNING):
        assert same(weights(recipe(), platform), taught)
    assert len(teachings) == 2
    assert f"{path} cannot be read" in caplog.text
    assert same(weights(recipe(), platform), taught)
    assert len(teachings) == 2  # the cache was repaired


def test_a_cache_that_cannot_be_written_is_a_warning(
    platform: Any, groups: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = weights(recipe(), platform, writer=False)
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert same(weights(recipe(), platform), expected)
    assert "could not be cached" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"supervised": {"steps": 61}}},
        {"model": {"supervised": {"seed": 2}}},
        {"model": {"hidden_size": 64}},
        {"tokenizer": {"alphabet": "0123456789+-=x"}},
        {"environment": {"args": {"seed": 1}}},
        {"job": {"threads_per_rank": 2}},
    ],
    ids=str,
)
def test_the_cache_key_depends_on_all_that_the_weights_depend_on(change: dict[str, Any]) -> None:
    assert place(tiny_run(**change)) != place(tiny_run())


@pytest.mark.parametrize(
    "change",
    [{"training": {"seed": 9}}, {"grpo": {"group_size": 8}}, {"optimizer": {"learning_rate": 1.0}}],
    ids=str,
)
def test_the_cache_key_depends_on_nothing_else(change: dict[str, Any]) -> None:
    assert place(tiny_run(**change)) == place(tiny_run())


def test_an_environment_without_examples_is_one_clear_error(platform: Any, groups: Any) -> None:
    with pytest.raises(NoDemonstrations, match="'arithmetic' has no worked examples"):
        weights(recipe(), platform, environment=object())
