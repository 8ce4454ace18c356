"""Recipes rehearsed at their true size by the code of a run, beside what the plan says that they need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from launcher.backends.rehearsal import COMMAND, Rehearsal, answer, request
from launcher.cluster.choice import load_clusters
from launcher.plan.gpu_memory import CONTEXT_BYTES, rank_memory, tokens_known
from launcher.plan.kinds import rank_kinds
from launcher.plan.summary import gpu_bytes, make_plan
from launcher.recipe.load import load_recipe, shipped_recipes

Rehearse = Callable[..., list[tuple[Rehearsal, int]]]

LAYOUTS = {
    "32b: nothing computed again": ("qwen2.5-32b-dapo", "training.recompute=none"),
    "32b: layers computed again": ("qwen2.5-32b-dapo", "training.recompute=full"),
    "32b: stages": ("qwen2.5-32b-dapo", "placement.training.tp=4", "placement.training.pp=2"),
    "3b: whole": ("qwen2.5-3b-dapo", "placement.training.tp=1", "placement.training.sequence_parallel=false"),
    "3b: norms on all ranks": ("qwen2.5-3b-dapo", "placement.training.sequence_parallel=false"),
    "3b: a reference": ("qwen2.5-3b-dapo", "grpo.kl_beta=0.1"),
}
NORMAL = ("qwen2.5-32b-dapo", "qwen2.5-32b-dapo-partitioned")


@pytest.fixture(scope="module")
def rehearsed() -> Iterator[Rehearse]:
    """(recipe, overrides) -> what a rank of each kind did, and the bytes that were planned for it. One process has
    imported torch for all of them."""
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def rehearse(recipe: str, *overrides: str) -> list[tuple[Rehearsal, int]]:
            asked = load_recipe(recipe, overrides)
            config, sizes = asked.config, make_plan(asked, None).sizes
            tokens = tokens_known(config)
            assert tokens is not None
            found = []
            for kind in rank_kinds(sizes):
                ask.write(request(config, tokens, kind))
                ask.flush()
                memory = rank_memory(config, sizes, config.model.padded_vocab_size(tokens), kind.role, kind.stage)
                found.append((answer(kind, answers.readline()), memory.tensors))
            return found

        try:
            yield rehearse
        finally:
            process.kill()


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name in NORMAL else pytest.mark.slow) for name in shipped_recipes()],
)
def test_a_shipped_recipe_goes_through_as_planned_and_fits(rehearsed: Rehearse, recipe: str) -> None:
    limit = gpu_bytes(load_recipe(recipe).config, load_clusters().choose_profile("h100", None)[1])
    for rank, planned in rehearsed(recipe):
        assert rank.failure is None
        if limit is not None:  # else it is a CPU's, whose attention holds other things than that of a GPU in fp32
            assert planned == pytest.approx(rank.peak_bytes, rel=0.05), rank
        assert limit is None or rank.peak_bytes + CONTEXT_BYTES < limit, rank


@pytest.mark.slow
@pytest.mark.parametrize("asked", LAYOUTS.values(), ids=LAYOUTS)
def test_other_layouts_need_what_is_planned(rehearsed: Rehearse, asked: tuple[str, ...]) -> None:
    for rank, planned in rehearsed(*asked):
        assert rank.failure is None
        assert planned == pytest.approx(rank.peak_bytes, rel=0.05), rank


@pytest.mark.slow
def test_few_layers_tell_what_all_of_them_need() -> None:
    """In every phase and by every holder, to the rounding of a buffer."""
    program = """
from dataclasses import asdict
import megatron_rl.platform.megatron_core
from launcher.recipe.load import load_recipe
from megatron_rl.rehearse.run import _at_depth, rehearse
config = load_recipe("qwen2.5-3b-dapo", ["model.num_layers=12"]).config
whole = asdict(_at_depth(config, 16, 0, "colocated", 151936, 12))
few = rehearse(config, 16, 0, "colocated", 151936)
assert few["parameters"] == whole["parameters"]
assert list(few["phases"]) == list(whole["phases"])
for name, held in whole["phases"].items():
    assert held.keys() == few["phases"][name].keys(), (name, held, few["phases"][name])
    for holder, size in held.items():
        assert abs(few["phases"][name][holder] - size) <= 2**20, (name, holder, few["phases"][name][holder], size)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr


PLANTED = """
import json, sys
import megatron_rl.platform.megatron_core
import torch
from launcher.recipe.load import load_recipe
from megatron_rl.algorithms import loss
from megatron_rl.inference import model_runner
from megatron_rl.model.layers import PackedLayer
from megatron_rl.rehearse.run import rehearse
from megatron_rl.training import trainer
from unittest import mock

config = load_recipe("demo", ["model.num_layers=1"]).config

def failure(config=config, vocab=14):
    return rehearse(config, 2, 0, "colocated", vocab)["failure"]

def on_the_cpu(logits, *rest):
    return logits.new_zeros(3, 3) + torch.zeros(3, 3)

def of_another_shape(tokens, *rest):
    return tokens.logprobs @ tokens.logprobs[1:], None

from megatron_rl.model.config import ModelConfig
found = [failure()]
with mock.patch.object(model_runner, "sample", on_the_cpu):
    found.append(failure())
with mock.patch.object(trainer, "grpo_loss", of_another_shape):
    found.append(failure())
with mock.patch.object(PackedLayer, "through", lambda *_: 1 / 0):
    found.append(failure())
found.append(failure(vocab=10**6, config=config.model_copy(update={
    "model": config.model.model_copy(update={"vocab_size": 14})})))
print(json.dumps(found))
"""


def test_what_would_fail_on_a_gpu_fails_by_name() -> None:
    """The faults are planted: a tensor of the wrong device, one of the wrong shape, an error of the code, and a model
    that is too small for its tokenizer."""
    ran = subprocess.run([sys.executable, "-c", PLANTED], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    none, device, shape, error, tokens = json.loads(ran.stdout)
    assert none is None
    assert device["phase"] == "generate"
    assert "two devices" in device["error"] or "DeviceMismatch" in device["error"]
    assert "megatron_rl/inference/model_runner.py" in device["where"]
    assert shape["phase"] == "train"
    assert "size" in shape["error"]
    assert "megatron_rl/training/trainer.py" in shape["where"]
    assert (error["phase"], error["error"]) == ("generate", "ZeroDivisionError: division by zero")
    assert tokens["phase"] == "build"
    assert "model.vocab_size 14 is less than" in tokens["error"]
    assert "megatron_rl/model/policy.py" in tokens["where"]
