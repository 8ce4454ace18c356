"""mrl doctor: checks of a recipe on a cluster, before it is submitted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from launcher.backends.probe import disk
from launcher.backends.probe import node as compute_node
from launcher.backends.probe import rank as one_rank
from launcher.backends.probe.vllm_probe import probe_in_container
from launcher.backends.slurm import cluster_facts as slurm_facts
from launcher.cli.arguments import OVERRIDES, TRUST_RUN
from launcher.cli.completion import complete_recipe
from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image, replica_python
from launcher.doctor.examine import ClusterFacts, examine, examine_local
from launcher.doctor.fetched import fetched, image_of
from launcher.doctor.finding import DoctorFinding, Level
from launcher.doctor.node_files import on_nodes
from launcher.doctor.preflight import collect_local
from launcher.errors import BadInput
from launcher.fetch.needs import known_caches
from launcher.plan.engine_choice import load_for
from launcher.plan.gpu_memory import checkpoint_bytes
from launcher.plan.parameters import vocabulary
from launcher.plan.summary import make_plan
from launcher.recipe.load import Recipe
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED
from megatron_rl.recipe.config import RunConfig

STYLES: dict[Level, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "note": {"fg": "cyan"},
    "warning": {"fg": "yellow"},
    "error": {"fg": "red", "bold": True},
}

HELP = """Check RECIPE on a cluster: how it is preempted and with how much notice, which limits apply, and whether
nodes, GPUs, containers, Python and disk are available. Without RECIPE: a run of one node.

SECTION.KEY=VALUE overrides a value of the recipe. Nothing is submitted, except that --deep runs two steps on one node;
the second unpacks the image and starts a rank in it. With inference.engine vllm a third one looks for vLLM there.
Levels: ok; note: worth knowing; warning: the run works, but may lose work or time; error: the run will not work.

\b
Exit codes:
  0    no errors
  1    errors
  2    the recipe, the cluster profile or an argument cannot be used
"""


@click.command("doctor", help=HELP)
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@OVERRIDES
@click.option("--cluster", help="Cluster profile. [default: MRL_CLUSTER, the recipe's, or the one in clusters.yaml]")
@click.option("--deep", is_flag=True, help="Also start a rank on a compute node; waits up to a minute for a free node.")
@click.option("--json", "as_json", is_flag=True, help="Print {recipe, cluster, findings, counts} as JSON.")
@TRUST_RUN
@click.pass_context
def command(
    context: click.Context,
    recipe: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
    deep: bool,
    as_json: bool,
    trust: bool,
) -> None:
    clusters = load_clusters()
    if recipe:
        asked, name, profile = load_for(recipe, overrides, clusters, cluster, known_caches(clusters), trusted=trust)
    else:
        asked, (name, profile) = None, clusters.choose_profile(cluster, None)
    config = asked.config if asked else None
    findings = on_cluster(asked, profile, deep) if profile else on_this_machine(asked)
    counts = Counter(finding.level for finding in findings)
    if as_json:
        found = {"recipe": recipe, "cluster": name, "findings": [asdict(one) for one in findings], "counts": counts}
        click.echo(json.dumps(found, indent=1))
    else:
        report(findings, f"{config.name if config else 'any run'} on {name}", counts)
    context.exit(EXIT_CRASHED if counts["error"] else EXIT_FINISHED)


def on_this_machine(recipe: Recipe | None) -> list[DoctorFinding]:
    config = recipe.config if recipe else None
    run_root = disk.inspect(Path.cwd() / "runs")
    return examine_local(collect_local(recipe), run_root, known(checkpoint_bytes, config), config)


def on_cluster(recipe: Recipe | None, profile: Profile, deep: bool) -> list[DoctorFinding]:
    config = recipe.config if recipe else None
    with ThreadPoolExecutor() as pool:
        slurm_asked = pool.submit(slurm_facts.collect)
        disk_asked = pool.submit(disk.inspect, Path(profile.run_root))
        slurm, run_root = slurm_asked.result(), disk_asked.result()
    node = rank = vllm = None
    if deep and slurm.config.known and run_root.measured:
        gpus = config is None or config.job.device == "cuda"
        directory = Path(run_root.measured.directory)
        node = compute_node.probe(profile, directory, gpus)
        if not node.failure:
            rank = one_rank.probe(profile, config.image.reference if config else None, directory, gpus)
            if config and config.started_vllms:
                kind = next(iter(config.started_vllms))
                image = replica_image(config, profile) or rank_image(config, profile)
                vllm = (
                    probe_in_container(profile, image, replica_python(config, profile, kind), gpus) if image else None
                )
    facts = ClusterFacts(
        slurm=slurm,
        host_python=compute_node.python_here(profile.host_pythons()[0]),
        run_root=run_root,
        node=node,
        rank=rank,
        vllm=vllm,
        missing_secrets=tuple(name for name in profile.secrets if not os.environ.get(name)),
        fetched=_fetched(recipe, profile, run_root),
        checkpoint_bytes=known(checkpoint_bytes, config),
        refusals=tuple(refusals(recipe, profile)) if recipe else (),
        preflight=tuple(on_nodes(recipe, profile)) if recipe else (),
    )
    return examine(facts, config, profile)


def _fetched(recipe: Recipe | None, profile: Profile, run_root: disk.Disk) -> tuple[DoctorFinding, ...]:
    if recipe is None:
        return tuple(image_of(profile))
    return tuple(fetched(recipe, profile)) if run_root.measured else ()


def refusals(recipe: Recipe, profile: Profile) -> list[str]:
    try:
        make_plan(recipe, profile)
    except BadInput as refused:
        return [*refused.problems]
    return []


def known(count_bytes: Callable[[RunConfig, int], int], config: RunConfig | None) -> int | None:
    """Bytes by a function of a recipe and the size of its vocabulary; None if these are unknown."""
    rows = vocabulary(config) if config else None
    return count_bytes(config, rows) if config and rows else None


def report(findings: Sequence[DoctorFinding], title: str, counts: Counter[Level]) -> None:
    for one in findings:
        click.echo(f"{click.style(f'{one.level:<8}', **STYLES[one.level])} {one.topic}: {one.text}")
        if one.fix:
            click.echo(f"{'':<8} fix: {one.fix}")
    click.echo(f"{title}: {', '.join(f'{counts[level]} {level}' for level in STYLES if counts[level])}")
