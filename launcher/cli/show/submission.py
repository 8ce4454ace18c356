"""Lines and JSON about runs before they start: a dry run, a submission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.job.draft import Draft
from launcher.job.script import PlannedJob
from launcher.recipe.changes import as_json
from launcher.recipe.load import origins

if TYPE_CHECKING:  # a dry run does not need it, and it is slow to import
    from launcher.job.submit import SubmittedJob


def job_in_brief(job: PlannedJob) -> str:
    """Describe a job: `qwen on 8 nodes x 8 GPUs, colocated`; `4-8 nodes` for a range."""
    config = job.recipe.config
    kind = "CPU processes" if config.job.device == "cpu" else "GPUs"
    spare = f" and {job.plan.spare_nodes} spare" if job.plan.spare_nodes else ""
    nodes = f"{config.job.nodes} nodes" if job.plan.smaller else _nodes(job.plan.nodes)
    beside = f" with {config.inference.engine}" if config.shares_devices else ""
    return f"{config.name} on {nodes}{spare} x {job.plan.gpus_per_node} {kind}, {job.plan.mode}{beside}"


def dry_run_lines(draft: Draft) -> list[str]:
    return [
        f"would submit to {draft.job.cluster}: {job_in_brief(draft.job)}",
        f"  directory  {draft.job.run_dir}",
    ]


def dry_run_json(draft: Draft) -> dict[str, Any]:
    job = draft.job
    return {
        "cluster": job.cluster,
        "run_dir": str(job.run_dir),
        "plan": job.plan_json,
        "resolved": job.recipe.config.model_dump(mode="json"),
        "origins": {key: str(origin) for key, origin in origins(job.recipe).items()},
        "script": draft.script,
        "notes": list(draft.notes),
        "obstacles": list(draft.obstacles),
    }


def submitted_lines(submitted: SubmittedJob, draft: Draft, waits: Sequence[str], brief: bool) -> list[str]:
    from launcher.runs.find import pasteable_command
    from launcher.runs.state import result_file

    root = submitted.run.root
    result = result_file(submitted.run)
    if submitted.job_id is None and result:
        return [f"{root}: already finished, nothing to do; result: {result}"]
    if submitted.job_id is None:
        more = pasteable_command("resume", root.name, "training.steps=N")
        return [f"{root}: already finished, nothing to do; to train more: {more}"]
    waiting = f" after {' and '.join(waits)}" if waits else ""
    lines = [f"changed: {change}" for change in submitted.changes]
    lines.append(f"submitted job {submitted.job_id} to {draft.job.cluster}{waiting}: {job_in_brief(draft.job)}")
    if brief:
        return [*lines, f"  {root}"]
    return [
        *lines,
        f"  directory  {root}",
        *([f"  result     {result}, after it has finished"] if result else []),
        f"  state      {pasteable_command('status', root.name)}",
        f"  output     {pasteable_command('logs -f', root.name)}",
        f"  stop       {pasteable_command('cancel --drain', root.name)}",
    ]


def submitted_json(submitted: SubmittedJob, draft: Draft) -> dict[str, Any]:
    return {
        "cluster": draft.job.cluster,
        "run_dir": str(submitted.run.root),
        "job_id": submitted.job_id,
        "finished": submitted.job_id is None,
        "changes": as_json(submitted.changes),
        "notes": list(submitted.notes),
    }


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
