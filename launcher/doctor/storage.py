"""Whether the run root exists, is shared, fast enough and large enough. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.backends.probe.disk import Disk, over_quota
from launcher.backends.probe.node import NodeFacts
from launcher.doctor.demand import Demand
from launcher.doctor.finding import DoctorFinding, error, note, ok, span, warning
from megatron_rl.contract.text import size

SLOW_BYTES_PER_S = 50e6
MOVE = "set run_root: in the profile to a directory on the shared file system"


def run_root(disk: Disk, demand: Demand) -> Iterator[DoctorFinding]:
    if disk.measured is None:
        yield error(
            "run root",
            f"{disk.path}: {disk.failure}; a job there would hang",
            "ask the administrators about its file system, or set another run_root: in the profile",
        )
        return
    found = disk.measured
    if found.bytes_per_s is None:
        above = "" if found.directory == str(disk.path) else f" (tried in {found.directory})"
        yield error("run root", f"{disk.path} cannot be written: {found.problem}{above}", MOVE)
        return
    made = "" if found.directory == str(disk.path) else ", will be made"
    kind = f" on {found.file_system}" if found.file_system else ""
    yield ok("run root", f"{disk.path}{made}{kind}")
    yield _speed(found.bytes_per_s, demand)
    yield from _space(disk, found.free_bytes, demand)


def shared(disk: Disk, node: NodeFacts | None, demand: Demand) -> Iterator[DoctorFinding]:
    if node is not None and node.failure is None:
        if node.shared:
            yield ok("run root", f"a file written here is seen on {node.host}")
        else:
            yield error("run root", f"a file written here is not seen on {node.host}: {disk.path} is not shared", MOVE)
    elif disk.shared is False:
        kind = disk.measured.file_system if disk.measured else ""
        text = f"{kind} is usually local to one machine, and all nodes of {demand.who} must see {disk.path}"
        yield note("run root", text, f"mrl doctor --deep tests it on a compute node; if it is not shared, {MOVE}")


def _speed(bytes_per_s: float, demand: Demand) -> DoctorFinding:
    text = f"{size(bytes_per_s)}/s from this machine with one writer, flushed to disk"
    if bytes_per_s < SLOW_BYTES_PER_S:
        lasts = (
            f"; a checkpoint of {size(demand.checkpoint_bytes)} may take very long" if demand.checkpoint_bytes else ""
        )
        return warning("speed", f"{text}: slow for a shared file system{lasts}", MOVE)
    if demand.write_s is not None and demand.checkpoint_bytes:
        return ok(
            "speed",
            f"{text}; a checkpoint of {size(demand.checkpoint_bytes)} takes about {span(demand.write_s)} "
            f"({demand.write_basis})",
        )
    return ok("speed", text)


def _space(disk: Disk, free: int, demand: Demand) -> Iterator[DoctorFinding]:
    wanted = (demand.checkpoint_bytes or 0) * demand.kept
    need = (
        f"{demand.who} keeps up to {size(wanted)} ({demand.kept} checkpoints, including the one being written)"
        if wanted
        else ""
    )
    fix = "remove old runs, keep fewer checkpoints (save.keep, save.keep_every), or choose another run_root"
    if wanted > free:
        yield error("space", f"{size(free)} free, and {need}", fix)
    else:
        yield ok("space", f"{size(free)} free" + (f"; {need}" if need else ""))
    if not disk.quota.known:
        yield note("quota", f"unknown: {disk.quota.failure}")
    elif problem := over_quota(disk.quota.text, wanted):
        yield error("quota", f"{problem}; {need or 'nothing more can be written'}", fix)
    else:
        yield ok("quota", "room enough" if disk.quota.text.strip() else "none")
