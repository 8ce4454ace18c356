"""Two ranks save a checkpoint on a file system that fails: what they publish is whole, and until then the earlier
checkpoint stays. The ranks are threads that take turns, so a test has one order of all operations."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_injection import ERRORS, Clock, Fault, FaultyFiles, Operation
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rl.checkpoint import checkpoint_writer as writer_module
from megatron_rl.checkpoint.checkpoint_writer import CheckpointWriter, SaveInProgress
from megatron_rl.checkpoint.publish import SaveOutcome, find_latest
from megatron_rl.checkpoint.shards import HostCopies, Snapshot, write_metadata
from megatron_rl.contract.manifest import CheckpointSaved, find_corruption, read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save_section import SaveConfig

RANKS = 2
BEFORE, NEXT = 10, 20
CONFIG = SaveConfig(keep=1, timeout_s=60)


class Turns:
    """Threads of which one at a time runs, until it passes its turn on or ends."""

    def __init__(self, work: Sequence[Callable[[], Any]]) -> None:
        self._turns = [threading.Semaphore(0) for _ in work]
        self._alive = [*range(len(work))]
        self._numbers: dict[int, int] = {}
        self._work = work

    @property
    def number(self) -> int | None:
        """Number of this thread."""
        return self._numbers.get(threading.get_ident())

    def pass_on(self) -> None:
        if (number := self.number) is not None and (after := self._after(number)) != number:
            self._turns[after].release()
            self._turns[number].acquire()

    def results(self) -> list[Any]:
        results: list[Future[Any]] = [Future() for _ in self._work]
        for number, result in enumerate(results):
            threading.Thread(target=self._run, args=(number, result), daemon=True).start()
        self._turns[0].release()
        return [result.result(60) for result in results]

    def _run(self, number: int, result: Future[Any]) -> None:
        self._numbers[threading.get_ident()] = number
        self._turns[number].acquire()
        try:
            result.set_result(self._work[number]())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)
        after = self._after(number)
        self._alive.remove(number)
        self._turns[after].release()  # of this thread, if it was the last

    def _after(self, number: int) -> int:
        return self._alive[(self._alive.index(number) + 1) % len(self._alive)]


class FilesOfRank(FaultyFiles):
    """A file system that fails for one rank, whose operations alone are counted. Every operation ends a turn."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, turns: Turns, rank: int, fault: Fault | None) -> None:
        super().__init__(root, patch, fault)
        self._turns, self._rank = turns, rank

    def see(self, kind: str, path: str) -> str | None:
        self._turns.pass_on()
        # Threads without a number belong to rank 0, which waits for them.
        return super().see(kind, path) if (self._turns.number or 0) == self._rank else None


class TwoRanks:
    """The ranks of a run, which save step NEXT after step BEFORE."""

    def __init__(self, root: Path, snapshots: Sequence[Snapshot]) -> None:
        self.run = RunDir(root)
        self._snapshots = snapshots

    def save(
        self,
        step: int = NEXT,
        *,
        rank: int = 0,
        fault: Fault | None = None,
        patched: Callable[[pytest.MonkeyPatch], None] = lambda _: None,
    ) -> tuple[list[SaveOutcome], list[Operation]]:
        """Return the outcomes of the ranks, and the operations of one.

        rank: whose operations are counted; a fault hits it alone.
        patched: patches the file functions further.
        """
        with pytest.MonkeyPatch.context() as patch:
            clock = Clock(patch)
            turns = Turns([partial(self._save, step, number) for number in range(RANKS)])
            files = FilesOfRank(self.run.root, patch, turns, rank, fault)

            def sleep(seconds: float) -> None:
                clock.sleep(seconds)
                turns.pass_on()

            patch.setattr(time, "sleep", sleep)
            patched(patch)
            return turns.results(), files.operations

    def _save(self, step: int, rank: int) -> SaveOutcome:
        folder = self.run.unfinished_checkpoint(step, "a")
        save = SaveInProgress(step, "a", folder, self._snapshots[rank], {}, time.monotonic(), CONFIG.timeout_s, None)
        return CheckpointWriter(self.run, CONFIG, rank, RANKS).run(save)

    def published(self) -> bool:
        """Whether step NEXT is published. Fails if the next start does not find a whole checkpoint."""
        newest = find_latest(self.run).step
        assert newest is not None
        folder = self.run.checkpoint(newest)
        assert find_corruption(folder, read_manifest(folder).files) is None
        assert (newest == NEXT) == (NEXT in self.run.checkpoint_steps())
        return newest == NEXT


MakeRanks = Callable[[], TwoRanks]


@pytest.fixture(scope="module")
def make_ranks(tmp_path_factory: pytest.TempPathFactory) -> MakeRanks:
    folder, numbers = tmp_path_factory.mktemp("saves"), itertools.count()
    snapshots = [
        HostCopies().take({"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(4), (0, rank, RANKS))})
        for rank in range(RANKS)
    ]
    begun = TwoRanks(folder / "begun", snapshots)
    begun.save(BEFORE)

    def make() -> TwoRanks:
        root = folder / str(next(numbers))
        shutil.copytree(begun.run.root, root)
        return TwoRanks(root, snapshots)

    return make


def saved(outcomes: Sequence[SaveOutcome]) -> list[bool]:
    return [isinstance(one, CheckpointSaved) for one in outcomes]


def test_no_error_of_a_rank_publishes_a_part_or_loses_the_earlier_checkpoint(make_ranks: MakeRanks) -> None:
    ranks = make_ranks()
    outcomes, looks = ranks.save(rank=1)
    assert saved(outcomes) == [True, True]
    assert ranks.published()
    polls = [at for at, one in enumerate(looks) if (one.kind, one.file) == ("list", "checkpoints")]
    assert len(polls) > 10, "rank 1 looks while rank 0 reads its part, writes the index, and publishes"
    for at in (at for at, one in enumerate(looks) if one.kind in ERRORS["EIO"]):
        ranks = make_ranks()
        outcomes, _ = ranks.save(rank=1, fault=Fault("EIO", at))
        assert saved(outcomes) == [ranks.published()] * RANKS, looks[at]


def test_no_error_of_rank_0_publishes_a_part_or_loses_the_earlier_checkpoint(make_ranks: MakeRanks) -> None:
    _, operations = make_ranks().save(rank=0)
    first = {(one.kind, one.site): at for at, one in reversed([*enumerate(operations)]) if one.kind in ERRORS["EIO"]}
    assert {kind for kind, _ in first} >= {"open", "read", "stat", "list", "create", "write", "fsync", "rename"}
    for at in first.values():
        ranks = make_ranks()
        outcomes, _ = ranks.save(rank=0, fault=Fault("EIO", at))
        assert saved(outcomes) == [ranks.published()] * RANKS, operations[at]


def test_an_error_after_the_shards_are_there_costs_no_save(make_ranks: MakeRanks) -> None:
    """Rank 1 only looks then. Its file system is down for 30 s."""
    ranks = make_ranks()
    _, operations = ranks.save(rank=1)
    placed = next(at for at, one in enumerate(operations) if (one.kind, one.file) == ("rename", "part.00001"))
    ranks = make_ranks()
    outcomes, _ = ranks.save(rank=1, fault=Fault("EIO", placed + 1, seconds=30.0))
    assert saved(outcomes) == [True, True]
    assert ranks.published()


@pytest.mark.parametrize("name", ["part.00001", "step-000020"])
def test_a_rename_that_is_done_and_reports_an_error_counts(make_ranks: MakeRanks, name: str) -> None:
    def patched(patch: pytest.MonkeyPatch) -> None:
        rename = os.rename

        def late(source: Path, target: Path) -> None:
            rename(source, target)
            if target.name == name:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

        patch.setattr(os, "rename", late)

    ranks = make_ranks()
    outcomes, _ = ranks.save(patched=patched)
    assert saved(outcomes) == [True, True]
    assert ranks.published()


def test_a_checkpoint_without_the_shards_of_a_rank_is_not_published(make_ranks: MakeRanks) -> None:
    """Somebody has deleted them since the rank wrote them."""
    ranks = make_ranks()

    def patched(patch: pytest.MonkeyPatch) -> None:
        def unlinked(*arguments: Any) -> Any:
            next(ranks.run.checkpoints.glob("*.tmp/__1_*")).unlink()
            return write_metadata(*arguments)

        patch.setattr(writer_module, "write_metadata", unlinked)

    outcomes, _ = ranks.save(patched=patched)
    assert saved(outcomes) == [False, False]
    assert "__1_0.distcp is missing" in str(outcomes[0])
    assert not ranks.published()
