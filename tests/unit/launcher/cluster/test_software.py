"""Image and Python of the ranks, and of vLLM's replicas, which may have their own."""

from __future__ import annotations

import sys

import pytest

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, rank_python, replica_image, replica_python
from launcher.errors import BadInput
from launcher.fetch.needs import needs
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import TEACHER
from megatron_rl.recipe.config import RunConfig

POD = Profile.model_validate({"gpus_per_node": 8, "run_root": "/r", "python": "/p", "container": {"image": "a:b"}})
BARE = POD.model_copy(update={"container": None})


def config(*overrides: str) -> RunConfig:
    return load_recipe("qwen2.5-32b-dapo-partitioned", ["inference.engine=vllm", *overrides]).config


def test_replicas_run_as_the_ranks_do_unless_the_recipe_says_otherwise() -> None:
    found = rank_image(config(), POD), replica_image(config(), POD), replica_python(config(), POD)
    assert found == ("a:b", None, "/p")
    same = config("inference.vllm.image=a:b")
    assert replica_image(same, POD) is None, "there is one image to import and unpack"


def test_replicas_in_an_image_of_their_own_use_its_python() -> None:
    own = config("inference.vllm.image=c:d")
    assert (replica_image(own, POD), replica_python(own, POD), rank_python(POD)) == ("c:d", "python3", "/p")
    assert replica_python(config("inference.vllm.image=c:d", "inference.vllm.python=/v"), POD) == "/v"


def test_a_teacher_in_vllm_has_the_image_of_the_run_s_vllm_and_a_native_one_that_of_the_ranks() -> None:
    teacher = ("job.nodes=9", "grpo.dynamic_sampling.enabled=false")
    teacher += ("distill={teacher: some/teacher, replicas: {nodes: 1, engine: vllm}}",)
    both = config("inference.vllm.image=c:d", *teacher)
    assert (replica_image(both, POD), replica_python(both, POD, TEACHER)) == ("c:d", "python3")
    only = config("inference.engine=native", *teacher, "distill.replicas.vllm.image=e:f")
    assert (replica_image(only, POD), replica_python(only, POD, TEACHER)) == ("e:f", "python3")
    assert replica_python(only, POD) == "/p", "the replicas that generate are native"
    with pytest.raises(BadInput, match="a run has one image with vLLM"):
        config("inference.vllm.image=c:d", *teacher, "distill.replicas.vllm.image=e:f")


@pytest.mark.parametrize("profile", [BARE, None])
def test_an_image_means_nothing_without_containers(profile: Profile | None) -> None:
    own = config("inference.vllm.image=c:d")
    assert (rank_image(own, profile), replica_image(own, profile)) == (None, None)
    assert replica_python(own, profile) == ("/p" if profile else sys.executable)


def test_both_images_are_prefetched() -> None:
    def images(asked: RunConfig) -> list[str]:
        return [need.name for need in needs(asked, POD) if need.kind == "image"]

    assert images(config("inference.vllm.image=c:d", "image.reference=e:f")) == ["e:f", "c:d"]
    assert images(config()) == ["a:b"]
