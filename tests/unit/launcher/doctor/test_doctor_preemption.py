"""The doctor says who preempts a run, with how much notice, and when the run restarts."""

from __future__ import annotations

import pytest
from doctor_helpers import config, facts, found, profile, recipe, said, slurm

from launcher.doctor.examine import examine


def test_by_partition_on_22_05():
    text = said(found("22.05-partition", "preemption", recipe()))
    assert text == (
        "ok: demo can be preempted by jobs of partition high (by partition: a higher PriorityTier); "
        "it is requeued and resumes (PreemptMode=REQUEUE)"
    )
    assert "20 s (GraceTime of partition low), then SIGTERM and 5 s later SIGKILL (KillWait)" in said(
        found("22.05-partition", "notice", recipe())
    )


def test_the_preempting_partition_is_never_preempted():
    assert "never preempted" in said(found("22.05-partition", "preemption", partition="high"))
    assert not found("22.05-partition", "notice", partition="high")


def test_by_qos_on_22_05():
    text = said(found("22.05-qos", "preemption", recipe(), qos="burst"))
    assert "by jobs of QOS urgent (by QOS: it lists burst in Preempt)" in text
    assert "not in the first 10 min of an attempt (PreemptExemptTime)" in text
    assert "30 s (GraceTime of QOS burst)" in said(found("22.05-qos", "notice", qos="burst"))


def test_the_default_qos_of_the_user_counts_if_the_profile_names_none():
    text = said(found("22.05-qos", "preemption", recipe()))
    assert "by jobs of QOS burst or urgent" in text
    assert "no grace (GraceTime of QOS normal is 0)" in said(found("22.05-qos", "notice", recipe()))


def test_a_qos_that_nobody_lists_is_not_preempted():
    assert said(found("22.05-qos", "preemption", qos="urgent")) == (
        "ok: no QOS may preempt urgent (none lists it in Preempt)"
    )


@pytest.mark.parametrize(
    "changes", [{"PreemptType": "(null)"}, {"PreemptType": "preempt/none"}, {"PreemptMode": "OFF"}]
)
def test_off(changes):
    texts = slurm("22.05-partition", config=config("22.05-partition", **changes))
    (one,) = found(texts, "preemption", recipe())
    assert one.level == "ok" and one.text.endswith("demo keeps its nodes")


def test_what_follows_the_loss_of_nodes():
    text = said(found("23.11", "requeue", recipe()))
    assert "after 8 failed launches" in text and "submitted with --requeue are requeued; mrl uses it" in text
    assert said(found("23.11", "dead node", recipe())).endswith("and requeues the run on other nodes")


def test_by_qos_without_accounting_is_unknown():
    texts = slurm("22.05-partition", config=config("22.05-partition", PreemptType="preempt/qos"))
    (warned,) = found(texts, "preemption", recipe())
    assert warned.level == "warning"
    assert "this check cannot say whether and how demo is preempted" in warned.text


@pytest.mark.parametrize("version", ["23.11.4", "24.05.1", "24.11.5"])
def test_cancel_leaves_the_requeue_to_the_run_itself(version):
    noted, exempt = found(slurm("23.11", config=config("23.11", SLURM_VERSION=version)), "preemption", recipe())
    assert (noted.level, exempt.level) == ("note", "ok")
    assert "by jobs of partition owners" in noted.text  # debug has a higher tier too, but none of the nodes
    assert "debug" not in noted.text
    assert "the run requeues itself if it has saved in time" in noted.text
    assert noted.fix is not None and "mrl resume RUN" in noted.fix
    assert "not in the first 30 min" in exempt.text


def test_suspend_is_a_warning():
    warned = found("25.05", "preemption", recipe(), qos="normal")
    assert "is then suspended (PreemptMode=SUSPEND)" in said(warned)
    assert not found("25.05", "notice", recipe(), qos="normal")


def test_a_qos_may_preempt_within_itself():
    text = said(found("25.05", "preemption", recipe(), qos="free"))
    assert "by jobs of QOS prod or free itself" in text
    assert "resumes (PreemptMode=REQUEUE)" in text


@pytest.mark.parametrize(
    ("cluster", "values", "expected"),
    [
        ("22.05-partition", {}, "send_user_signal is on"),  # SlurmctldParameters=preempt_send_user_signal
        ("22.05-qos", {"qos": "burst"}, "send_user_signal is off"),
        ("23.11", {}, "send_user_signal is on"),  # PreemptParameters=send_user_signal
        ("25.05", {"qos": "free"}, "send_user_signal is on"),  # the old place still works
    ],
)
def test_the_user_signal_by_version(cluster, values, expected):
    (signal,) = found(cluster, "signal", recipe(), **values)
    assert expected in signal.text


@pytest.mark.parametrize(
    ("cluster", "version", "wait"),
    [
        ("22.05-partition", None, "6 s (AuthInfo=cred_expire)"),
        ("22.05-qos", None, "61 s (AuthInfo=cred_expire)"),
        ("23.11", None, "2 min (AuthInfo=cred_expire by default)"),  # its requeue_delay=7 means nothing yet
        ("25.05", None, "2 min (AuthInfo=cred_expire by default)"),
        ("25.05", "25.11.2", "16 s (SchedulerParameters=requeue_delay)"),
    ],
)
def test_the_hold_before_a_requeued_run_starts(cluster, version, wait):
    texts = slurm(cluster, config=config(cluster, SLURM_VERSION=version)) if version else cluster
    assert f"waits at least {wait}" in said(found(texts, "requeue", recipe()))


@pytest.mark.parametrize(
    ("size", "bandwidth", "level"),
    [(10**9, 1.0, "ok"), (10**11, 1.0, "warning"), (10**11, 100.0, "ok")],
)
def test_notice_is_compared_with_the_time_of_a_save(size, bandwidth, level):
    """25 s from the notice to SIGKILL; writing takes 1 s, 100 s and again 1 s."""
    findings = examine(
        facts("22.05-partition", checkpoint_bytes=size), recipe("save.every=7"), profile(fs_bandwidth=bandwidth)
    )
    (notice,) = [one for one in findings if one.topic == "notice"]
    assert notice.level == level
    assert "up to 7 steps" in notice.text


def test_a_recipe_that_saves_only_at_the_end_may_lose_everything():
    assert "the steps of the attempt are lost" in said(
        examine(facts("22.05-qos", checkpoint_bytes=1), recipe("save.every=0"), profile(qos="burst"))
    )


def test_every_release_gives_findings_with_levels_and_fixes():
    for cluster in ("22.05-partition", "22.05-qos", "23.11", "24.05", "25.05"):
        for one in examine(facts(cluster), recipe(), profile()):
            assert one.text and one.topic, one
            assert one.fix or one.level in ("ok", "note"), one
