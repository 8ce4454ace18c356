"""Settings on which scores depend, which are stored with them, and the file name that follows from them."""

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
from megatron_rl.checkpoint.source import PolicySource
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.run.evaluate.blocks import OpenedEvaluation


def settings_of(
    evaluation: Evaluation,
    opened: OpenedEvaluation,
    environment: Environment,
    sets: Mapping[str, Sequence[Problem]],
    rows: int,
) -> dict[str, Any]:
    """Return all settings on which scores depend, as JSON. The number of threads is not among them: it only changes the
    rounding of some sums, and a job may resume on a node with another number."""
    source = opened.source
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
        "k": evaluation.k,
        "greedy": evaluation.greedy,
        "seed": evaluation.seed,
        "golden": {name: golden_digest(problems) for name, problems in sets.items()},
        "engine": opened.name,
        "device": evaluation.device,
        "rows": rows,
        "version": version("mrl"),
        "code": evaluation.code,
    }


def default_out(
    source: PolicySource, evaluation: Evaluation, sets: Mapping[str, Sequence[Problem]], settings: Mapping[str, Any]
) -> Path:
    """Return a path that is the same for the same settings, and different for others."""
    folder, name = Path("evaluations"), source.name
    if source.step is not None:
        run = RunDir(source.folder.parent.parent)
        folder, name = run.evaluation_results, source.folder.name
    of = f"{stable_key(repr(settings)):016x}"[:8]
    return folder / f"{name.replace('/', '-')}.{evaluation.environment.name}.{'-'.join(sets)}.{of}.json"


def golden_digest(problems: Sequence[Problem]) -> str:
    """Return a digest of the golden data that answers are judged by. A value that JSON cannot represent counts only by
    its type, since its text may differ between processes."""
    hashed = hashlib.sha256()
    for problem in problems:
        known = json.dumps(dict(problem.golden), skipkeys=True, default=lambda value: type(value).__qualname__)
        hashed.update(known.encode() + b"\n")
    return hashed.hexdigest()[:16]
