"""Evidence about an attempt, read from its files once. An unreadable file is reported, never treated as absent."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from launcher.host.judge.causes import is_unexplained
from launcher.host.judge.hang import by_clock_of_reader, suspects
from launcher.host.judge.nodes import NodeReports
from launcher.host.judge.verdict import MUTE_ENDS, NODES_DISK, AttemptEvidence, RankExit
from launcher.host.record import log_tails
from megatron_rl.contract.attempt_records import (
    Drain,
    FabricReport,
    Hang,
    Heartbeat,
    NodeHealth,
    Outcome,
    RankError,
    ReplicaState,
    TimelineLine,
)
from megatron_rl.contract.codes import LAST_MOMENT_S, REPLICA_RUNNING, SIGNALLED
from megatron_rl.contract.files import FULL, names_in
from megatron_rl.contract.heartbeat_files import decode_slot, read_slots
from megatron_rl.contract.paths import INFER, Attempt, RankFiles
from megatron_rl.contract.records import ABSENT, PATIENCE_S, Unreadable, decode_lines, if_readable, read

_NODES_OWN = re.compile(r"(?:No space left on device|Disk quota exceeded): '(/(?:tmp|var/tmp|dev/shm|run)/[^']*)'")
RANKS = 64  # ranks whose logs and error files are read, of thousands that may have failed together
PROBE_BYTES = 1 << 16  # bytes written to test whether a disk is full


class Observed(NamedTuple):
    """Observations of the end of an attempt by the process that ran it; fields as in AttemptEvidence."""

    exits: list[RankExit] | None = None  # None: only srun's log names them
    code: int | None = None
    unready: str | None = None
    unready_host: str | None = None
    late: str | None = None
    unseen: str | None = None
    hang: Hang | None = None
    heartbeats: list[Heartbeat] = []


def read_drain(attempt: Attempt, patience: float = PATIENCE_S) -> Drain | None:
    """Request to leave, if there is one. The file itself is the request, even where it cannot be read."""
    found = read(Drain, attempt.drain, patience)
    if isinstance(found, Unreadable):
        return Drain(SIGNALLED, f"somebody ({found})", 0.0)
    return None if found is ABSENT else found


def read_evidence(attempt: RankFiles, observed: Observed, drain: Drain | None) -> AttemptEvidence:
    """Evidence about the ranks of one world: the training ranks of an attempt, or those of a replica."""
    outcome = read(Outcome, attempt.outcome, PATIENCE_S)
    hang = observed.hang or if_readable(read(Hang, attempt.hang, PATIENCE_S))
    exits = observed.exits
    if exits is None:
        # Only srun names a killed rank. Exits prove nothing about ranks that were killed because they left too late.
        meaningful = observed.unseen is None and (drain is None or is_unexplained(drain))
        exits = log_tails.parse_exits(log_tails.tail(attempt.srun, log_tails.LONG_TAIL)) if meaningful else []
    heartbeats = observed.heartbeats or _heartbeats(attempt)
    suspected = [beat.rank for beat in suspects(heartbeats)[:RANKS]]
    # A rank that was killed comes first: it is the one that is accused.
    bad = sorted((ended for ended in exits if ended.bad), key=lambda ended: -ended.code not in MUTE_ENDS)[:RANKS]
    # Ranks that were asked to leave are ended at this time; later errors are about lost peers.
    ended_at = math.inf if drain is None or drain.deadline is None else drain.deadline - LAST_MOMENT_S
    errors, unreadable = _read_errors(attempt, ended_at, {*suspected, *(ended.rank for ended in bad)})
    reported = {*unreadable, *(error.rank for error in errors)}
    silent = outcome is ABSENT and any(ended.rank not in reported for ended in bad)
    return AttemptEvidence(
        errors=errors,
        unreadable_errors=unreadable,
        outcome=if_readable(outcome),
        unreadable_outcome=str(outcome) if isinstance(outcome, Unreadable) else None,
        heartbeats=heartbeats,
        stacks=_stacks(attempt, suspected if hang is None else [hang.rank, *suspected]),
        last_lines={ended.rank: log_tails.end_of_log(attempt.log(ended.rank)) for ended in bad},
        not_started=_not_started(attempt, bad, heartbeats),
        timed_out=_timed_out(attempt, exits, suspected),
        trained=_trained(attempt) if isinstance(attempt, Attempt) else None,
        unwritable=why_unwritable(attempt.folder) if silent else None,
        drain=drain,
        hang=hang,
        exits=exits,
        code=observed.code,
        last_words=log_tails.last_words(attempt.srun),
        unready=observed.unready,
        unready_host=observed.unready_host,
        late=observed.late,
        unseen=observed.unseen,
        in_container=attempt.image.exists(),
    )


def read_replicas(attempt: Attempt, kind: str = INFER) -> list[ReplicaState]:
    """States of the attempt's replicas of a kind; one whose state cannot be read counts as running."""
    try:
        return [
            if_readable(read(ReplicaState, replica.state)) or ReplicaState(replica.number, REPLICA_RUNNING, 0, 0.0)
            for replica in attempt.replicas(kind)
        ]
    except OSError as error:
        print(f"the replicas of the attempt cannot be listed: {error}", file=sys.stderr)
        return []


def read_node_reports(attempt: Attempt) -> NodeReports:
    folder = attempt.health("x").parent
    nodes: dict[str, NodeHealth] = {}
    unreadable: dict[str, str] = {}
    for name in names_in(folder):
        if name.endswith(".json") and not name.startswith("."):
            found = read(NodeHealth, folder / name, 0.0 if unreadable else PATIENCE_S)
            if isinstance(found, Unreadable):
                unreadable[name[: -len(".json")]] = f"cannot be used: {found.why}"
            elif found is not ABSENT:
                nodes[name[: -len(".json")]] = found
    return NodeReports(nodes, unreadable, if_readable(read(FabricReport, attempt.fabric, PATIENCE_S)))


def _read_errors(attempt: RankFiles, before: float, of: Collection[int]) -> tuple[list[RankError], dict[int, str]]:
    """Return the oldest RANKS error reports and those of the ranks `of`, oldest first, and rank -> why its report
    cannot be read. Those written since the unix time `before` are left out: the ranks were being ended then, and lost
    peers cause errors."""
    errors: list[RankError] = []
    unreadable: dict[int, str] = {}
    try:
        paths = attempt.errors()
    except OSError as error:
        print(f"the error reports of the ranks cannot be listed: {error}", file=sys.stderr)
        return [], {}
    for path in sorted(paths, key=lambda path: _changed(path, before)):
        rank = int(path.name.split(".")[1])
        if len(errors) + len(unreadable) >= RANKS and rank not in of:
            continue
        found = read(RankError, path, 0.0 if unreadable else PATIENCE_S)
        if isinstance(found, Unreadable):
            unreadable[rank] = found.why
        elif found is not ABSENT and found.at < before:
            prefix = NODES_DISK if _is_of_nodes_disk(found.error, attempt) else ""
            errors.append(found._replace(error=prefix + found.error))
    return errors, unreadable


def _is_of_nodes_disk(error: str, attempt: RankFiles) -> bool:
    found = _NODES_OWN.search(error)
    return found is not None and not found.group(1).startswith(str(attempt.logs.parent.parent) + os.sep)


def _changed(path: Path, default: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return default


def _heartbeats(attempt: RankFiles) -> list[Heartbeat]:
    """Heartbeats that no process has watched, by the file system's clock: the nodes' clocks may be hours apart."""
    try:
        slots = read_slots(attempt.heartbeats)
    except OSError as error:
        print(f"the heartbeats cannot be listed: {error}", file=sys.stderr)
        return []
    of_file: dict[str, list[Heartbeat]] = {}
    for name, slot in slots.items():
        beat = decode_slot(slot)
        if beat is not None:
            of_file.setdefault(name.file, []).append(beat)
    found = []
    for file, beats in of_file.items():
        newest = max(beat.written for beat in beats)  # the last that was written into the file
        ahead = _changed(attempt.heartbeats / file, newest) - newest
        found += [by_clock_of_reader(beat, beat.written + ahead) for beat in beats]
    return sorted(found)


def why_unwritable(folder: Path) -> str | None:
    """Why no file can be written to a folder: a full disk, a used-up quota, a read-only file system. Else None."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error.strerror}: '{folder}'" if error.errno in (*FULL, errno.EROFS) else None
    return None


def _trained(attempt: Attempt) -> int | None:
    """Newest step in the timeline. It is more recent than heartbeats, which are seconds apart."""
    found = decode_lines(TimelineLine, log_tails.tail(attempt.timeline, log_tails.TAIL).encode("utf-8")).records
    return found[-1].step if found else None


def _not_started(attempt: RankFiles, bad: list[RankExit], heartbeats: list[Heartbeat]) -> dict[int, str]:
    began = {beat.rank for beat in heartbeats}
    silent = [ended.rank for ended in bad if ended.rank not in began]
    found = {rank: log_tails.why_not_started(attempt, rank) for rank in silent}
    return {rank: why for rank, why in found.items() if why is not None}


def _timed_out(attempt: RankFiles, exits: list[RankExit], suspected: list[int]) -> dict[int, str]:
    """Rank -> its collective that timed out. Where one rank aborted, the logs of suspects are read too, since srun
    names only the first to abort: a suspect whose collective timed out as well was not the cause."""
    aborted = [ended.rank for ended in exits if -ended.code == signal.SIGABRT]
    ranks = list(dict.fromkeys([*aborted, *suspected]))[:RANKS] if aborted else []
    found = {rank: log_tails.timed_out_collective(attempt, rank) for rank in ranks}
    return {rank: collective for rank, collective in found.items() if collective is not None}


def _stacks(attempt: RankFiles, ranks: list[int]) -> dict[int, str]:
    found = {}
    for path, rank in ((attempt.stacks(rank), rank) for rank in ranks):
        with contextlib.suppress(OSError):
            if path.stat().st_size:
                found[rank] = f"{attempt.logs.parent.name}/{attempt.logs.name}/{path.name}"
    return found
