"""A teacher in vLLM: its log-probs beside those of the frozen one on the training ranks, and a run that loses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import (
    CPU,
    PADDED_VOCAB,
    build_run,
    full_forward,
    quiet_safe_points,
    random_groups,
    tiny_run,
    trajectory,
)
from hf_helpers import SIZES, publish
from loop_helpers import lines_of, prepare
from vllm_front import PYTHON_VARIABLE, START_S, Front, LocalRun, is_there, until

from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.paths import TEACHER
from megatron_rl.generate.replicas.fixed_replicas import running_replicas
from megatron_rl.learn.distill.served import ServedTeacher
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError

CLOSE = 1e-3
"""Largest difference of log-probs in fp32."""
LONGEST = 64
MODEL = SIZES | {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": LONGEST,
    "vocab_size": PADDED_VOCAB,
}
"""Heads of 32, the smallest that vLLM has on a CPU, and no position more than the longest sequence needs."""
ALPHABET = "0123456789+-=*"
TOP = 12


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    publish(folder, MODEL)
    (folder / "tokenizer.json").unlink()  # that of another alphabet
    return folder


def recipe(teacher: Path, replicas: dict[str, Any] | None) -> RunConfig:
    return tiny_run(
        job={"nodes": 2 if replicas else 1},
        model=tiny_run().model.model_dump() | {"max_position_embeddings": LONGEST},
        tokenizer={"alphabet": ALPHABET},
        distill={"teacher": str(teacher), "replicas": replicas, "divergence": {"kind": "forward", "top_k": TOP}},
    )


def test_the_log_probs_of_vllm_are_those_of_the_frozen_teacher(
    teacher: Path, tmp_path: Path, platform: Any, groups: Any
) -> None:
    objective: Any = build_run(recipe(teacher, None), platform, groups).trainer.objective
    [judge] = objective.judges._teachers
    frozen = judge.teacher.policy
    asked = [one for group in random_groups(6, 4, longest=20) for one in group.trajectories]
    asked.append(trajectory([1], [place % (PADDED_VOCAB - 2) for place in range(LONGEST - 1)]))  # of full length
    expected, likeliest = [], []
    for one in asked:
        logprobs = torch.log_softmax(full_forward(frozen, one.tokens)[:-1].float(), -1)
        found = logprobs.gather(1, torch.tensor(one.tokens[1:])[:, None])[:, 0]
        expected.append(found[torch.tensor(one.loss_mask[1:])])
        likeliest.append(logprobs[torch.tensor(one.loss_mask[1:])].topk(TOP, 1))
    apart = recipe(teacher, {"nodes": 1, "engine": "vllm", "vllm": {"python": os.environ[PYTHON_VARIABLE]}})
    run = prepare(tmp_path / "run", apart.model_dump())
    with Front(run, kind=TEACHER) as front:
        front.wait_until_it_answers()
        roster = running_replicas(run, run.attempt(1), TEACHER, START_S)
        points = quiet_safe_points()
        served = ServedTeacher(roster, CharacterTokenizer(ALPHABET), groups, points, START_S, top_k=TOP)
        served.check()
        logprobs, top = served.judged(asked, CPU)
        assert (logprobs - torch.cat(expected)).abs().max() < CLOSE
        assert top is not None
        values = torch.cat([each.values for each in likeliest])
        assert (top.logprobs[:, :-1] - values).abs().max() < CLOSE
        assert (top.logprobs.exp().sum(1) - 1).abs().max() < CLOSE
        apart = (values[:, :-1] - values[:, 1:]).amin(1) > 2 * CLOSE  # tokens whose order rounding does not decide
        tokens = torch.cat([each.indices for each in likeliest])
        assert apart.any() and torch.equal(top.tokens[apart][:, :-1].long(), tokens[apart][:, :-1])
        larger = CharacterTokenizer(ALPHABET + "/%()")
        with pytest.raises(ConfigurationError, match="the last one of the policy's tokenizer"):
            ServedTeacher(roster, larger, groups, points, START_S).check()


@pytest.fixture
def started() -> Iterator[list[LocalRun]]:
    """Runs, which end with the test."""
    runs: list[LocalRun] = []
    yield runs
    for run in runs:
        for command in run.commands:
            command.kill()


def test_a_run_waits_for_a_teacher_whose_engine_dies(teacher: Path, tmp_path: Path, started: list[LocalRun]) -> None:
    steps = 12
    run = LocalRun(
        tmp_path / "run",
        *("demo", "job.nodes=2", "job.gpus_per_node=1", f"model.max_position_embeddings={LONGEST}"),
        *(f"distill.teacher={teacher}", "distill.reward_weight=0.0", "distill.replicas.nodes=1"),
        *("distill.replicas.engine=vllm", f"distill.replicas.vllm.python={os.environ[PYTHON_VARIABLE]}"),
        *("model.init=from-scratch", "grpo.prompts_per_step=8", "grpo.group_size=8", "optimizer.learning_rate=1e-2"),
        *(f"training.steps={steps}", "evaluation.every=0", "save.every=20", f"job.silence_limit_s={int(START_S)}"),
    )
    started.append(run)
    run.wait_for_step(3)
    (core,) = (
        each for each in run.front(0, TEACHER).children(recursive=True) if "EngineCore" in " ".join(each.cmdline())
    )
    core.kill()
    until(lambda: not is_there(core), "the end of the engine")
    assert run.end() == 0, run.log()
    (state,) = read_replicas(run.dir.attempt(1), TEACHER)
    assert state.starts == 2 and "VllmGone: vLLM has" in (state.why or ""), state  # ended, or closed its socket first
    found = [line["teacher_kl"] for line in lines_of(run.dir.metrics)]
    assert len(found) == steps and sum(found[-3:]) < sum(found[:3])
