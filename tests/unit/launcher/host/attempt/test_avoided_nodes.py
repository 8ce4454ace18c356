"""Nodes that a job excludes when it starts again: for a day, and never so many that it could not start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import begin, end, make_run

from launcher.backends.slurm.jobs import JobState
from launcher.cli.show import status_rows as show
from launcher.host.attempt.start_again import EXCLUDED_FOR_S, nodes_to_avoid
from launcher.host.slurm import queries
from launcher.host.slurm.call import SlurmRefused
from launcher.runs.state import read_status
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.paths import RunDir

NOW = 1e6
RECENT, LONG_AGO = NOW - EXCLUDED_FOR_S + 1, NOW - EXCLUDED_FOR_S


class Cluster:
    """Nodes n1 to n9. A job needs six of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nodes = {f"n{number}" for number in range(1, 10)}
        self.down: set[str] = set()
        patch.setattr(queries, "could_start", self.could_start)
        patch.setattr(queries, "node_states", lambda hosts: dict.fromkeys(self.nodes & set(hosts), "idle"))

    def could_start(self, script: str, avoid: Sequence[str]) -> bool:
        assert set(avoid) <= self.nodes, "Invalid node name specified"
        return len(self.nodes - self.down - set(avoid)) >= 6


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def avoided(root: Path, before: Sequence[tuple[float, str, str]], fresh: str, listed: str) -> str:
    """Args: before: (time, nodes, then) of each earlier end; fresh: nodes of this one; listed: what the job avoids."""
    run = RunDir(root)
    for attempt, (at, nodes, then) in enumerate(before, 1):
        end(run, attempt, "crashed", at=at, excluded=nodes.split(), then=then)
    this = AttemptEnd(len(before) + 1, NOW, "crashed", excluded=fresh.split())
    return " ".join(nodes_to_avoid(run, this, listed.split(), NOW))


# fmt: off
TABLE = [
    # ends before                                                         now   as it is    from now on
    ([],                                                                  "n2", "",         "n2"),
    ([],                                                                  "n2", "n8 n9",    "n2 n8 n9"),
    ([(RECENT, "n1", "requeue")],                                         "n2", "n1",       "n1 n2"),
    ([(RECENT, "n1", "requeue")],                                         "",   "n1",       "n1"),
    # After a day it comes back, unless it has failed again; what the job was submitted with does not.
    ([(LONG_AGO, "n1", "requeue")],                                       "",   "n1 n9",    "n9"),
    ([(LONG_AGO, "n1", "requeue")],                                       "n2", "n1",       "n2"),
    ([(LONG_AGO, "n1", "requeue"), (RECENT, "n1", "slurm")],              "",   "n1",       "n1"),
    ([(LONG_AGO, "n1", "requeue")],                                       "n1", "n1",       "n1"),
    # Somebody has taken it off the job's list, or has resumed the run and submits it without.
    ([(RECENT, "n1", "requeue")],                                         "n2", "",         "n2"),
    ([(LONG_AGO, "n1", "requeue"), (LONG_AGO, "", "held")],               "",   "n1",       "n1"),
    # Slurm was not queried before an attempt in the same allocation, and does not know what failed there.
    ([(RECENT, "n1", "stays")],                                            "",   "",         "n1"),
    ([(RECENT, "n1", "stays"), (RECENT, "n2", "stays")],                    "n3", "",         "n1 n2 n3"),
    ([(RECENT, "n1", "stays"), (RECENT, "n2", "requeue")],                 "n3", "n2",       "n2 n3"),
    # Six must remain: first all old ones are given up, then those of this end too.
    ([(RECENT, "n1 n2 n3", "requeue")],                                   "n4", "n1 n2 n3", "n4"),
    ([(RECENT, "n1 n2", "requeue")],                                      "n4", "n1 n2",    "n1 n2 n4"),
    ([],                                                      "n1 n2 n3 n4",    "",         ""),
    ([],                                                                  "n4", "n7 n8 n9", "n7 n8 n9"),
]
# fmt: on


@pytest.mark.parametrize(("before", "fresh", "listed", "then"), TABLE)
def test_which_nodes_are_avoided(tmp_path: Path, cluster: Cluster, before, fresh, listed, then) -> None:
    assert avoided(tmp_path, before, fresh, listed) == then


def test_nodes_that_slurm_has_lost_are_not_enough(tmp_path: Path, cluster: Cluster, capsys) -> None:
    cluster.down = {"n7", "n8", "n9"}
    assert avoided(tmp_path, [], "n1", "") == ""
    assert "not avoided, because without them too few nodes are left: n1" in capsys.readouterr().out


def test_a_node_that_the_cluster_has_no_more_is_forgotten(tmp_path: Path, cluster: Cluster) -> None:
    assert avoided(tmp_path, [(RECENT, "old1", "requeue")], "old2 n2", "old1 old3 n9") == "n2 n9"
    assert avoided(tmp_path / "another", [], "old1", "") == ""


NODES = st.lists(st.sampled_from([f"n{number}" for number in range(1, 10)]), unique=True)


@given(ends=st.lists(st.tuples(st.floats(0, NOW), NODES), max_size=9), fresh=NODES, listed=NODES, down=NODES.map(set))
def test_no_exclusion_of_ours_starves_a_run(tmp_path_factory, ends, fresh, listed, down) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(patch)
        cluster.down = down
        before = [(at, " ".join(nodes), "requeue") for at, nodes in ends]
        chosen = avoided(tmp_path_factory.mktemp("run"), before, " ".join(fresh), " ".join(listed)).split()
        ours = {node for _, nodes in ends for node in nodes} | set(fresh)
        assert set(chosen) <= set(listed) | set(fresh)
        assert set(listed) - ours <= set(chosen)
        assert cluster.could_start("", chosen) or not ours & set(chosen)


@pytest.mark.parametrize(
    ("answer", "could"),
    [
        (None, True),
        ("allocation failure: Requested node configuration is not available", False),
        ("allocation failure: Job violates accounting/QOS policy (job submit limit)", True),
    ],
)
def test_slurm_itself_says_whether_enough_nodes_are_left(monkeypatch, answer: str | None, could: bool) -> None:
    def run(command: list[str], environ: dict[str, str]) -> str:
        assert command == ["sbatch", "--test-only", "--exclude=n1,n2", "job.sbatch"]
        if answer is not None:
            raise SlurmRefused(answer)
        return ""

    monkeypatch.setattr(queries, "call", run)
    assert queries.could_start("job.sbatch", ["n1", "n2"]) is could


def test_status_says_which_and_since_when(tmp_path: Path, monkeypatch) -> None:
    record = {"ExcNodeList": "n2,n8,n9", "PreemptTime": "None"}
    for module in (queries, show):
        monkeypatch.setattr(module, "show_job", lambda job_id: record)
    run = make_run(tmp_path / "run", job_id="7", cluster="lab")
    begin(run, 1, job_id="7", at=NOW)
    at = time.mktime(time.strptime("2026-11-21T14:03:00", "%Y-%m-%dT%H:%M:%S"))
    end(run, 1, "drained", at=at, job_id="7", cause="bad nodes", then="requeue", excluded=["n2"])
    told = show.status_json(read_status(run, JobState("7", "PENDING", "pending", restarts=1)))
    assert told["job"]["avoids"] == {"n2": at, "n8": None, "n9": None}
    assert "  avoids     n2 since 21 November 14:03, 2 nodes as submitted" in show.status_lines(told)
