"""Rehearsals in child processes, one for every kind of rank, since the launcher itself imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launcher.host.process.limited import run_limited
from launcher.plan.placement import RankKind, rank_kinds
from launcher.plan.sizes import Sizes
from megatron_rl.contract.children import module_command
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.teacher_files import TeacherFiles

COMMAND = tuple(module_command("megatron_rl.run.rehearse"))
LIMIT_S = 600.0  # seconds for one rank


@dataclass(frozen=True, slots=True)
class RehearsalFailure:
    phase: str
    error: str
    where: str


@dataclass(frozen=True, slots=True)
class RehearsedRank:
    kind: RankKind
    parameters: int
    phases: Mapping[str, Mapping[str, int]]
    failure: RehearsalFailure | None

    @property
    def peak_bytes(self) -> int:
        return max((sum(held.values()) for held in self.phases.values()), default=0)


@dataclass(frozen=True)
class RehearsedTeachers:
    """Teachers whose shapes are known; others are left out."""

    held: Sequence[TeacherFiles] = ()  # on the training ranks
    of_replicas: TeacherFiles | None = None


def rehearse(
    config: RunConfig, vocab: int, kinds: Sequence[RankKind], teachers: RehearsedTeachers
) -> list[RehearsedRank]:
    """Rehearse one rank of each kind. vocab: size of the vocabulary."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda kind: _rehearse(config, vocab, kind, teachers), kinds))


def rehearsed_kinds(
    config: RunConfig, sizes: Sizes, teachers: RehearsedTeachers = RehearsedTeachers()
) -> list[RankKind]:
    """Return the kinds of ranks that can be rehearsed: not those of an engine that divides their memory itself, nor
    those of a teacher whose shape is unknown."""
    left_out = {one.kind for one in sizes.fixed if one.starts_workers or teachers.of_replicas is None}
    if capabilities_of(config.inference.engine).starts_workers:
        left_out.add("inference")
    return [kind for kind in rank_kinds(sizes) if kind.role not in left_out]


def request(config: RunConfig, vocab: int, kind: RankKind, teachers: RehearsedTeachers = RehearsedTeachers()) -> str:
    asked: dict[str, Any] = {"world": kind.world, "rank": kind.rank, "role": kind.role, "vocab": vocab}
    known = [teachers.of_replicas] if kind.role == "teacher" else teachers.held
    asked["teachers"] = [
        {"model": one.model.model_dump(mode="json"), "tokens": one.tokens or vocab} for one in known if one
    ]
    return json.dumps({"config": config.model_dump(mode="json"), **asked}) + "\n"


def answer(kind: RankKind, said: str) -> RehearsedRank:
    """Parse the last line of COMMAND's output; libraries may print something before it."""
    done: dict[str, Any] = json.loads(said.splitlines()[-1])
    failure = None if done["failure"] is None else RehearsalFailure(**done["failure"])
    return RehearsedRank(kind, done["parameters"], done["phases"], failure)


def _rehearse(config: RunConfig, vocab: int, kind: RankKind, teachers: RehearsedTeachers) -> RehearsedRank:
    try:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = run_limited(COMMAND, LIMIT_S, environ, request(config, vocab, kind, teachers).encode())
        if ran.returncode == 0:
            return answer(kind, ran.stdout.decode("utf-8", "replace"))
        said = [line for line in ran.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        error = said[-1] if said else f"exit code {ran.returncode}"
    except subprocess.TimeoutExpired:
        error = f"did not end within {LIMIT_S:.0f} s"
    except OSError as refusal:  # no memory left for another process
        error = str(refusal)
    return RehearsedRank(kind, 0, {}, RehearsalFailure("start", error, COMMAND[-1]))
