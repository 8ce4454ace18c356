"""Slurm's refusals, and the reasons of waiting jobs, in plain words."""

from __future__ import annotations

import time

import pytest

from launcher.backends.slurm.jobs import JobState
from launcher.backends.slurm.reasons import STUCK, WAITS, translate, wait_of

REQUEST = {"partition": "gold", "nodes": "8", "gpus-per-node": "h100:8", "time": "9-00:00:00", "constraint": "h200"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "sbatch: error: invalid partition specified: gold\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "this cluster has no partition gold; `sinfo -s` lists them "
            "(sbatch: invalid partition specified: gold; Invalid partition name specified)",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
            "partition gold has no 8 nodes with h100:8 GPUs each; check job.nodes, gpus_per_node and gres against "
            "`sinfo -o '%P %D %G'` (sbatch: Requested node configuration is not available)",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid feature specification\n",
            "no node has the feature h200 (constraint); `sinfo -o '%N %f'` lists them "
            "(sbatch: Invalid feature specification)",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
            "account (none given) is not yours on partition gold; `sacctmgr show assoc user=$USER` lists yours "
            "(sbatch: Invalid account or account/partition combination specified)",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid "
            "(missing or exceeds some limit)\n",
            "time limit 9-00:00:00 is more than partition gold allows; `sinfo -o '%P %l'` shows how much "
            "(sbatch: Requested time limit is invalid (missing or exceeds some limit))",
        ),
        (
            "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n",
            "this sbatch does not know one of the profile's sbatch flags (sbatch: unrecognized option '--bogus')",
        ),
        ("sbatch: error: the moon is full\n", "sbatch refused the job: the moon is full"),
        (
            "sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n"
            "sbatch: error: instead of expected UNIX line breaks (\\n).\n",
            "sbatch refused the job: Batch script contains DOS line breaks (\\r\\n); instead of expected UNIX line "
            "breaks (\\n)",
        ),
        ("", "sbatch refused the job: no reason given"),
    ],
)
def test_a_refusal_says_what_to_change_and_slurms_words_once(said, expected):
    assert translate(said, REQUEST) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("QOSMaxSubmitJobPerUserLimit", "limit"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "limit"),
        ("Unable to contact slurm controller (connect failure)", "controller"),
    ],
)
def test_a_limit_is_not_mistaken_for_another_reason(text, word):
    assert word in translate(f"sbatch: error: Batch job submission failed: {text}\n", REQUEST).partition("(sbatch")[0]


def waiting(reason: str, **facts: object) -> JobState:
    return JobState("7", "PENDING", "pending", reason=reason, **facts)


def test_dependencies_name_the_jobs():
    job = waiting("Dependency", dependency="afterany:1(unfulfilled),afterany:23(unfulfilled)")
    assert wait_of(job).what == "job 1 and job 23 to end"


def test_a_requeued_job_waits_for_its_time():
    at = time.mktime((2026, 11, 21, 7, 2, 32, 0, 0, -1))
    assert wait_of(waiting("BeginTime", eligible_at=at, restarts=1)).what == "07:02:32 (every requeue waits a while)"


@pytest.mark.parametrize("reason", sorted(STUCK))
def test_what_needs_somebody_to_act_is_said_to_be_stuck(reason):
    wait = wait_of(waiting(reason))
    assert wait.stuck
    assert "{id}" not in wait.what


@pytest.mark.parametrize("reason", sorted(WAITS))
def test_what_passes_by_itself_is_not(reason):
    assert not wait_of(waiting(reason)).stuck


def test_reasons_come_in_several_spellings():
    long = "(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions)"
    assert wait_of(waiting(long)).what == "nodes that are down, drained or reserved"
    assert wait_of(waiting("launch_failed_requeued_held")).stuck
    assert wait_of(waiting("job_requeued_in_held_state")).what.endswith("scontrol release 7")
    assert "MaxBatchRequeue" in wait_of(waiting("launch_failure_limit_exceeded_requeued_held")).what
    assert wait_of(waiting("ReqNodeNotAvail, UnavailableNodes:node[01-02]")).what == WAITS["ReqNodeNotAvail"]
    assert wait_of(waiting("QOSMaxNodePerUserLimit")).what == "a limit of your QOS (QOSMaxNodePerUserLimit)"
    assert wait_of(waiting("SomethingNew")).what == "Slurm's reason SomethingNew"


@pytest.mark.parametrize("word", ["REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_job_in_a_held_state_is_stuck_whatever_its_reason(word):
    wait = wait_of(JobState("7", word, "pending", reason="SomethingNew"))
    assert wait == ("it is held (Slurm's reason SomethingNew): scontrol release 7", True)
