"""The durable bank: what generation has paid for outlives the process.

    bank.groups(ordinals)       scored groups of earlier attempts: nothing of them is done again
    bank.inference(ordinal)     the engine, through which an interrupted answer goes on from the tokens it had
    async with bank.keeping():  what is under way is written every `resume.flush_s`, and when the block is left, unless
                                that was moments ago
    bank.put(group)             scored
    bank.saving(step, ordinal)  a checkpoint is begun that settles all below this ordinal ...
    bank.saved(step)            ... and published: they are forgotten

One file per attempt and driver (bank_file.py); every driver reads those of all, since another number of ranks has
other shares. Losing any of it costs repeated work, never a wrong record: what is damaged, torn or of a line of
training that was given up is as if it had not been.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.inference.api import Beginning, Completion, GenerationRequest, InferenceInterface, ResumableInference
from megatron_rl.rank.groups import Groups
from megatron_rl.rollout.bank.file import BankFile, Entry, Record, bank_file, bank_files, scan
from megatron_rl.rollout.bank.records import (
    Answer,
    Lineage,
    answer_of,
    attempt_record,
    fingerprint,
    group_record,
    join,
    live,
    prompt_checksum,
    read_group,
    shrink,
    stretch_record,
    usable,
    whole_share,
)
from megatron_rl.rollout.config import ResumeConfig

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0
WORTH_WRITING_S = 1.0
"""What took less than this to generate waits for more: to write every step of a tiny model takes a tenth of it."""


class Bank:
    """What one driver knows of earlier attempts, and the file it writes."""

    def __init__(
        self,
        folder: Path,
        engine: ResumableInference,
        resume: ResumeConfig,
        lineage: Lineage,
        *,
        next_ordinal: int,
        driver: int,
        drivers: int,
    ) -> None:
        """Reads what there is.

        Args:
            next_ordinal: all below it are settled.
            driver: number of this driver among `drivers`; the first one tidies up.
        """
        self.engine = engine
        self._folder = folder
        self._resume = resume
        self._lineage = lineage
        self._first = driver == 0
        self._settled_below = next_ordinal
        self._file = BankFile(
            bank_file(folder, lineage.attempt, driver), int(resume.bank_gib * 2**30) // drivers, shrink
        )
        self._first_record = [attempt_record(lineage)]
        self._unwritten: list[_Scored] = []
        self._flushed_at = time.monotonic()
        self._asked: dict[int, _Asked] = {}
        self._submitted: dict[int, int] = {}
        self._saving: dict[int, int] = {}
        self._read()
        if self._first:
            for debris in folder.glob(".*.tmp"):
                debris.unlink(missing_ok=True)

    def _read(self) -> None:
        """Index the records of earlier attempts; their bodies are read when they are needed."""
        entries: list[Entry] = []
        damaged = 0
        for path in bank_files(self._folder):
            with suppress(OSError):  # folded into another one meanwhile, or unreadable: then it is generated again
                found = scan(path)
                entries += found.entries
                damaged += found.damaged
        chosen = usable(entries, self._lineage, self._settled_below, self._resume.newer)
        self._attempts = [entry for entry in entries if entry.head["kind"] == "attempt"]
        self._index(chosen.entries)
        if self._first and (entries or damaged):
            self._say(chosen.discarded, damaged)

    def _index(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._groups: dict[int, Entry] = {}
        self._stretches: dict[Answer, list[Entry]] = defaultdict(list)
        self._versions: dict[int, int] = {}
        for entry in entries:
            if entry.head["kind"] == "group":
                self._groups[entry.head["ordinal"]] = entry
            elif self._resume.partial == "keep":
                self._stretches[answer_of(entry.head)].append(entry)
                self._versions[entry.head["ordinal"]] = entry.head["version"]

    def _say(self, discarded: Counter[str], damaged: int) -> None:
        parts = [f"{len(self._groups)} scored groups and {len(self._stretches)} answers of earlier attempts"]
        parts += [f"{count} records put aside, {reason}" for reason, count in sorted(discarded.items())]
        if damaged:
            parts.append(f"{damaged} damaged or torn places skipped")
        logger.info("bank: %s", "; ".join(parts))

    # What earlier attempts left

    def groups(self, ordinals: Sequence[int], problem: Callable[[int], Problem]) -> dict[int, TrajectoryGroup]:
        """Those of a driver's share that are scored already; with `resume.partial: regenerate` all of them or none."""
        if any(not path.exists() for path in {entry.path for entry in self._entries}):
            self._read()  # the first driver has folded them into its own file
        known: dict[int, TrajectoryGroup] = {}
        for ordinal in ordinals:
            entry = self._groups.get(ordinal)
            body = self._body(entry) if entry else None
            if entry and body is not None:
                known[ordinal] = read_group(entry.head, body, problem(ordinal))
        return known if self._resume.partial == "keep" else whole_share(ordinals, known)

    def version(self, ordinal: int) -> int:
        """The policy version that an ordinal's keys are made of: the one under which it was first submitted."""
        earlier = self._versions.get(ordinal, self.engine.policy_version)
        return self._submitted.setdefault(ordinal, earlier)

    def inference(self, ordinal: int) -> InferenceInterface:
        """The engine for the requests of one ordinal."""
        return _Remembering(self, ordinal)

    async def generate(self, ordinal: int, request: GenerationRequest) -> list[Completion]:
        if self._resume.partial == "regenerate":
            return await self.engine.generate(request)
        prompt = prompt_checksum(request)
        known = {}
        for sample in range(request.num_samples):
            beginning = self._beginning((request.key, prompt, sample))
            if beginning is not None:
                known[sample] = beginning
        request = replace(request, known=known)
        asked = _Asked(ordinal, self.version(ordinal), request, prompt, {i: len(k.tokens) for i, k in known.items()})
        self._asked[id(request)] = asked
        asked.completions = await self.engine.generate(request)
        return asked.completions

    def _beginning(self, answer: Answer) -> Beginning | None:
        stretches = self._stretches.get(answer)
        return join((entry.head, self._body(entry)) for entry in stretches) if stretches else None

    def _body(self, entry: Entry) -> bytes | None:
        with suppress(OSError):  # gone or unreadable: then it is generated again
            return entry.read()
        return None

    # What this one leaves

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """What is under way inside the block is written now and then, and when it is left; after a step of moments
        only where something went wrong, else with those that follow."""
        regularly = asyncio.create_task(self._flush_regularly())
        finished = False
        try:
            yield
            finished = True
        finally:
            regularly.cancel()
            if not finished or time.monotonic() - self._flushed_at > min(self._resume.flush_s, WORTH_WRITING_S):
                self.flush()

    async def _flush_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._resume.flush_s)
            self.flush()

    def put(self, group: TrajectoryGroup) -> None:
        """Remember a scored group; on disk with the next flush."""
        ordinal = group.ordinal
        self._unwritten.append(_Scored(group, self.version(ordinal), self.engine.policy_version))
        self._asked = {number: asked for number, asked in self._asked.items() if asked.ordinal != ordinal}

    def flush(self) -> None:
        """Write, behind the caller, what is new."""
        groups = [group_record(each.group, each.version, each.newest, self._lineage) for each in self._unwritten]
        stretches = self._new_stretches() if self._asked else []
        if records := [*self._first_record, *groups, *stretches]:
            self._file.append(records)
        self._first_record, self._unwritten = [], []
        self._flushed_at = time.monotonic()

    def _new_stretches(self) -> list[Record]:
        found = [(id(each.request), each.sample, each.beginning) for each in self.engine.under_way()]
        for number, asked in self._asked.items():
            for sample, completion in enumerate(asked.completions or []):
                beginning = Beginning(completion.tokens, completion.logprobs, completion.policy_version)
                found.append((number, sample, beginning))
        records = []
        for number, sample, beginning in found:
            asked_for = self._asked.get(number)  # none: of an evaluation
            if asked_for is None or len(beginning.tokens) <= asked_for.written.get(sample, 0):
                continue
            records.append(
                stretch_record(
                    asked_for.ordinal,
                    asked_for.version,
                    self.engine.policy_version,
                    (asked_for.request.key, asked_for.prompt, sample),
                    asked_for.written.get(sample, 0),
                    beginning,
                    self._lineage,
                )
            )
            asked_for.written[sample] = len(beginning.tokens)
        return records

    def saving(self, step: int, next_ordinal: int) -> None:
        """A checkpoint of `step` is under way: it settles all ordinals below `next_ordinal`."""
        self._saving[step] = next_ordinal

    def saved(self, step: int) -> None:
        """It is published: forget what it settles, behind the caller."""
        self._settled_below = max(self._settled_below, self._saving.pop(step))
        below = self._settled_below
        self._submitted = {ordinal: version for ordinal, version in self._submitted.items() if ordinal >= below}
        self._index([entry for entry in self._entries if entry.head["ordinal"] >= below])
        self._unwritten = [each for each in self._unwritten if each.group.ordinal >= below]
        folded: list[Entry] = []
        superseded: set[Path] = set()
        if self._first:
            ours = self._file.path.name.partition(".")[0]
            superseded = {path for path in bank_files(self._folder) if path.name.partition(".")[0] != ours}
            folded = [entry for entry in [*self._attempts, *self._entries] if entry.path in superseded]
        self._file.compact(lambda entries: live(entries, below), folded, superseded)

    def close(self) -> None:
        """Write what is left. What is not on disk within seconds is generated again."""
        self.flush()
        if not self._file.wait(CLOSE_TIMEOUT_S):
            logger.warning("%s was not written within %g s", self._file.path, CLOSE_TIMEOUT_S)
        self._file.close()


def open_bank(
    run_dir: RunDir,
    attempt: int,
    config: RunConfig,
    engine: ResumableInference,
    groups: Groups,
    *,
    step: int,
    next_ordinal: int,
) -> Bank:
    """The bank of a run that goes on after `step`, with the engine at that step's weights, for this rank of the
    drivers' `groups.data`."""
    lineage = Lineage(run_dir.root.name, attempt, step, engine.policy_version, fingerprint(config))
    return Bank(
        run_dir.bank,
        engine,
        config.resume,
        lineage,
        next_ordinal=next_ordinal,
        driver=dist.get_rank(groups.data),
        drivers=dist.get_world_size(groups.data),
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    """A group of this attempt."""

    group: TrajectoryGroup
    version: int
    newest: int
    """See `group_record`."""


@dataclass(slots=True)
class _Asked:
    """A request of this attempt whose group is not scored yet."""

    ordinal: int
    version: int
    request: GenerationRequest
    prompt: int
    """Its checksum."""
    written: dict[int, int]
    """Tokens of each sample that are on disk or on their way there."""
    completions: list[Completion] | None = None


@dataclass(frozen=True, slots=True)
class _Remembering:
    """`InferenceInterface` of one ordinal."""

    bank: Bank
    ordinal: int

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self.bank.generate(self.ordinal, request)
