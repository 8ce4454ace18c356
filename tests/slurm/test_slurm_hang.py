"""A run that hangs ends as a crash that names the rank that the others wait for, with the stacks of all."""

from __future__ import annotations

import pytest
from json_files import read_json
from lab import wait_until
from login import SECONDS, Login

DEMO = ("demo", "--cluster", "stub", "job.nodes=2", "job.gpus_per_node=1")


@pytest.mark.slow
def test_hanging_run_is_ended_and_the_hanging_rank_named(login: Login) -> None:
    run = login.submit(*DEMO, "job.silence_limit_s=6", stub={"steps": 1000, "hangs_at": 3})
    wait_until("the attempt has ended", run.ends, SECONDS)
    node = run.seen()["train.1"]["host"]
    attempt = run.dir.attempt(1)

    end = run.ledger()[-1]
    assert (end["outcome"], end["rank"], end["node"]) == ("crashed", 1, node)
    assert (end["phase"], end["step"], end["hung"]) == ("generate", 3, True)
    assert end["error"].startswith("silent for")
    assert end["error"].endswith("(stacks: logs/attempt-001/train.1.stacks)")
    assert read_json(attempt.hang)["silent_s"] >= 6
    for rank in (0, 1):
        assert "in hang_as_asked" in attempt.stacks(rank).read_text()
    assert f"rank 1 on {node} has been silent" in run.dir.batch_log.read_text()
