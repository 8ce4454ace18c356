"""After the failure of any operation on its files, while it trains, saves, records or resumes, a rank continues or ends
with the reason, and the next start brings the run to the same end as an undisturbed one.

The runs are those of simulated_run.py; the failing file system is that of fault_injection.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from checkpoint_helpers import checkpointer, control, sharded_state
from fault_injection import OLDER, ONCE, Clock, Fault, FaultyFiles, Operation, Tally, faults
from simulated_run import Record, Simulation, recipe

from megatron_rl.checkpoint.load import verify
from megatron_rl.recipe.errors import ConfigurationError

MakeRun = Callable[..., Simulation]
HALF_WAY = 14
"""Poll of the drain flag at which the run is asked to leave: it then has a checkpoint, a record and a bank."""


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory, platform: Any, groups: Any) -> MakeRun:
    numbers = itertools.count()
    folder = tmp_path_factory.mktemp("runs")
    return lambda left=None: Simulation(folder / str(next(numbers)), recipe(dynamic=True), platform, groups, left)


@pytest.fixture(scope="module")
def undisturbed(make_run: MakeRun) -> Record:
    run = make_run()
    assert run.attempt() == "finished"
    return run.record()


def faulty(run: Simulation, fault: Fault | None) -> tuple[list[Operation], str]:
    """Run the second attempt of a run. Returns its operations, and how it ends."""
    seen: list[FaultyFiles] = []

    def put(patch: pytest.MonkeyPatch) -> None:
        Clock(patch)
        seen.append(FaultyFiles(run.run_dir.root, patch))
        seen[0].fail(fault)

    try:
        ending = run.attempt(files=put)
    except ConfigurationError:
        raise  # such a run is not restarted
    except Exception as error:  # noqa: BLE001 - a crash of the reader, after which the next start resumes
        ending = f"crashed: {error}"
    return seen[0].operations, ending


def sweep(make_run: MakeRun, undisturbed: Record, each: int | None, seconds: float, stride: int = 1) -> Tally:
    """each, seconds, stride: as for `faults`."""
    begun = make_run()
    assert begun.attempt(ask_at=HALF_WAY) == "drained"
    left = begun.disk.state()
    whole = make_run(left)
    newest = whole.run_dir.checkpoint_steps()[0]
    operations, ending = faulty(whole, None)
    assert ending == "finished"
    assert whole.record() == undisturbed
    tally = Tally()
    for fault in faults(operations, each, seconds, OLDER, stride):
        run = make_run(left)
        _, ending = faulty(run, fault)
        where = f"{fault} ({operations[fault.at]}): {ending}"
        assert run.run_dir.checkpoint_steps()[0] >= newest, where
        if ending != "finished":
            assert run.attempt() == "finished", where
        assert run.record() == undisturbed, where
        tally.count(fault, operations[fault.at].kind)
    return tally


def test_rank_loses_nothing_by_a_fault(make_run, undisturbed, record_property) -> None:
    tally = sweep(make_run, undisturbed, 1, ONCE, stride=2)
    tally.report("rank, once", record_property)
    assert tally.operations >= {"open", "read", "stat", "list", "create", "write", "fsync", "rename"}


def test_no_single_fault_makes_a_good_checkpoint_passed_over(tmp_path, groups, record_property) -> None:
    """A run that resumed from an older checkpoint would delete the good one at its next save."""
    saver = checkpointer(tmp_path)
    saver.save(20, sharded_state(1.0), {})
    saver.wait(final=True)

    def verified(fault: Fault | None) -> list[Operation]:
        with pytest.MonkeyPatch.context() as patch:
            Clock(patch)
            files = FaultyFiles(tmp_path, patch)
            files.fail(fault)
            assert verify(saver.run_dir.checkpoint(20), control()).manifest.step == 20, fault
            return files.operations

    tally, operations = Tally(), verified(None)
    for fault in faults(operations, None, without=OLDER):
        verified(fault)
        tally.count(fault, operations[fault.at].kind)
    tally.report("verify, once", record_property)
    assert tally.operations == {"open", "read", "stat"}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, 60.0])
def test_rank_loses_nothing_by_any_fault(make_run, undisturbed, record_property, seconds) -> None:
    sweep(make_run, undisturbed, None, seconds).report(f"rank, for {seconds:.0f} s", record_property)
