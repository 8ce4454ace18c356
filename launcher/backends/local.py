"""This machine as a cluster of one: its resources, and a supervisor process that outlives its starter."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.software import replica_python
from launcher.errors import Failed
from launcher.host.attempt.local_ranks import LocalReplicas
from launcher.host.process.processes import start_time
from launcher.plan.sizes import Sizes
from megatron_rl.contract.child import Child
from megatron_rl.contract.children import module_command
from megatron_rl.contract.paths import INFER, Attempt, RunDir
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.extras import PACKAGE

RANK_COMMAND = module_command("megatron_rl.rank_main")
REPLICA_MODULE = "megatron_rl.replica_main"


@dataclass(frozen=True, slots=True)
class LocalMachine:
    cpus: int
    gpus: int
    memory_bytes: int | None
    free_bytes: int | None  # memory that is free, or that the kernel would free; None: unknown
    multiplies_bf16: bool | None = None  # whether its processors have instructions for bf16; None: unknown


BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in /proc/cpuinfo of instructions that multiply bf16: x86, x86, Arm."""


def inspect(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> LocalMachine:
    """Read the resources of this machine, without torch. `root`: root of the file system; another one in tests."""
    gpus = sum(device.name[6:].isdigit() for device in (root / "dev").glob("nvidia*"))
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = min(gpus, sum(bool(name.strip()) for name in visible.split(",")))
    bounds = [*_memory(root), *_memory_of_groups(root)]
    total, free = zip(*bounds, strict=True) if bounds else ((), ())
    return LocalMachine(
        len(os.sched_getaffinity(0)),
        gpus,
        min(total, default=None),
        min(free, default=None),
        multiplies_bf16=None if (flags := _processor_flags(root)) is None else bool(flags & BF16_FLAGS),
    )


def _processor_flags(root: Path) -> frozenset[str] | None:
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((frozenset(flags.split()) for name, _, flags in fields if name.strip() in ("flags", "Features")), None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
        yield found["MemTotal"], found["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return


def _memory_of_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes below it) of each control group of this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = ("memory", ("limit_in_bytes", "usage_in_bytes")) if controllers else ("", ("max", "current"))
        group = root / "sys/fs/cgroup" / mount / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit, used = (int((folder / f"memory.{name}").read_text(encoding="ascii")) for name in names)
                yield limit, max(0, limit - used)
            except (OSError, ValueError):  # no limit
                continue


class Supervisor:
    def __init__(self, command: list[str]) -> None:
        try:
            # An unnamed file: unlike a pipe it cannot break, and unlike a path it needs no removal.
            self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object
            # Without our output it does not keep `mrl-submit --detach | tee log` from ending.
            self._process = Child(command, output=os.devnull, errors=self._said)
        except OSError as error:  # no more processes for this user, a full /tmp
            raise Failed(f"the supervisor of the run cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.exit_code() is not None

    def complaint(self) -> str:
        self._said.seek(0)
        return self._said.read().decode("utf-8", "replace").strip()


def replica_command(python: str, attempt: Attempt) -> list[str]:
    """Command of each process of a replica, without the option of its number. Another Python than this one has other
    packages and lacks ours, so it gets a folder with a link to ours alone. Raises Failed."""
    if python == sys.executable:
        return module_command(REPLICA_MODULE)
    folder = attempt.packages.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PACKAGE.name).is_symlink():
            (folder / PACKAGE.name).symlink_to(PACKAGE.resolve())
    except OSError as error:
        raise Failed(f"{folder}: {error.strerror}: {python} would not find the code of mrl") from error
    return ["env", f"PYTHONPATH={folder}", python, "-P", "-m", REPLICA_MODULE]


def supervisor_command(
    run: RunDir,
    attempt: Attempt,
    config: RunConfig,
    sizes: Sizes,
    drain_limit_s: float,
    owner: int | None,
    notify: str | None = None,
) -> list[str]:
    """Command that supervises one attempt here. Raises Failed.

    Args:
        sizes: sizes of the plan.
        drain_limit_s: seconds that the ranks get to save when they are asked to leave.
        owner: process id whose death drains the run; None: nobody's does.
        notify: NotifySettings in JSON; None: no notifications.
    """
    job, include = config.job, config.code.include or ()
    supervisor = module_command("launcher.host.supervise")
    supervisor += ["--run-dir", str(run.root.absolute()), "--attempt", str(attempt.number)]
    supervisor += ["--ranks", str(sizes.training_world), "--threads", str(job.threads_per_rank), "--device", job.device]
    for replicas in _replicas(config, sizes, attempt):
        supervisor += ["--replicas", json.dumps(replicas)]
    supervisor += ["--drain-limit", str(drain_limit_s), "--silence-limit", str(job.silence_limit_s)]
    if notify is not None:
        supervisor += ["--notify", notify]
    if owner is not None:
        supervisor += ["--owner", f"{owner}:{start_time(owner)}"]
    path = os.pathsep.join([*include, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [*supervisor, "--", *(["env", f"PYTHONPATH={path}"] if include else []), *RANK_COMMAND]


def _replicas(config: RunConfig, sizes: Sizes, attempt: Attempt) -> Iterator[LocalReplicas]:
    """Yield the replicas of each kind that the run has. Raises Failed."""
    if sizes.has_replicas:
        command = replica_command(replica_python(config, None, INFER), attempt)
        gpus = sizes.replica_gpus if sizes.starts_workers else 0
        yield LocalReplicas(INFER, sizes.replicas, sizes.replica_processes, gpus, command, sizes.shares_devices)
    for one in sizes.fixed:
        command = replica_command(replica_python(config, None, one.kind), attempt)
        gpus = one.tp if one.starts_workers else 0
        yield LocalReplicas(one.kind, one.replicas(sizes.gpus_per_node), one.processes, gpus, command)
