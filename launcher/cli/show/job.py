"""A Slurm job in words."""

from __future__ import annotations

from launcher.job.script import Job
from launcher.plan.placement import Plan


def describe(job: Job) -> str:
    """`qwen on 8 nodes x 8 GPUs, colocated`; `4-8 nodes` where the number may vary."""
    config = job.recipe.config
    kind = "CPU processes" if config.job.device == "cpu" else "GPUs"
    spare = f" and {job.plan.spare_nodes} spare" if job.plan.spare_nodes else ""
    nodes = f"{config.job.nodes} nodes" if job.plan.smaller else _nodes(job.plan.nodes)
    return f"{config.name} on {nodes}{spare} x {job.plan.gpus_per_node} {kind}, {job.plan.mode}"


def steps_in_words(plan: Plan) -> list[str]:
    """One line for the training step, one for all inference replicas."""
    train = next(step for step in plan.steps if step.replica is None)
    replicas = [step for step in plan.steps if step.replica is not None]
    lines = [f"train      {len(train.nodes) * train.tasks_per_node} ranks on {_nodes(len(train.nodes))}"]
    if replicas:
        ranks = len(replicas[0].nodes) * replicas[0].tasks_per_node
        nodes = len({node for step in replicas for node in step.nodes})
        lines.append(f"inference  {len(replicas)} replicas of {ranks} ranks on {_nodes(nodes)}")
    return lines


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
