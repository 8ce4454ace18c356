"""Costs of the launcher: the files of a job, and what the batch host reads of its ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from scale_rows import Cost, Row, cpu_seconds

from launcher.cluster.choice import load_clusters
from launcher.job.draft import in_directory
from launcher.job.script import PlannedJob, render
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import read, write
from megatron_rl.contract.shapes import from_json

NODES = (8, 64, 512, 2048)
FORMS = {
    "co-located": lambda nodes: ("qwen2.5-32b-dapo", f"job.nodes={nodes}"),
    "partitioned": lambda nodes: (
        "qwen2.5-32b-dapo-partitioned",
        f"job.nodes={nodes}",
        f"placement.inference.nodes={nodes // 2}",
    ),
    "a range": lambda nodes: ("qwen2.5-32b-dapo", f"job.nodes={nodes // 2}-{nodes}"),
}


def planned(form: str, nodes: int) -> PlannedJob:
    profile = load_clusters(environ={"HOME": "/home/ada", "XDG_CONFIG_HOME": "/nowhere"}).profile("h100")
    name, *overrides = FORMS[form](nodes)
    recipe = load_recipe(name, [*overrides, f"grpo.prompts_per_step={max(8 * nodes, 128)}"])
    root = Path("/shared/runs/it")
    job = PlannedJob(
        recipe=recipe,
        plan=make_plan(recipe, profile),
        plan_json={},
        cluster="h100",
        profile=profile,
        run_dir=root,
        sources=(),
        seen=(),
        version="0.1.0",
    )
    return in_directory(job, root)


def script(form: str) -> Callable[[int], Cost]:
    def measure(nodes: int) -> Cost:
        seconds = cpu_seconds(lambda: render(planned(form, nodes)))
        return Cost(seconds, len(render(planned(form, nodes)).encode()))

    return measure


def plan_file(form: str) -> Callable[[int], Cost]:
    def measure(nodes: int) -> Cost:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            write(path, from_json(PlanRecord, planned(form, nodes).plan_json))
            return Cost(cpu_seconds(lambda: read(PlanRecord, path)), path.stat().st_size)

    return measure


ROWS = [
    *(Row(f"script, {form}", "nodes", NODES, 2048, script(form), 1.0, 64_000) for form in FORMS),
    *(Row(f"plan.json read, {form}", "nodes", NODES, 2048, plan_file(form), 0.05, 64_000) for form in FORMS),
]
