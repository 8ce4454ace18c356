"""Choice of the engine for `inference.engine: auto`."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import ClusterVllm, Profile
from launcher.plan.engine_choice import note_of, with_engine
from launcher.recipe.load import Recipe, dump_resolved, load_recipe
from megatron_rl.contract.paths import RunDir

RECIPE = "qwen3-1.7b-gsm8k"
IMAGE = "vllm/vllm-openai:v0.32.0"


def profile(image: str | None = IMAGE) -> Profile:
    return load_clusters().profile("h100").model_copy(update={"vllm": ClusterVllm(image=image) if image else None})


def chosen(*overrides: str, cluster: Profile | None, recipe: str = RECIPE) -> Recipe:
    return with_engine(load_recipe(recipe, overrides), cluster, [])


def test_on_gpus_the_vllm_that_the_profile_names_is_chosen_and_recorded() -> None:
    found = chosen(cluster=profile())
    assert found.config.inference.engine == "vllm"
    assert found.config.inference.own_vllm is not None
    assert found.config.inference.own_vllm.image == IMAGE
    assert note_of(found) == f"inference.engine auto is vllm: the profile names {IMAGE}"
    assert "engine: vllm" in dump_resolved(found.config)
    assert found.overrides == ("inference.engine=vllm", f"inference.vllm.image={IMAGE}"), "as the resume command has it"
    assert found.config.grpo.importance is not None, "a default that follows from the engine"


def test_without_a_vllm_mrls_own_engine_generates() -> None:
    found = chosen(cluster=profile(image=None))
    assert found.config.inference.engine == "native"
    assert note_of(found) == (
        "inference.engine auto is native: the profile names no vLLM, and inference.vllm is not given"
    )


def test_on_this_machine_the_python_of_the_ranks_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(cluster=None).config.inference.engine == "native"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"vllm": "0.32.0"}[name])
    found = chosen(cluster=None)
    assert found.config.inference.engine == "vllm"
    assert note_of(found) == "inference.engine auto is vllm: the Python of the ranks has vLLM 0.32.0"


def test_a_recipe_that_says_how_to_start_vllm_gets_it() -> None:
    found = chosen("inference.vllm.python=/opt/vllm/bin/python", cluster=profile(image=None))
    assert found.config.inference.engine == "vllm"
    assert note_of(found) == "inference.engine auto is vllm: the recipe says where it is"


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_an_engine_that_the_recipe_names_stays(engine: str) -> None:
    found = chosen(f"inference.engine={engine}", "inference.page_tokens=256", cluster=profile())
    assert (found.config.inference.engine, note_of(found)) == (engine, None)


def test_a_recipe_with_vllm_gets_the_image_of_the_profile() -> None:
    found = chosen(cluster=profile(), recipe="qwen2.5-32b-dapo-partitioned")
    assert found.config.inference.own_vllm is not None
    assert (found.config.inference.own_vllm.image, note_of(found)) == (IMAGE, None)


@pytest.mark.parametrize("recipe", ["demo", "smollm2-135m-chain-sum", "demo-supervised"])
def test_on_cpus_nothing_is_chosen(recipe: str) -> None:
    found = chosen(cluster=profile(), recipe=recipe)
    assert (found.config.inference.engine, found.overrides, note_of(found)) == ("native", (), None)


def test_what_vllm_cannot_do_is_the_reason_against_it() -> None:
    found = chosen("sampling.temperature=0.8", "sampling.top_p=0.9", cluster=profile())
    assert found.config.inference.engine == "native"
    assert "sampling.top_p" in str(note_of(found))


def test_a_vllm_that_does_not_fit_is_not_chosen() -> None:
    small = profile().model_copy(update={"gpu_memory_gib": 52.5})
    found = chosen("placement.offload=buffers", cluster=small)
    assert found.config.inference.engine == "native"
    assert "with vLLM a GPU would need" in str(note_of(found))


def test_a_run_that_has_begun_keeps_its_engine(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.resolved.write_text(dump_resolved(load_recipe(RECIPE).config))
    found = with_engine(load_recipe(RECIPE), profile(), [], run)
    assert (found.config.inference.engine, found.overrides) == ("native", ())
    run.resolved.write_text(dump_resolved(load_recipe(RECIPE, ["inference.engine=vllm"]).config))
    again = with_engine(load_recipe(RECIPE), profile(image=None), [], run)
    assert again.config.inference.engine == "vllm"
