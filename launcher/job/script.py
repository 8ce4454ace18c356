"""Pure: recipe, plan and profile -> the text of the sbatch script, by the templates in slurm/."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, rank_python, replica_image, replica_python
from launcher.errors import BadInput
from launcher.job.steps import (
    Lines,
    binding,
    container,
    geometry,
    gpus_per_node,
    image_suffix,
    in_front_of_ranks,
    name_of_container,
    per_node,
    shares_of_cpus,
    shell_lines,
    variables,
)
from launcher.job.templates import Shell, templates
from launcher.plan.placement import Plan
from launcher.recipe.load import Recipe
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_USAGE, HOST_TRIES
from megatron_rl.contract.paths import INFER, NUMBER_OPTIONS, OF_REPLICAS, TRAIN, RunDir
from megatron_rl.contract.plan_records import PlanStep
from megatron_rl.contract.run_records import CodeSource

TRAINING = "megatron_rl.rank_main"
REPLICA = "megatron_rl.replica_main"
UNPACK_S = 1800  # seconds for a node to unpack an image
END_S = 30  # seconds for an srun to end cleanly
RUN = '--run-dir "$MRL_RUN_DIR" --attempt "$MRL_ATTEMPT"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    recipe: Recipe
    plan: Plan
    plan_json: dict[str, Any]
    cluster: str
    profile: Profile
    run_dir: Path
    sources: Sequence[CodeSource]
    seen: Sequence[Path]  # paths to mount into the container, beside the profile's mounts
    version: str
    inode: int = 0  # of the run directory; 0: it does not exist yet


def render(job: PlannedJob) -> str:
    """Render the script. Raises BadInput where a value cannot stand in a script, such as a path with a line break."""
    _refuse_unwritable(job)
    config, profile = job.recipe.config, job.profile
    named = profile.container is not None and profile.container.named
    host_python, *fallback = profile.host_pythons()
    return (
        templates()
        .get_template("job.sbatch.j2")
        .render(
            header=[Shell(option) for option in header(job)],
            title=Shell(f"mrl {job.version}: {config.name} on {job.cluster}"),
            run_dir=str(job.run_dir),
            cluster=job.cluster,
            host_python=host_python,
            host_fallback=next(iter(fallback), None),
            environment=[(Shell(name), value) for name, value in variables(config, profile).items()],
            prolog=[Shell(command) for command in profile.prolog],
            cpus_per_task=profile.cpus_per_task,
            ranks_per_node=config.job.gpus_per_node,
            container=_shell(container(config, profile, job.seen)),
            container_name=next(iter(_shell(name_of_container(config, profile))), None),
            of_replicas=OF_REPLICAS if replica_image(config, profile) else None,
            steps_of_replicas=Shell(" | ".join(_steps_of_replicas(job))),
            in_container=Shell('"${container[@]}" ' if profile.container else ""),
            unpack=_shell([per_node(config, profile, 1)])[0] if named else None,
            health=_health(job),
            decided_by=Shell(" \\\n            ".join(_host_options(job))),
            host_tries=HOST_TRIES,
            exit_drained=EXIT_DRAINED,
            exit_usage=EXIT_USAGE,
            inode=job.inode,
            in_front=in_front_of_ranks(config, profile),
            unpack_s=UNPACK_S,
            steps=list(_steps(job)),
            limited=_limited,
        )
    )


def _host_options(job: PlannedJob) -> Iterator[Shell]:
    config, profile = job.recipe.config, job.profile
    outlives = " --outlives-nodes" if _outlives_nodes(job) else ""
    yield Shell(f"--notice {profile.signal_s} --backoff {config.job.backoff_s}{outlives}")
    if profile.container is not None and (image := rank_image(config, profile)):
        cache = f"{profile.run_root}/cache/images"
        unpack = " --unpack" if profile.container.named else ""
        yield Shell(f"--image {shlex.quote(image)} --image-cache {shlex.quote(cache)}{unpack}")
        if own := replica_image(config, profile):
            yield Shell(f"--replica-image {shlex.quote(own)}")
    if config.harvest is not None:
        options = " ".join(shlex.quote(f"--harvest-sbatch={option}") for option in _harvest_options(job))
        cpus = shares_of_cpus(job.plan.sizes.replica_gpus // job.plan.sizes.replica_processes)
        yield Shell(f'--harvest {config.harvest.max_replicas} "--harvest-sbatch=--cpus-per-task={cpus}" {options}')
    if config.notify is not None:
        yield Shell(f"--notify {shlex.quote(config.notify.model_dump_json())}")
    if profile.health_check:
        yield Shell("--health" + (" --fabric" if _all_reduce(job) else ""))


def _steps_of_replicas(job: PlannedJob) -> Iterator[str]:
    for kind in NUMBER_OPTIONS:
        if image_suffix(job.recipe.config, job.profile, kind):
            yield from [f"{kind}-*", *(["harvest-*"] if kind == INFER else [])]
    yield f"unpack{OF_REPLICAS}"


def _harvest_options(job: PlannedJob) -> list[str]:
    config, profile = job.recipe.config, job.profile
    harvest, sizes = config.harvest, job.plan.sizes
    assert harvest is not None
    asked = {
        "partition": harvest.partition,
        "account": harvest.account or profile.account,
        "qos": harvest.qos,
        "time": harvest.time_limit,
        "nodes": 1,
        "ntasks-per-node": sizes.replica_processes,
        **({} if config.job.device == "cpu" else profile.gpus(sizes.replica_gpus)),
    }
    return [f"--{name}={value}" for name, value in asked.items() if value is not None] + harvest.sbatch


def header(job: PlannedJob) -> list[str]:
    """Options of sbatch, `--name=value`, quoted as sbatch reads them."""
    config, profile = job.recipe.config.job, job.profile
    log = str(RunDir(job.run_dir).batch_log).replace("%", "%%")  # sbatch expands %
    options = {
        "job-name": job.run_dir.name,
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "reservation": profile.reservation,
        "nodes": _asked_nodes(job),
        # Slurm keeps the number of tasks, and so of nodes, over a requeue (seen on 22.05).
        "ntasks-per-node": None if job.plan.smaller else config.gpus_per_node,
        **gpus_per_node(job.recipe.config, profile),
        "time": config.time_limit or profile.time_limit,
        "signal": f"B:USR1@{profile.signal_s}",
        "output": log,
        "open-mode": "append",
        "mail-user": profile.mail and profile.mail.to,
        "mail-type": profile.mail and ",".join(profile.mail.when),
        "mem": 0,
    }
    flags = ["--exclusive", "--requeue", *(["--no-kill"] if _outlives_nodes(job) else [])]
    valued = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*valued, *flags, *profile.sbatch]


def _asked_nodes(job: PlannedJob) -> str:
    """Value of --nodes. Spare nodes are added to both ends of a range, so that even with the fewest nodes one can
    replace a bad one."""
    config = job.recipe.config.job
    ends = {str(count + config.spare_nodes) for count in (config.fewest_nodes, config.most_nodes)}
    return "-".join(sorted(ends, key=int))


def _outlives_nodes(job: PlannedJob) -> bool:
    apart = any(role.name != TRAIN and not role.shares_devices for role in job.plan.roles)
    return apart or job.plan.spare_nodes > 0 or bool(job.plan.smaller)


@dataclass(frozen=True, slots=True)
class _SrunFunction:
    """A function of the script that becomes one srun."""

    function: Shell
    name: Shell  # name of the step: text, or the function's first argument
    options: list[Shell]
    command: Shell
    shown: Shell | None = None
    comment: Shell | None = None
    limit_s: int | None = None


def _steps(job: PlannedJob) -> Iterator[_SrunFunction]:
    config, plan = job.recipe.config, job.plan
    python = shlex.quote(rank_python(job.profile))
    if _all_reduce(job):
        yield _fabric_step(job)
    first_of = {step.name.partition("-")[0]: step for step in reversed(plan.steps)}  # all of a kind are alike
    yield _SrunFunction(
        function=Shell("train"),
        name=Shell("train"),
        options=_shell(geometry(config, job.profile, plan, first_of[TRAIN], TRAIN)),
        command=Shell(f"{python} -P -m {TRAINING} {RUN}"),
        shown=Shell("evaluate") if job.recipe.evaluation else None,
        comment=Shell("Its ranks evaluate; in file names, and to mrl attach, they are train.")
        if job.recipe.evaluation
        else None,
    )
    for kind, option in NUMBER_OPTIONS.items():
        if kind not in first_of:
            continue
        first = first_of[kind]
        shared = first.gpus_per_node < plan.gpus_per_node
        mine = f"{_gpus_of_replica(kind, first, plan.gpus_per_node)} " if shared else ""
        its_python = shlex.quote(replica_python(config, job.profile, kind))
        yield _SrunFunction(
            function=Shell(kind),
            name=Shell('"$1"'),
            options=_shell(geometry(config, job.profile, plan, first, "$1")),
            command=Shell(f'{mine}{its_python} -P -m {REPLICA} {RUN} {option} "${{1#{kind}-}}"'),
            comment=Shell("shellcheck disable=SC2016 # the shell on the node expands it") if shared else None,
        )

    if config.harvest is not None:
        yield _harvest_step(job)


def _fabric_step(job: PlannedJob) -> _SrunFunction:
    config = job.recipe.config
    limit = job.profile.all_reduce_gbps
    slow = f" --slower-than {limit}" if limit else ""
    # A named container has been unpacked before; else each node unpacks its own now.
    named = job.profile.container is None or job.profile.container.named
    slow += "" if named else f" --meet-s {UNPACK_S}"
    tasks = f'--ntasks="$((${{#hosts[@]}} * {config.job.gpus_per_node}))"'
    (each, bound) = shell_lines([per_node(config, job.profile, config.job.gpus_per_node), binding(job.profile)])
    return _SrunFunction(
        function=Shell("fabric"),
        name=Shell("fabric"),
        options=[
            Shell(f'--nodes="${{#hosts[@]}}" --nodelist="$nodes" {tasks} {each}'),
            # Ranks of a bad node may die; the others must report which node it was.
            Shell(f'{bound} --kill-on-bad-exit=0 --output="$logs/fabric.%t.log"'.strip()),
        ],
        command=Shell(f"{shlex.quote(rank_python(job.profile))} -P -m megatron_rl.rank.fabric.check {RUN}{slow}"),
        comment=Shell("The nodes must also reach each other, and fast."),
        limit_s=900 if named else 900 + UNPACK_S,
    )


def _harvest_step(job: PlannedJob) -> _SrunFunction:
    config, sizes = job.recipe.config, job.plan.sizes
    python = shlex.quote(replica_python(config, job.profile))
    processes, shares = sizes.replica_processes, sizes.replica_gpus // sizes.replica_processes
    gpus = {} if config.job.device == "cpu" else job.profile.gpus(sizes.replica_gpus)
    counts = {"nodes": 1, "ntasks": processes, "ntasks-per-node": processes, **gpus}
    asked = [f"--{name}={value}" for name, value in counts.items()]
    asked += [f'--cpus-per-task="{shares_of_cpus(shares)}"'] if shares > 1 else []
    (bound,) = shell_lines([binding(job.profile, several=shares > 1)])
    ending = '--kill-on-bad-exit=1 --unbuffered --open-mode=append --output="$logs/infer-${1#harvest-}.%t.log"'
    return _SrunFunction(
        function=Shell("harvest"),
        name=Shell('"infer-${1#harvest-}"'),
        options=[Shell(" ".join(asked)), Shell(f"{bound} {ending}".strip())],
        command=Shell(f'{python} -P -m {REPLICA} {RUN} --replica "${{1#harvest-}}"'),
        comment=Shell("An inference replica in its own job, wherever there is room: see recipe key harvest."),
    )


def _limited(seconds: int) -> Shell:
    """Command prefix that limits an srun. Its own --time begins with the step, for which it waits without end while a
    node is busy or does not answer."""
    return Shell(f"timeout --kill-after={END_S} {seconds}")


def _shell(lines: Lines) -> list[Shell]:
    return [Shell(line) for line in shell_lines(lines)]


def _gpus_of_replica(kind: str, step: PlanStep, gpus_per_node: int) -> str:
    """Shell words in front of the command of the replica in $1, such as `infer-2`, which shares its node with others:
    they show it its own ones of the GPUs that Slurm shows all of them, by whatever names."""
    seen = f'"${{CUDA_VISIBLE_DEVICES:-$(seq -s, 0 {gpus_per_node - 1})}}"'
    own = f'export CUDA_VISIBLE_DEVICES="$(echo {seen} | cut -d, -f"$0")"; exec "$@"'
    first = f"${{1#{kind}-}} * {step.gpus_per_node} % {gpus_per_node}"
    return f'sh -c {shlex.quote(own)} "$(({first} + 1))-$(({first} + {step.gpus_per_node}))"'


def _all_reduce(job: PlannedJob) -> bool:
    config = job.recipe.config.job
    return job.profile.health_check and config.device == "cuda" and config.most_nodes > 1


def _health(job: PlannedJob) -> dict[str, Any] | None:
    if not job.profile.health_check:
        return None
    config = job.recipe.config
    gpus = config.job.gpus_per_node if config.job.device == "cuda" else 0
    return {
        "gpus": Shell(f"--gpus {gpus}" + " --shared" * config.shares_devices),
        "per_node": _shell([per_node(config, job.profile, 1)])[0],
    }


def _refuse_unwritable(job: PlannedJob) -> None:
    problems = []
    if job.profile.container is not None:
        for path in (job.profile.run_root, str(job.run_dir)):
            if set(path) & set(":,"):
                problems.append(f"{path}: pyxis cannot mount a path with a colon or a comma; choose another one")
            if any(character.isspace() for character in path):
                problems.append(f"{path!r}: enroot cannot mount a path with white space; choose another one")
    for path in (str(job.run_dir), job.profile.run_root):
        if not path.isprintable():
            problems.append(f"{path!r}: a path with a line break or control character cannot stand in a script")
    if problems:
        raise BadInput(problems)
