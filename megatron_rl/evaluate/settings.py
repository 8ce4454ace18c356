"""What scores depend on, written down beside them, and the file that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_rl.agent.api import Environment
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.paths import RunDir
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.standalone.policy import OpenedPolicy
from megatron_rl.standalone.source import Source


def settings_of(
    evaluation: Evaluation,
    opened: OpenedPolicy,
    environment: Environment,
    sets: Mapping[str, Sequence[Problem]],
    rows: int,
) -> dict[str, Any]:
    """All that the scores depend on, as JSON. Not the number of threads: it changes no more than how some products are
    rounded, and a job may come back on a node that has others."""
    asked, source = evaluation.evaluate, opened.source
    return {
        "checkpoint": {
            "path": str(source.folder),
            "name": source.name,
            "kind": source.kind,
            "step": source.step,
            "policy_version": opened.engine.policy_version,
            "digest": opened.digest,
            "dtype": source.model.dtype,
        },
        "environment": evaluation.environment.model_dump(mode="json"),
        "prompt_format": environment.prompt_format,
        "compares_answers": environment.compares_answers,
        "sets": {name: asdict(ProblemDigest.of(problems)) for name, problems in sets.items()},
        "sampling": evaluation.sampling.model_dump(mode="json"),
        "k": asked.k,
        "greedy": asked.greedy,
        "seed": asked.seed,
        "golden": {name: golden_digest(problems) for name, problems in sets.items()},
        "device": asked.device,
        "rows": rows,
        "version": version("mrl"),
        "code": asked.code,
    }


def default_out(
    source: Source, evaluation: Evaluation, sets: Mapping[str, Sequence[Problem]], settings: Mapping[str, Any]
) -> Path:
    """The same place for the same settings, and another one for others."""
    folder, name = Path("evaluations"), source.name
    if source.step is not None:
        run = RunDir(source.folder.parent.parent)
        folder, name = run.evaluation_results, source.folder.name
    of = f"{stable_key(repr(settings)):016x}"[:8]
    return folder / f"{name.replace('/', '-')}.{evaluation.environment.name}.{'-'.join(sets)}.{of}.json"


def golden_digest(problems: Sequence[Problem]) -> str:
    """Of what answers to the problems are judged by. Of what JSON does not know the type alone counts, for its text may
    be another one in every process."""
    hashed = hashlib.sha256()
    for problem in problems:
        known = json.dumps(dict(problem.golden), skipkeys=True, default=lambda value: type(value).__qualname__)
        hashed.update(known.encode() + b"\n")
    return hashed.hexdigest()[:16]
