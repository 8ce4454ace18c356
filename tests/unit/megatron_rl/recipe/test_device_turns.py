"""The order in which a vLLM and the ranks that train share devices."""

from __future__ import annotations

import pytest

from megatron_rl.recipe.device_turns import ENGINE, TurnStage, sleeps, stages
from megatron_rl.recipe.job import Offload


def held(offload: Offload) -> dict[str, set[str]]:
    return {stage.act: set(stage.on_device) for stage in stages(offload)}


def test_with_everything_off_loaded_each_side_trains_or_generates_alone() -> None:
    assert held("optimizer") == {
        "generate": {"engine weights", "KV cache"},
        "pause": {"engine weights", "KV cache"},
        "sleep": {"engine weights", "KV cache"},
        "fetch": {"weights"},
        "train": {"weights", "gradients", "activations"},
        "update": {"weights", "gradients", "optimizer"},
        "stow": {"weights", "gradients", "optimizer"},
        "measure": {"weights"},
        "wake weights": {"weights", "engine weights"},
        "send": {"weights", "engine weights", "bucket"},
        "put away": {"weights", "engine weights", "bucket"},
        "wake cache": {"engine weights", "KV cache"},
        "probe": {"engine weights", "KV cache"},
        "resume": {"engine weights", "KV cache"},
    }


def test_buffers_keep_adams_state_and_weights_on_the_device() -> None:
    found = held("buffers")
    assert found["generate"] == {"engine weights", "KV cache", "weights", "optimizer"}
    assert found["train"] == {"weights", "optimizer", "gradients", "activations"}
    assert "fetch" not in found and "sleep" in found


def test_without_off_loading_the_engine_pauses_and_never_sleeps() -> None:
    acts = [stage.act for stage in stages("none")]
    without_sleep = ("train", "update", "stow", "measure", "send", "put away", "probe", "resume")
    assert acts == ["generate", "pause", *without_sleep]
    assert all(stage.on_device >= ENGINE | {"weights"} for stage in stages("none"))


@pytest.mark.parametrize("offload", ["none", "buffers", "optimizer"])
def test_a_step_ends_as_it_began(offload: Offload) -> None:
    first, *_, last = stages(offload)
    assert first == TurnStage("generate", last.on_device)


@pytest.mark.parametrize("offload", ["buffers", "optimizer"])
def test_a_cache_is_never_beside_what_only_training_needs(offload: Offload) -> None:
    assert sleeps(offload)
    for stage in stages(offload):
        if "KV cache" in stage.on_device:
            assert not stage.on_device & {"gradients", "activations", "bucket"}, stage
