"""Evaluation of a checkpoint: its options, and from them the request of a process here or the run of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from launcher.backends.probe.vllm_probe import probe
from launcher.cluster.choice import Clusters
from launcher.doctor.preflight import problems, refuse_unready
from launcher.doctor.vllm_python import vllm_findings
from launcher.errors import BadInput
from launcher.job.evaluation_request import CheckpointRun, job_recipe, origin_of, refuse_ranks, requested
from launcher.runs.policy_path import prepare_policy
from launcher.start.request import PlannedRun
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.registry import required_extras

ASKED = ("k", "prompts", "greedy", "keep", "seed", "dtype", "threads", "tp", "replicas", "engine")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Options of `mrl evaluate`, by their names there; None: the run's value, or the default of the option."""

    env: str | None = None
    env_args: Sequence[str] = ()
    sets: Sequence[str] = ()
    k: int = 32
    prompts: int | None = None
    greedy: bool = True
    keep: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    date: str | None = None
    dtype: str | None = None
    device: str | None = None
    engine: str = "native"
    vllm_python: str | None = None
    tp: int = 1
    replicas: int = 1
    threads: int | None = None
    out: Path | None = None
    trust: bool = False


def evaluation_here(checkpoint: str, options: EvaluationOptions) -> Evaluation:
    """Return the request of an evaluation on this machine. Raises BadInput where it cannot run here."""
    refuse_unready(policy=checkpoint)
    path = prepare_policy(checkpoint, options.trust)
    evaluation = _evaluation(path, options, origin_of(path), device="cpu")
    if evaluation.ranks > 1:
        raise BadInput(
            f"--tp {evaluation.tp} --replicas {evaluation.replicas}: several ranks need a job; add --cluster, or "
            "let --engine vllm share the model out"
        )
    device, python = evaluation.device, evaluation.vllm_python
    refuse_unready(required_extras(evaluation.environment), device, evaluation.tp * evaluation.replicas)
    if python and (wrong := problems(vllm_findings(probe(python), device, None, "--vllm-python "))):
        raise BadInput(wrong)
    if options.out:
        _make_folder_of(options.out.absolute())
    return evaluation


def evaluation_job(
    checkpoint: str,
    options: EvaluationOptions,
    clusters: Clusters,
    cluster: str,
    run_dir: Path | None,
    *,
    writes: bool = True,
) -> PlannedRun:
    """Return the run of a job that evaluates. Raises BadInput. `writes`: whether to make the folder of the result."""
    from launcher.fetch.needs import known_caches
    from launcher.job.directories import refuse_unusable, run_name
    from launcher.runs.owner import refuse_others

    path = prepare_policy(checkpoint, options.trust)
    origin = origin_of(path)
    if options.engine != "native":
        raise BadInput("--engine vllm: a job evaluates with mrl's own engine; leave out --cluster to evaluate here")
    if options.out and writes:
        _make_folder_of(options.out.absolute())
    evaluation = _evaluation(_pinned(path, origin), options, origin, device="cuda")
    recipe = job_recipe(evaluation, origin, cluster, known_caches(clusters))
    refuse_ranks(evaluation, recipe.config, clusters.profile(cluster))
    if run_dir is not None:
        refuse_unusable(run_dir)
        refuse_others(RunDir(run_dir), options.trust)
    return PlannedRun(recipe, run_name(recipe.config.name, time.localtime()), run_dir, cluster)


def _evaluation(path: str, options: EvaluationOptions, origin: CheckpointRun | None, device: str) -> Evaluation:
    """device: default if neither the user nor a run says."""
    given = {name: getattr(options, name) for name in (*ASKED, *SAMPLING)}
    sampling = {name: given[name] for name in SAMPLING if given[name] is not None}
    asked: dict[str, Any] = {name: given[name] for name in ASKED} | {"checkpoint": path}
    asked["sets"] = tuple(options.sets) or None
    # The same for all ranks and attempts of a job.
    asked["date"] = options.date or (None if origin else date.today().isoformat())
    asked["device"] = options.device or (origin.config.job.device if origin else device)
    of_run = origin.config.inference.vllm if origin else None
    vllm_python = str(options.vllm_python or (of_run and of_run.python) or sys.executable)
    asked["vllm_python"] = vllm_python if options.engine == "vllm" else None
    asked["out"] = options.out and str(options.out.absolute())
    return requested(origin, options.env, options.env_args, sampling, asked)


def _pinned(path: str, origin: CheckpointRun | None) -> str:
    """Pin a job to the newest checkpoint of now, in case the run continues meanwhile."""
    checkpoint = Path(path)
    if origin and origin.run.root == checkpoint.absolute():
        return str(origin.run.checkpoint(origin.run.checkpoint_steps()[0]))
    return str(checkpoint.absolute()) if checkpoint.exists() else path


def _make_folder_of(out: Path) -> None:
    """Create the folder of the result, so that an error comes before hours of work. Raises BadInput."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--out {out}: the folder {out.parent} cannot be created: {error.strerror}; choose another file"
        ) from error
    if not os.access(out.parent, os.W_OK):
        raise BadInput(f"--out {out}: {out.parent} is not writable; choose another file")
