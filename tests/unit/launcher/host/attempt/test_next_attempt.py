"""What an attempt takes over from the one before it in the same job."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from launcher.host.attempt import begin as begin_module
from launcher.host.attempt import nodes
from launcher.host.attempt.context import Here
from launcher.host.judge.policy import BY_US, HERE
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import append_json_line, read_json, write_json

PLAN = {"nodes": 2, "gpus_per_node": 1, "spare_nodes": 1, "steps": [{"name": "train", "nodes": [0, 1]}]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Job 7 on three nodes; attempt 1 is about to end."""
    monkeypatch.setattr(client, "hostnames", lambda nodelist: nodelist.split(","))
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    append_json_line(run.attempts_ledger, {"event": "start", "attempt": 1, "at": 10.0, "job_id": "7"})
    write_json(run.plan, PLAN)
    return Here({"MRL_RUN_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3"})


def end(here: Here, then: str, **more: Any) -> None:
    line = {"event": "end", "attempt": 1, "at": 20.0, "job_id": "7", "then": then, "excluded": []} | more
    append_json_line(here.run.attempts_ledger, line)


def begin(here: Here) -> Here:
    assert begin_module.open_attempt(here, argparse.Namespace()) == EXIT_FINISHED
    here._attempt = "2"
    return here


@pytest.mark.parametrize(
    ("asked_at", "then", "leaves"), [(21.0, HERE, True), (19.0, HERE, False), (21.0, BY_US, False)]
)
def test_a_request_between_two_attempts_of_an_allocation_is_for_the_second(
    here: Here, asked_at: float, then: str, leaves: bool
) -> None:
    end(here, then)
    write_json(here.run.attempt(1).drain, {"cause": "cancelled", "by": "you", "at": asked_at, "deadline": None})
    request = read_json(begin(here).attempt.drain)
    assert (request is not None) is leaves
    assert request is None or (request["cause"], request["by"]) == ("cancelled", "you")


def choose(here: Here) -> Any:
    code = nodes.choose_nodes(here, argparse.Namespace(step=None, checked=False))
    return code, read_json(here.attempt.nodes)


def test_a_node_that_slurm_was_not_told_to_avoid_is_not_used(here: Here) -> None:
    end(here, BY_US, excluded=["n1", "n9"])
    code, nodes = choose(begin(here))
    assert code == EXIT_FINISHED
    assert nodes["steps"] == {"train": ["n2", "n3"]}
    assert nodes["bad"] == {"n1": "attempt 1 failed there"}


def test_nor_is_one_that_failed_an_earlier_attempt_of_the_allocation(here: Here) -> None:
    end(here, HERE, excluded=["n1"], attempt=0)
    end(here, HERE)
    assert set(choose(begin(here))[1]["bad"]) == {"n1"}


def test_one_that_the_run_cannot_do_without_is_used_though_slurm_refused_something_else(here: Here) -> None:
    end(here, BY_US, excluded=["n1", "n2"])
    write_json(here.run.attempt(1).requeued, {"at": 21.0, "problem": "postpone: no", "avoided": ["n2"]})
    assert set(choose(begin(here))[1]["bad"]) == {"n2"}


def test_too_many_of_them_send_the_job_back(here: Here) -> None:
    end(here, BY_US, excluded=["n1", "n2"])
    assert choose(begin(here))[0] == EXIT_DRAINED


@pytest.mark.parametrize("by", ["an exclusion that Slurm took", "another job"])
def test_a_node_is_not_held_against_a_job_for_ever(here: Here, by: str) -> None:
    end(here, BY_US, excluded=["n1"], job_id="6" if by == "another job" else "7")
    if by != "another job":  # it is given the node by somebody who changed the job since
        write_json(here.run.attempt(1).requeued, {"at": 21.0, "problem": None})
    assert choose(begin(here))[1]["bad"] == {}


def test_the_nodes_that_are_left_are_asked_for_until_slurm_answers(here: Here, monkeypatch, capsys) -> None:
    """Right after a node was lost the controller is busy; a dead node in the list would have steps wait for it."""
    answers = iter([client.SlurmSilent("timed out"), {"NodeList": "n1,n2,n3"}])

    def show(job_id: str) -> dict[str, str]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(client, "show_job", show)
    monkeypatch.setattr(client, "ASK_AGAIN", 0.0)
    monkeypatch.setattr(client, "node_states", lambda hosts: {"n1": "allocated", "n2": "down*", "n3": "allocated"})
    assert nodes.left(here, argparse.Namespace()) == EXIT_FINISHED
    assert capsys.readouterr().out == "2 n1,n3\n"


@pytest.mark.parametrize("named", ["owner", "ledger"])
def test_a_job_waits_until_the_one_before_is_gone_from_its_nodes(here: Here, monkeypatch, capsys, named: str) -> None:
    """A rank that does not die may still write into the run directory."""
    states = ["COMPLETING", "COMPLETING", "CANCELLED"]
    asked = []

    def show(job_id: str) -> dict[str, str]:
        asked.append(job_id)
        return {"JobState": states.pop(0)}

    monkeypatch.setattr(client, "show_job", show)
    monkeypatch.setattr(begin_module, "LOOK", 0.0)
    here.job_id = "8"
    if named == "owner":
        here.run.attempts_ledger.unlink()
    begin_module._let_go(here, {"job_id": "7" if named == "owner" else "8"})
    assert asked == ["7"] * 3
    assert capsys.readouterr().out == "waiting for job 7 to be gone from its nodes\n"


def test_that_wait_has_an_end(here: Here, monkeypatch) -> None:
    monkeypatch.setattr(client, "show_job", lambda job_id: {"JobState": "COMPLETING"})
    monkeypatch.setattr(begin_module, "LOOK", 0.01)
    monkeypatch.setattr(begin_module, "COMPLETING", 0.05)
    begin_module._let_go(here, {"job_id": "6"})


def test_what_a_user_sets_for_sinfo_does_not_hide_nodes(monkeypatch) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "other")
    assert "SINFO_PARTITION" not in client.environment()
