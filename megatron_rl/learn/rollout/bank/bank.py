"""The durable bank: generated work outlives the process.

    bank.scored(ordinals, problem)                        groups scored by earlier attempts: not generated again
    recording = bank.recording(inference)
    recording.generate(request)                           an interrupted answer resumes from its tokens
    recording.add(group)                                  records a scored group
    bank.end_batch(recording, below)                      forgets trained groups that no checkpoint could need
    bank.begin_checkpoint(step, next_ordinal, ...)        secures the groups that the checkpoint needs
    bank.end_checkpoint(step)                             forgets the groups that the published checkpoint settles

Records are written every `resume.flush_s`, after each batch that took long enough, and when the driver stops. Each
attempt has one file per driver (file.py). Every driver reads all files, because shares differ with another number of
ranks. A lost record costs repeated work, never a wrong result: records that are damaged, torn or from an abandoned
line of training are ignored. Groups that a resumed run could not generate again are on disk before a checkpoint is
published. A file that cannot be read may have such groups: it ends the rank, and the next start tries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from functools import partial
from itertools import chain, starmap
from pathlib import Path

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.contract.files import seen
from megatron_rl.generate.engine.interface import ResumableInference
from megatron_rl.learn.rollout.bank.bank_records import (
    Lineage,
    attempt_record,
    group_record,
    records_within,
    reusable_records,
    unsettled_records,
    whole_share,
)
from megatron_rl.learn.rollout.bank.file import BankFile, Entry, Record, bank_file, pause, scan_all
from megatron_rl.learn.rollout.bank.recording import EarlierWork, Recording, ScoredGroup
from megatron_rl.recipe.rollout import ResumeConfig

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 3.0  # seconds that the last write has when the bank is closed
SECURE_TIMEOUT_S = 60.0  # deadline, in seconds, of the records that a checkpoint needs; after it the checkpoint fails
WORTH_WRITING_S = 1.0
"""Seconds of generation that are worth a write after a batch. Writing every step of a tiny model takes a tenth of
it."""


class Bank:
    """Records of earlier attempts as one driver knows them, and the file that it writes."""

    def __init__(
        self, folder: Path, resume: ResumeConfig, lineage: Lineage, *, next_ordinal: int, driver: int, drivers: int
    ) -> None:
        """Read the files of earlier attempts. Raises OSError if one cannot be read.

        Args:
            next_ordinal: ordinal below which all are settled.
            driver: number of this driver among `drivers`; the first one cleans up.
        """
        self._folder = folder
        self._resume = resume
        self._lineage = lineage
        self._keeps_parts = resume.partial == "keep"
        self._first = driver == 0
        self._settled_below = next_ordinal
        self._taken_below = next_ordinal  # ordinal below which batches have taken all
        self._saved_version = lineage.policy_version  # newest policy version of a checkpoint that has begun
        limit = int(resume.bank_gib * 2**30) // drivers
        self._file = BankFile(bank_file(folder, lineage.attempt, driver), limit, records_within)
        self._first_record = [attempt_record(lineage)]
        self._unwritten: list[ScoredGroup] = []
        self._flushed_at = time.monotonic()
        self._checkpoints: dict[int, int] = {}  # step: ordinal below which it settles all
        self._read()
        if self._first:
            with suppress(OSError):  # the next start deletes them
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)

    def scored(
        self, ordinals: Sequence[int], problem: Callable[[int], Problem], *, waiting: bool = False
    ) -> dict[int, TrajectoryGroup]:
        """Return the groups of a driver's share that earlier attempts scored. With `resume.partial: regenerate`, return
        all of the share or nothing.

        waiting: whether they are surplus groups, which a checkpoint secured. Then the missing ones have no group,
            because their prompts are too long, and all that are found are returned.

        Raises OSError if a file with groups cannot be read.
        """
        if not all(seen(path.exists) for path in {entry.path for entry in self._entries}):
            self._read()  # the first driver has moved the records into its own file
        groups = self._earlier.scored(ordinals, problem)
        if self._lost(ordinals, groups):  # moved meanwhile, or damaged
            pause()
            self._read()
            groups = self._earlier.scored(ordinals, problem)
        while lost := self._lost(ordinals, groups):
            self._index([entry for entry in self._entries if entry not in lost])  # generated and written again
            groups = self._earlier.scored(ordinals, problem)
        if waiting and (missing := [ordinal for ordinal in ordinals if ordinal not in groups]):
            logger.warning(
                "bank: %d of %d groups that the checkpoint counts on are not in %s: prompts that are too long have "
                "none, and the others are generated again, by newer weights than in a run without interruption",
                len(missing),
                len(ordinals),
                self._folder,
            )
        return groups if self._keeps_parts or waiting else whole_share(ordinals, groups)

    def recording(self, inference: ResumableInference) -> Recording:
        return Recording(
            inference, lambda: self._earlier, self._lineage, self._unwritten.append, with_parts=self._keeps_parts
        )

    def end_batch(self, recording: Recording, below: int) -> None:
        """Note that a batch takes all ordinals below, and that those before it are trained. Write new records in the
        background, unless that was moments ago: the loop and `flush_regularly` in it may stop while the ranks train."""
        # Example: the newest checkpoint has the weights of version 40. If the attempt is killed in step 45, the next
        # one resumes from them and generates the groups of step 43 again, by version 40 instead of 42. A checkpoint
        # that begins after step 43 has trained on them. So nobody could use their records.
        if self._resume.newer == "discard":
            self._unwritten[:] = [
                each
                for each in self._unwritten
                if each.group.ordinal >= self._taken_below or each.newest <= self._saved_version
            ]
        self._taken_below = below
        if time.monotonic() - self._flushed_at > min(self._resume.flush_s, WORTH_WRITING_S):
            self.flush(recording)

    def begin_checkpoint(
        self, step: int, next_ordinal: int, policy_version: int, waiting: Iterable[TrajectoryGroup] = ()
    ) -> Callable[[], None]:
        """Prepare for a checkpoint of `step` with weights of `policy_version`, which settles all ordinals below
        `next_ordinal`.

        waiting: surplus groups, which a run that resumes from the checkpoint must use: newer weights would sample other
            answers.

        Returns a function for any thread, to call before the checkpoint is published. It waits until these
        groups are on disk, and the record of this attempt's origin too. Without that record, a later attempt could
        mistake work from an abandoned line of training for its own. Raises OSError if they cannot be written.
        """
        self._checkpoints[step] = next_ordinal
        self._saved_version = policy_version
        groups = [group for group in waiting if group.ordinal not in self._earlier.groups]
        on_disk = self._file.secure(partial(self._missing, groups))

        def wait() -> None:
            try:
                on_disk.result(SECURE_TIMEOUT_S)
            except NotYet as error:
                raise OSError(f"{self._file.path} is not written within {SECURE_TIMEOUT_S:g} s") from error

        return wait

    def _missing(self, groups: Sequence[TrajectoryGroup], there: Sequence[Entry]) -> Iterator[Record]:
        """Yield the record of this attempt and those of these groups, unless the file has them."""
        begun = {entry.head["lineage"]["attempt"] for entry in there if entry.head["kind"] == "attempt"}
        known = {entry.head["ordinal"] for entry in there if entry.head["kind"] == "group"}
        if self._lineage.attempt not in begun:
            yield attempt_record(self._lineage)
        for group in groups:
            if group.ordinal not in known:
                newest = max(group.versions, default=self._lineage.policy_version)
                yield group_record(group, newest, newest, self._lineage)

    def end_checkpoint(self, step: int) -> None:
        below = self._settled_below = max(self._settled_below, self._checkpoints.pop(step))
        self._index([entry for entry in self._entries if entry.head["ordinal"] >= below])
        self._unwritten[:] = [each for each in self._unwritten if each.group.ordinal >= below]
        # Every attempt leaves a file for each driver. So that they do not pile up, the first driver moves what is still
        # needed of earlier attempts into its own file and deletes theirs. Another driver whose entries lie in a deleted
        # file reads the folder again: see `scored`.
        folded: list[Entry] = []
        superseded: set[Path] = set()
        if self._first:
            ours = self._file.path.name.partition(".")[0]
            superseded = {path for path in self._scanned if path.name.partition(".")[0] != ours}
            folded = [entry for entry in [*self._attempts, *self._entries] if entry.path in superseded]
        self._file.compact(lambda entries: unsettled_records(entries, below), folded, superseded)

    def close(self) -> None:
        self.flush()
        if not self._file.wait(WRITE_TIMEOUT_S):
            logger.warning("%s was not written within %g s", self._file.path, WRITE_TIMEOUT_S)
        self._file.close()

    # Records of earlier attempts

    def _lost(self, ordinals: Sequence[int], found: Mapping[int, TrajectoryGroup]) -> list[Entry]:
        """Records of ordinals whose group they do not have."""
        groups = self._earlier.groups
        return [groups[ordinal] for ordinal in ordinals if ordinal in groups and ordinal not in found]

    def _read(self) -> None:
        found = scan_all(self._folder)
        entries = [entry for its, _ in found.values() for entry in its]
        damaged = sum(torn for _, torn in found.values())
        self._scanned = found.keys()
        selection = reusable_records(entries, self._lineage, self._settled_below, self._resume.newer)
        self._attempts = [entry for entry in entries if entry.head["kind"] == "attempt"]
        self._index(selection.entries)
        if self._first and (entries or damaged):
            self._report(selection.discarded, damaged)

    def _index(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._earlier = EarlierWork.index(entries, with_parts=self._keeps_parts)

    def _report(self, discarded: Counter[str], damaged: int) -> None:
        earlier = self._earlier
        parts = [f"{len(earlier.groups)} scored groups and {len(earlier.parts)} answers of earlier attempts"]
        parts += [f"{count} records ignored, {reason}" for reason, count in sorted(discarded.items())]
        if damaged:
            parts.append(f"{damaged} files end in a damaged or torn record")
        logger.info("bank: %s", "; ".join(parts))

    # Records of this attempt

    async def flush_regularly(self, recording: Recording) -> None:
        while True:
            await asyncio.sleep(self._resume.flush_s)
            self.flush(recording)

    def flush(self, recording: Recording | None = None) -> None:
        scored = [(each.group, each.version, each.newest, self._lineage) for each in self._unwritten]
        parts = recording.new_parts() if recording else []
        if scored or parts or self._first_record:
            # The file's thread encodes them: here, that would pause generation, on one rank at a time.
            self._file.append(chain(self._first_record, starmap(group_record, scored), parts))
        self._first_record = []
        self._unwritten.clear()
        self._flushed_at = time.monotonic()
