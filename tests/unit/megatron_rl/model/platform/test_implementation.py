"""The choice of `training.transformer_impl` on a machine, and its record."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_helpers import tiny_run
from pydantic import ValidationError

from megatron_rl.contract.attempt_records import UsedKernels
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read
from megatron_rl.model.platform import implementation as module
from megatron_rl.model.platform.implementation import LOCAL, TRANSFORMER_ENGINE, Implementation, choose_implementation
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run.attempt import note_kernels

ON_GPUS: dict[str, Any] = {"model": {"dtype": "bf16"}, "job": {"device": "cuda", "gpus_per_node": 1}}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 16}


def run_on_gpus(asked: str, **sections: Any) -> RunConfig:
    return tiny_run(**ON_GPUS | {"training": {"steps": 1, "transformer_impl": asked}} | sections)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_missing", lambda: None)


@pytest.mark.usefixtures("installed")
def test_an_installed_transformer_engine_is_used_unless_the_recipe_says_otherwise() -> None:
    assert choose_implementation(run_on_gpus("auto")) == Implementation(TRANSFORMER_ENGINE, "it is installed")
    assert choose_implementation(run_on_gpus("transformer_engine")).name == TRANSFORMER_ENGINE
    assert choose_implementation(run_on_gpus("local")) == Implementation(LOCAL, "the recipe requests it")


def test_a_missing_transformer_engine_is_an_error_only_if_the_recipe_requests_it() -> None:
    found = choose_implementation(run_on_gpus("auto"))
    assert found.name == LOCAL
    assert found.reason == "transformer-engine is not installed: install transformer-engine 2.4 or later"
    with pytest.raises(ConfigurationError, match=r"transformer_impl is transformer_engine, but .*: install transf"):
        choose_implementation(run_on_gpus("transformer_engine"))


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"job": {"device": "cpu"}}, "job.device is cpu"),
        ({"model": {"dtype": "fp32"}}, "model.dtype is fp32"),
        ({"model": {"dtype": "bf16", **EXPERTS}}, "model.num_experts is set"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_runs_that_transformer_engine_does_not_support_use_megatron_core(sections: dict[str, Any], why: str) -> None:
    found = choose_implementation(run_on_gpus("auto", **sections))
    assert found.name == LOCAL
    assert found.reason.startswith(why)
    with pytest.raises(ValidationError, match=f"transformer_impl is transformer_engine, but {why}"):
        run_on_gpus("transformer_engine", **sections)


@pytest.mark.usefixtures("installed")
def test_products_are_in_fp8_if_the_recipe_says_so() -> None:
    found = choose_implementation(run_on_gpus("auto", training={"steps": 1, "fp8": "hybrid"}))
    assert found.fp8 == "hybrid"
    assert found.transformer_overrides["fp8"] == "hybrid"
    assert "fp8" not in choose_implementation(run_on_gpus("auto")).transformer_overrides


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"training": {"transformer_impl": "local"}}, "training.transformer_impl is local"),
        ({"training": {"recompute": "full"}}, "training.recompute is full"),
        ({"model": {"dtype": "fp32"}}, "model.dtype is fp32"),
    ],
)
def test_fp8_is_refused_if_it_is_not_supported(sections: dict[str, Any], why: str) -> None:
    sections["training"] = {"steps": 1, "fp8": "e4m3"} | sections.get("training", {})
    with pytest.raises(ValidationError, match=f"training.fp8 is e4m3, but {why}"):
        run_on_gpus("auto", **sections)


def test_fp8_is_refused_without_transformer_engine() -> None:
    with pytest.raises(ConfigurationError, match=r"fp8 is e4m3, which needs Transformer Engine, but .* 2.4 or later$"):
        choose_implementation(run_on_gpus("auto", training={"steps": 1, "fp8": "e4m3"}))


def test_the_choice_is_logged_and_recorded_with_the_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = RunDir(tmp_path).attempt(1)
    kernels = SimpleNamespace(attention_kernels="flash-attn 2.8.3", graph_recorder=lambda *_: None)
    platform: Any = SimpleNamespace(kernels=kernels)
    chosen = Implementation(LOCAL, "the recipe requests it")
    with caplog.at_level(logging.INFO):
        note_kernels(attempt, run_on_gpus("local"), chosen, platform)  # the folder does not exist
        attempt.folder.mkdir(parents=True)
        note_kernels(attempt, run_on_gpus("local"), chosen, platform)
    recorded = read(UsedKernels, attempt.kernels)
    decoding = recorded.decoding
    assert decoding.startswith(
        "operation by operation: this device has no kernel for pages of 48 tokens in bf16; a GPU has one"
    )
    assert recorded == UsedKernels(
        LOCAL, "the recipe requests it", "flash-attn 2.8.3", decoding=decoding, experts="none"
    )
    first, failed, second = (record.getMessage() for record in caplog.records)
    assert (
        first
        == second
        == (
            "transformer_impl: local (the recipe requests it); attention: flash-attn 2.8.3; fp8: None; "
            f"decoding: {decoding}; experts: none"
        )
    )
    assert str(attempt.kernels) in failed
