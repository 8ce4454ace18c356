"""The agent of many drivers, and the groups that their ranks trained on."""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from replica_fleet import logprobs_of, tokens_of

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig

PROBLEMS = [Problem(str(number), {}) for number in range(9973)]


def prompt_of(problem: Problem) -> list[int]:
    return [int(digit) for digit in problem.prompt]


class Pupil(GroupedRolloutGenerator):
    """An agent that answers in one turn; an answer is right if its first token is 1."""

    def training_problems(self) -> Sequence[Problem]:
        return PROBLEMS

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        prompt = prompt_of(request.problem)
        asked = GenerationRequest(prompt, request.group_size, request.sampling, request.key, request.ordinal)
        answers = [
            Trajectory.single(prompt, one, "", float(one.tokens[0])) for one in await request.inference.generate(asked)
        ]
        return TrajectoryGroup(request.ordinal, request.problem, answers, {})


class Answer(NamedTuple):
    """One trained answer, in few bytes."""

    tokens: bytes
    logprobs: bytes
    versions: bytes
    reward: float


class Trained(NamedTuple):
    """A group that one rank trained on."""

    position: int
    ordinal: int
    answers: list[Answer]


@dataclass
class Ledger:
    """Groups that each rank trained on, and its view of the replicas."""

    trained: defaultdict[int, dict[int, tuple[int, list[Trained]]]] = field(default_factory=lambda: defaultdict(dict))
    """Step -> rank -> its training replica, and the groups."""
    links: Counter[int] = field(default_factory=Counter)
    """Driver -> most replicas that it was connected to, seen once a step."""
    resident: dict[int, int] = field(default_factory=dict)
    """Step -> bytes of the process."""

    def batch(self, step: int) -> list[Trained]:
        """Return the groups of a step, by position, each of which all ranks of one replica have trained on."""
        replicas: dict[int, list[Trained]] = {}
        for replica, its in self.trained[step].values():
            assert its == replicas.setdefault(replica, its), f"ranks of replica {replica} differ in step {step}"
        found = sorted(group for its in replicas.values() for group in its)
        assert [group.position for group in found] == [*range(len(found))]
        return found

    def note(self, step: int, groups: Groups, trained: list[Trained], links: int) -> None:
        rank, driver = groups.control.rank, groups.data.rank()
        assert rank not in self.trained[step], f"rank {rank} trains twice in step {step}"
        self.trained[step][rank] = driver, trained
        self.links[driver] = max(self.links[driver], links)
        if rank == 0:
            self.resident[step] = resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_bytes(logprobs: Sequence[float]) -> bytes:
    return array("d", logprobs).tobytes()


def trained(group: TrajectoryGroup, position: int) -> Trained:
    answers = []
    for one in group.trajectories:
        answer = slice(one.prompt_length, None)
        tokens, versions = bytes(one.tokens[answer]), bytes(one.versions[answer])
        answers.append(Answer(tokens, in_bytes(one.logprobs[answer]), versions, one.reward))
    return Trained(position, group.ordinal, answers)


def is_right(group: Trained, problem: Problem, config: RunConfig, versions: range) -> bool:
    """Whether the answers are those to the problem under one key, and the tokens are of these versions. A prompt that
    is begun while a version is on its way has the key of the previous version, and waits for the new one. Before the
    first version of an attempt that is -1."""
    prompt, longest = prompt_of(problem), config.sampling.max_new_tokens
    tokens = [tokens_of(prompt, sample, longest) for sample in range(config.grpo.group_size)]
    begun = {-1, *range(versions.start - 1, versions.stop)}
    keys = [group_key(config.training.seed, group.ordinal, 0, version) for version in begun]
    possible = [[logprobs_of(key, sample, len(its)) for sample, its in enumerate(tokens)] for key in keys]
    return (
        [(answer.tokens, answer.reward) for answer in group.answers] == [(bytes(its), its[0]) for its in tokens]
        and {version for answer in group.answers for version in answer.versions} <= {*versions}
        and [answer.logprobs for answer in group.answers] in [[*map(in_bytes, each)] for each in possible]
    )
