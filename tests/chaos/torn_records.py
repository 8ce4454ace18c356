"""Torn, truncated and overwritten files of a run, at moments when a crash could leave them so.

`RECORDS` says of each kind of file what a run makes of a damaged one. A crash damages only what was not flushed: the
end of a file that is appended to, a file that is written whole but not synced, and everything in an unpublished
checkpoint. Some file systems leave zero bytes there, others nothing. Older checkpoints are for bad disks: a run that
finds its newest one damaged continues from the previous one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fault import Fault, Target, Undo, nothing_to_undo
from json_files import read_json_lines

from megatron_rl.contract.manifest import MANIFEST
from megatron_rl.contract.paths import RunDir

Damage = Callable[[Path, random.Random], None]


def cut_short(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(max(1, file.stat().st_size)))


def tear_last_line(file: Path, chance: random.Random) -> None:
    """Cut a file inside its last line."""
    data = file.read_bytes()
    begin = data[:-1].rfind(b"\n") + 1
    os.truncate(file, chance.randrange(begin, max(begin + 1, len(data))))


def append_half_a_line(file: Path, chance: random.Random) -> None:
    """Leave the beginning of a line whose write was cut off."""
    last = (file.read_bytes().splitlines() or [b'{"step": 1}'])[-1]
    with file.open("ab") as appended:
        appended.write(last[: chance.randrange(len(last)) + 1][:-1] or b"{")


def append_zeros(file: Path, chance: random.Random) -> None:
    with file.open("ab") as appended:
        appended.write(bytes(chance.randrange(1, 5000)))


def fill_with_zeros(file: Path, chance: random.Random) -> None:
    """Keep the size, as a file system does that had noted the new size but not the content."""
    file.write_bytes(bytes(file.stat().st_size))


def replace_by_garbage(file: Path, chance: random.Random) -> None:
    file.write_bytes(chance.randbytes(chance.randrange(1, 5000)))


def flip_a_bit(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def remove(file: Path, chance: random.Random) -> None:
    file.unlink()


def make_a_directory(file: Path, chance: random.Random) -> None:
    file.unlink()
    file.mkdir()


def make_unreadable(file: Path, chance: random.Random) -> None:
    """Replace a file by one that opening fails for, also for root: a link to itself."""
    file.unlink()
    file.symlink_to(file.name)


TAILS: tuple[Damage, ...] = (append_half_a_line, append_zeros)
WHOLE: tuple[Damage, ...] = (cut_short, fill_with_zeros, replace_by_garbage, remove)
ANY: tuple[Damage, ...] = (*WHOLE, flip_a_bit, make_a_directory, make_unreadable)

Promise = Literal["recovered", "ignored", "said"]
"""Result of a damage: the run repeats what was lost; it does not need the file; it ends, and one line says why."""


@dataclass(frozen=True)
class Record:
    """A kind of file of a run."""

    name: str
    pattern: str
    """Files below the run directory; {attempt} is the folder of the newest attempt, {newest} the newest checkpoint."""
    damages: tuple[Damage, ...]
    promise: Promise
    live: bool = False
    """Whether it may also be damaged while the run writes it: its readers take it as it is."""

    def files(self, run: RunDir) -> list[Path]:
        places = {"{attempt}": run.attempt(run.last_attempt()).folder, "{logs}": run.attempt(run.last_attempt()).logs}
        if steps := run.checkpoint_steps():
            places["{newest}"] = run.checkpoint(steps[0])
        pattern = self.pattern
        for name, folder in places.items():
            pattern = pattern.replace(name, str(folder.relative_to(run.root)))
        return sorted(file for file in run.root.glob(pattern) if file.is_file() and not file.is_symlink())


RECORDS = (
    # Written by rank 0 and flushed before each checkpoint; the start of an attempt cuts them back.
    Record("metrics", "metrics.jsonl", TAILS, "recovered"),
    Record("evaluations", "evaluations.jsonl", TAILS, "recovered"),
    # Synced line by line: the last append may be cut off.
    Record("ledger of attempts", "attempts.jsonl", TAILS, "recovered"),
    Record("notifications", "notifications.jsonl", TAILS, "ignored"),
    # Every record has a checksum, and answers that are lost are generated again.
    Record("bank of answers", "rollouts/bank/*.bank", ANY, "recovered"),
    Record("recorded rollouts", "{attempt}/rollouts/*", (*TAILS, cut_short, fill_with_zeros), "ignored"),
    # Views, and evidence of how an attempt ended that a crash has none of.
    Record("progress", "{attempt}/progress.json", ANY, "ignored", live=True),
    Record("timeline", "{attempt}/timeline.jsonl", TAILS, "ignored", live=True),
    Record("index of the metrics", "metrics_index.jsonl", ANY, "ignored", live=True),
    Record("lesson", "lesson.json", ANY, "ignored", live=True),
    Record("kernels", "{attempt}/kernels.json", ANY, "ignored", live=True),
    Record("marks of the start", "{attempt}/marks.json", ANY, "ignored"),
    Record("heartbeats", "{attempt}/heartbeats/*", ANY, "ignored"),
    Record("addresses", "{attempt}/addresses/*.json", ANY, "ignored"),
    Record("stacks", "{logs}/*.stacks", ANY, "ignored"),
    Record("event files", "tensorboard/*", TAILS, "ignored"),
    Record("state of the event files", "tensorboard.json", ANY, "ignored"),
    # A damaged checkpoint is passed over while an older one is good; a run without a good one stops and says so.
    Record("newest checkpoint", "{newest}/*", ANY, "recovered"),
    Record("name of the newest checkpoint", "checkpoints/latest", ANY, "recovered"),
)


def damage(run: RunDir, record: Record, chance: random.Random) -> bool:
    """Damage one file of a record. Returns whether there was one that the run can do without."""
    files = record.files(run)
    if not files or (record.pattern.startswith("{newest}") and len(run.checkpoint_steps()) < 2):
        return False
    with contextlib.suppress(FileNotFoundError):  # the run removed it in the meantime
        chance.choice(record.damages)(chance.choice(files), chance)
        return True
    return False


def leave_debris(run: RunDir, chance: random.Random) -> None:
    """Leave what a process that was killed while it wrote leaves: temporary files, and half of a checkpoint."""
    folders = [run.root, run.checkpoints, run.attempt(run.last_attempt()).folder]
    for folder in filter(Path.is_dir, folders):
        (folder / f".outcome.json.{uuid.UUID(int=chance.getrandbits(128)).hex}.tmp").write_bytes(chance.randbytes(9))
    if steps := run.checkpoint_steps():
        unfinished = run.unfinished_checkpoint(steps[0] + 1, uuid.UUID(int=chance.getrandbits(128)).hex[:8])
        shutil.copytree(run.checkpoint(steps[0]), unfinished)
        (unfinished / MANIFEST).unlink(missing_ok=True)


def processes_of(run: RunDir, module: str) -> list[int]:
    """Ids of the processes of a run that run a module of the product."""
    found = []
    wanted = f"MRL_RUN_DIR={run.root}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            program, *words = (process / "cmdline").read_bytes().split(b"\0")
            ours = wanted in (process / "environ").read_bytes().split(b"\0")
            if ours and module.encode() in words and not program.endswith(b"srun"):
                found.append(int(process.name))
    return sorted(found)


def _live(record: Record) -> Fault:
    def apply(target: Target, chance: random.Random) -> Undo | None:
        return nothing_to_undo if damage(RunDir(target.run_dir), record, chance) else None

    return Fault(f"damage the {record.name} during the run", apply)


def _at_a_crash(record: Record) -> Fault:
    """Kill all training ranks, and damage what they were writing before the next attempt can read it."""

    def apply(target: Target, chance: random.Random) -> Undo | None:
        run = RunDir(target.run_dir)
        ranks = processes_of(run, "megatron_rl.rank_main")
        if not ranks or not read_json_lines(run.metrics):
            return None
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        leave_debris(run, chance)
        damage(run, record, chance)
        return nothing_to_undo

    return Fault(f"kill the ranks and damage the {record.name}", apply)


FAULTS = (*(_live(record) for record in RECORDS if record.live), *map(_at_a_crash, RECORDS))
