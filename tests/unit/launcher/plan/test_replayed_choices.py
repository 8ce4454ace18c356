"""The plan's bytes of choices of experts are those that an engine, its messages and a step hold."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from core_helpers import batch_of, build_run, tiny_model, tiny_run

from launcher.plan.placement import place
from launcher.plan.replayed_choices import choice_bytes, choices_on_device
from launcher.plan.sizes import Sizes
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.learn.training.router_replays import RouterReplays
from megatron_rl.model.choices import encode_choices
from megatron_rl.model.platform.device import Device
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.inference import InferenceConfig

PROMPT, ANSWER = 20, 12
MODEL = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 24,
    "num_layers": 6,
    "dense_layers": 1,
    "tied_embeddings": False,
}


def recipe(replay: str, **sections: Any) -> RunConfig:
    """Sequences of full length fill a micro-batch each."""
    return tiny_run(
        model=tiny_model(**MODEL, router_replay=replay).model_dump(),
        sampling={"max_new_tokens": ANSWER},
        training={"sequence_length": PROMPT + ANSWER, "tokens_per_microbatch": PROMPT + ANSWER},
        **sections,
    )


def sizes_of(config: RunConfig) -> Sizes:
    return place(config.job, config.placement, None, config.model, config.inference.engine).sizes


def answered(config: RunConfig, platform: Device, groups: Any) -> tuple[Any, list[TrajectoryGroup]]:
    """A run, and answers of its engine to the prompts of a step, none of which ends early."""
    run = build_run(config, platform, groups)
    engine = Engine(run.trainer.policy, config.model, InferenceConfig(max_batch=16), set())
    prompts = [[(7 * key + at) % 13 for at in range(PROMPT)] for key in range(config.grpo.prompts_per_step)]
    asked = [GenerationRequest(each, config.grpo.group_size, config.sampling, key) for key, each in enumerate(prompts)]

    async def together() -> Sequence[list[Completion]]:
        return await asyncio.gather(*map(engine.generate, asked))

    found = []
    for number, completions in enumerate(asyncio.run(together())):
        answers = [Trajectory.single(prompts[number], one, "", at % 2) for at, one in enumerate(completions)]
        found.append(TrajectoryGroup(number, Problem("", {}), answers, {}))
    return run, found


@pytest.mark.parametrize("replay", ["rollout", "old"])
def test_a_device_has_the_choices_of_all_tokens_of_a_step(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, replay: str
) -> None:
    config = recipe(replay)
    run, batch = answered(config, platform, groups)
    made, of = [], RouterReplays.of
    monkeypatch.setattr(RouterReplays, "of", lambda *args: made.append(of(*args)) or made[-1])
    run.trainer.train(batch_of(batch, 0, len(batch)), 1)
    held = 0
    for each in made:
        held += sum(
            part.nbytes for part in ((each._given, each._known) if replay == "rollout" else each._of_layers.values())
        )
    (planned,) = choices_on_device(config, sizes_of(config), range(config.model.num_layers))
    length = config.sequence_length
    assert planned.bytes * (length - 1) == held * length, "no pass needs an answer's last token"
    (of_stage,) = choices_on_device(config, sizes_of(config), range(3, 6))
    assert of_stage.bytes < 0.7 * held


def test_choices_on_hosts_and_in_messages_are_those_of_an_engine(platform: Any, groups: Any) -> None:
    config = recipe("rollout")
    _, batch = answered(config, platform, groups)
    apart = recipe(
        "rollout",
        job={"nodes": 2},
        placement={"mode": "partitioned", "inference": {"nodes": 1}},
        resume={"partial": "keep"},
        grpo={"importance": {"upper": 2.0}},
        **{"async": {"max_lag": 1}},
    )
    alone, planned = (choice_bytes(each, sizes_of(each)) for each in (config, apart))
    assert alone and planned
    known = [[trajectory.sequences[0].choices for trajectory in group.trajectories] for group in batch]
    assert {len(entry) for group in known for choices in group for entry in choices} == {planned.token}
    entries = {id(entry): entry for group in known for choices in group for entry in choices}
    places = sum(len(choices) for group in known for choices in group)
    held = sum(map(sys.getsizeof, entries.values())) + 8 * places
    sent = sum(
        len(json.dumps(encode_choices(choices, group[0] if at else [])))
        for group in known
        for at, choices in enumerate(group)
    )
    assert alone.exchanged == 0
    assert planned.exchanged == pytest.approx(sent, rel=0.1)
    assert alone.host == pytest.approx(held, rel=0.1)
    assert planned.host == 2 * alone.host


def test_without_replay_by_an_engine_nothing_is_planned() -> None:
    for replay in ("off", "old"):
        config = recipe(replay)
        assert choice_bytes(config, sizes_of(config)) is None
    config = recipe("off")
    assert [*choices_on_device(config, sizes_of(config), range(6))] == []
