"""Real training that its user stops, and goes on with as another job."""

from __future__ import annotations

import pytest
from login import Login, Run
from records import RECIPE, finish, hold, ordinals, record, resume, wait_until_held


def stop(login: Login) -> Run:
    """A run that is cancelled, with a save, during its sixth step."""
    hold(login, {"attempt": 1, "where": "generate", "step": 6})
    run = login.submit(*RECIPE)
    wait_until_held(run)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    assert run.wait() in {"COMPLETED", "CANCELLED"}
    assert run.ends() == [("stopped", "cancelled")]
    assert run.dir.checkpoint_steps()[0] == 5
    return run


def test_a_stopped_run_stays_away_until_it_is_resumed(login: Login, undisturbed: Run) -> None:
    run = stop(login)
    resumed = resume(login, run)
    finish(resumed)
    assert run.field("Restarts") == "0", "the first job came back"
    assert resumed.ends() == [("stopped", "cancelled"), ("finished", None)]
    assert record(resumed) == record(undisturbed)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes(login: Login, undisturbed: Run) -> None:
    resumed = resume(login, stop(login), "job.nodes=1")
    finish(resumed)
    assert len(resumed.ledger()[-2]["nodes"]) == 1
    assert ordinals(resumed) == ordinals(undisturbed)
    steps, evaluations = record(resumed)
    assert steps[:5] == record(undisturbed)[0][:5]
    assert [line["step"] for line in evaluations] == [line["step"] for line in record(undisturbed)[1]]
