"""Pure: the srun of each step: options, container, and the exported variables.

The options of the container are written twice: as shell text into the script, where a value that only an attempt knows
is a shell variable (`"$image"`), and for `mrl attach` as argv into plan.json, where it is a placeholder (`{image}`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image
from launcher.plan.placement import Plan
from megatron_rl.contract.codes import (
    CACHE_VARIABLE,
    CLUSTER_VARIABLE,
    HASH_SEED,
    IMAGE_VARIABLE,
    RUN_DIR_VARIABLE,
    SILENCE_VARIABLE,
)
from megatron_rl.contract.paths import FOLDERS, OF_REPLICAS, TRAIN
from megatron_rl.contract.plan_records import PlanStep
from megatron_rl.contract.run_records import CODE, CONTAINER, IMAGE, container_name
from megatron_rl.recipe.config import RunConfig

OURS = (
    "MRL_RUN_DIR",
    "MRL_CLUSTER",
    "MRL_ATTEMPT",
    "MRL_STEP",
    "MRL_START",
    "PYTHONPATH",
    "PYTHONNOUSERSITE",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
"""Variables that the ranks get from the script. They are named to pyxis, or a value of the image would win."""

LIMITS = 'for of in l n; do ulimit -S -$of "$(ulimit -H -$of)"; done 2>/dev/null'
"""Shell code that raises the limits of locked memory, which NCCL's network needs, and of open files to the node's hard
limits: Slurm passes on those of the login node."""


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    value: str | None = None
    variable: str | None = None  # shell expression of a value that only the attempt knows; a flag has neither

    @property
    def argv(self) -> str:
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"

    @property
    def shell(self) -> str:
        value = self.variable or (self.value and shlex.quote(self.value))
        return f"--{self.name}" if value is None else f"--{self.name}={value}"


Lines = list[list[Option]]


def shell_lines(lines: Lines) -> list[str]:
    return [" ".join(option.shell for option in line) for line in lines]


def geometry(config: RunConfig, profile: Profile, plan: Plan, step: PlanStep, name: str) -> Lines:
    """Options for the nodes, ranks and output of a step. `name`: name of the step in the script; `$1` in the function
    that all replicas share."""
    nodes, ranks = str(len(step.nodes)), str(len(step.nodes) * step.tasks_per_node)
    counts = [Option("nodes", nodes), Option("nodelist", None, '"$nodes"'), Option("ntasks", ranks)]
    if plan.smaller and step.name == TRAIN:
        counts[0] = Option("nodes", None, '"${#hosts[@]}"')
        counts[2] = Option("ntasks", None, f'"$((${{#hosts[@]}} * {step.tasks_per_node}))"')
    log = Option("output", None, f'"$logs/{name}.%t.log"')
    ending = [Option("kill-on-bad-exit", "1"), Option("unbuffered"), Option("open-mode", "append"), log]
    # Slurm counts the CPUs of a node as busy for another replica there, and for a while for one that was killed.
    beside = [Option("overlap")] if step.name != TRAIN else []
    counts += per_node(config, profile, step.tasks_per_node)
    # Beside ranks a replica may use all CPUs of its node, whose ranks wait while it generates. To Slurm all of them are
    # busy, so it would give each replica there the same first ones.
    ranks_of_task = (plan.gpus_per_node if step.shares_devices else step.gpus_per_node) // step.tasks_per_node
    if ranks_of_task > 1:
        counts.append(Option("cpus-per-task", None, f'"{shares_of_cpus(ranks_of_task)}"'))
    return [counts, [*binding(profile, several=ranks_of_task > 1), *ending, *beside]]


def shares_of_cpus(ranks: int) -> str:
    return f"$((MRL_CPUS_PER_TASK * {ranks}))" if ranks > 1 else "$MRL_CPUS_PER_TASK"


def per_node(config: RunConfig, profile: Profile, tasks: int) -> list[Option]:
    asked = gpus_per_node(config, profile)
    return [Option("ntasks-per-node", str(tasks)), *(Option(name, value) for name, value in asked.items())]


def binding(profile: Profile, *, several: bool = False) -> list[Option]:
    """Options for the CPUs of each process, and the profile's own options of srun. `several`: whether a process stands
    for several ranks, so that a list of CPUs with an entry for each rank would leave it those of the first."""
    bind = None if several and re.search(r"\b(map|mask)_", profile.cpu_bind or "") else profile.cpu_bind
    asked = {"distribution": profile.distribution, "cpu-bind": bind}
    flags = [flag for flag in profile.srun if not _is_of_container(flag)]
    return [*(Option(name, value) for name, value in asked.items() if value), *map(_flag, flags)]


def _is_of_container(flag: str) -> bool:
    """Whether a flag of srun is for pyxis, so that every step in the container gets it, `mrl attach` included."""
    return re.match(r"--(no-)?container-", flag) is not None


def _flag(text: str) -> Option:
    name, equals, value = text.removeprefix("--").partition("=")
    return Option(name, value if equals else None)


def gpus_per_node(config: RunConfig, profile: Profile) -> dict[str, str]:
    """Option for the GPUs of a node, name -> value; empty for processes on CPUs."""
    return {} if config.job.device == "cpu" else profile.gpus(config.job.gpus_per_node)


def container(config: RunConfig, profile: Profile, seen: Sequence[Path]) -> Lines:
    """Options of pyxis, without the container's name; empty without a container. `seen`: paths to mount, beside the
    profile's mounts."""
    asked = profile.container
    if asked is None:
        return []
    names = dict.fromkeys([*OURS, *variables(config, profile), *profile.secrets])
    workdir = (asked.workdir, None) if asked.workdir else (CODE, '"$PWD"')
    flags = [Option("no-container-mount-home"), Option("container-workdir", *workdir)]
    flags += [Option("container-writable")] if asked.writable else []
    flags += [_flag(flag) for flag in profile.srun if _is_of_container(flag)]
    mounts = ",".join([*(f"{path}:{path}" for path in seen), *asked.mounts])
    return [
        [Option("container-image", IMAGE, '"$image"'), Option("container-mounts", mounts)],
        flags,
        [Option("container-env", ",".join(names))],
    ]


def name_of_container(config: RunConfig, profile: Profile) -> Lines:
    """Option for the name of an attempt's container; empty where the profile wants none."""
    if profile.container is None or not profile.container.named:
        return []
    name = container_name("$SLURM_JOB_ID", "$MRL_ATTEMPT", "$of" if replica_image(config, profile) else "")
    # no_exec: each step gets its own namespaces, except that of `mrl attach`.
    return [[Option("container-name", CONTAINER, f'"{name}:no_exec"')]]


def variables(config: RunConfig, profile: Profile) -> dict[str, str]:
    """Variables that the script exports to all its processes, beside the names of run and cluster."""
    # void: without it enroot's hook fails on a node without a driver
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"} if config.job.device == "cpu" else {}
    return {
        "PYTHONNOUSERSITE": "1",  # packages in a home directory would precede those of the image
        "PYTHONUNBUFFERED": "1",
        # Python keeps a compiled file that a full disk has cut, and then no attempt could import the snapshot again.
        "PYTHONDONTWRITEBYTECODE": "1",
        SILENCE_VARIABLE: str(config.job.silence_limit_s),
        "HF_HOME": f"{profile.run_root}/cache/huggingface",
        "HF_HUB_OFFLINE": "1",
        **hidden,
        **profile.environment,
    }


def rank_variables(config: RunConfig, profile: Profile) -> dict[str, str]:
    """Variables of the ranks alone, set inside the container. Outside, enroot would limit its threads to
    OMP_NUM_THREADS and look for its configuration in HOME."""
    threads = str(config.job.threads_per_rank)
    values = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **HASH_SEED}
    if profile.container is not None:  # its root is read-only, and the home directory is not mounted
        cache = f"{profile.run_root}/cache"
        values |= {
            "HOME": f"{cache}/home",
            IMAGE_VARIABLE: str(rank_image(config, profile)),
            CACHE_VARIABLE: f"{cache}/mrl",
            "XDG_CACHE_HOME": cache,
        }
        values |= {"TRITON_CACHE_DIR": f"{cache}/triton", "MPLCONFIGDIR": f"{cache}/matplotlib"}
    return {**values, **{name: value for name, value in profile.environment.items() if name in values}}


def in_front_of_ranks(config: RunConfig, profile: Profile) -> str:
    """Shell code before each rank. Signals are ignored until the rank has its own handlers."""
    values = rank_variables(config, profile)
    home = [f"mkdir -p {shlex.quote(values['HOME'])}"] if "HOME" in values else []
    exports = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    return "; ".join(['trap "" USR1 USR2 QUIT', LIMITS, *home, exports, *_wrapping(profile), 'exec "$@"'])


def _wrapping(profile: Profile) -> list[str]:
    wrapper = profile.wrapper
    if wrapper is None:
        return []
    of = (
        "|".join(["train:*", *(f"{kind}-*" for kind in FOLDERS)])
        if wrapper.ranks is None
        else "|".join(f"train:{rank}" for rank in wrapper.ranks)
    )
    return [f'case $MRL_STEP:$SLURM_PROCID in {of}) set -- {shlex.join(wrapper.command)} "$@" ;; esac']


def with_surroundings(
    record: dict[str, Any],
    config: RunConfig,
    profile: Profile,
    cluster: str,
    run_dir: Path,
    seen: Sequence[Path],
) -> dict[str, Any]:
    """Content of plan.json: the plan, the exported variables, the container and which of its images each role runs in.

    Args:
        record: plan without these (launcher.plan.summary.plan_json).
        seen: paths to mount into the container.
    """
    of_container = [*container(config, profile, seen), *name_of_container(config, profile)]
    exported = {RUN_DIR_VARIABLE: str(run_dir), CLUSTER_VARIABLE: cluster, **variables(config, profile)}
    return {
        **record,
        "environment": exported,
        "rank_environment": rank_variables(config, profile),
        "container": [option.argv for line in of_container for option in line],
        "roles": [{**role, "of": image_suffix(config, profile, role["name"])} for role in record["roles"]],
    }


def image_suffix(config: RunConfig, profile: Profile, kind: str) -> str:
    return OF_REPLICAS if kind in config.started_vllms and replica_image(config, profile) else ""
