"""Slurm's commands are asked within limits, and what they print is understood."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.attempt.job_context import JobRefused, context_of
from launcher.host.slurm import call as call_module
from launcher.host.slurm import orders, queries
from launcher.host.slurm.call import NoSuchCommand, SlurmRefused, SlurmSilent, SlurmUnclear, call, patiently, run
from launcher.host.slurm.formats import expand_hosts, seconds_of, text_of, time_of


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("node[01-03,07],x", ["node01", "node02", "node03", "node07", "x"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("gpu-a[1,3].cluster,gpu-b", ["gpu-a1.cluster", "gpu-a3.cluster", "gpu-b"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ],
)
def test_a_host_list_is_expanded(listed, hosts):
    assert expand_hosts(listed) == hosts


@pytest.mark.parametrize(
    "listed",
    [
        *("node[1-,4]", "node[", "node[1", "node1]", "a,,b", ",a", "a,", "node[]", "node[3-1]", "node[a-c]", "a b"),
        *("[1-2", "node[1-99999999]", "node[1,[2]]", "node[-3]"),
    ],
)
def test_what_is_no_host_list_is_refused(listed):
    with pytest.raises(ValueError, match=r"not a (list|range) of nodes"):
        expand_hosts(listed)


def test_a_job_whose_nodes_cannot_be_read_is_refused():
    with pytest.raises(JobRefused, match="SLURM_JOB_NODELIST: 'node\\[1-,4\\]' is not a list of nodes"):
        context_of({"SLURM_JOB_ID": "7", "MRL_RUN_DIR": "/r", "SLURM_JOB_NODELIST": "node[1-,4]"})


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}", fullmatch=True), max_size=6))
def test_a_list_without_brackets_is_its_hosts(hosts):
    assert expand_hosts(",".join(hosts)) == hosts


@given(st.integers(0, 4_000_000_000))
def test_a_time_comes_back(at):
    found = time_of(text_of(at))
    assert found is not None
    assert found == at or abs(found - at) == 3600, "an hour that there is twice"


def test_limits_and_what_is_no_time():
    assert seconds_of("1-02:00:30") == 93630
    assert seconds_of("UNLIMITED") is seconds_of(None) is None
    assert {time_of(text) for text in ("Unknown", "N/A", "", "None", "(null)", None)} == {None}


@pytest.fixture
def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slurm_says(command: str, text: str) -> None:
        tool = tmp_path / command
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.setattr(call_module, "ASK_AGAIN_S", 0.0)
    return slurm_says


@pytest.fixture
def scontrol(slurm_says):
    return partial(slurm_says, "scontrol")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", SlurmSilent),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", SlurmRefused),
        ("echo 'slurm_load_jobs error: Rate limit exceeded, please retry momentarily' >&2; exit 1", SlurmSilent),
        ("echo 'scontrol: error: Slurm backup controller in standby mode' >&2; exit 1", SlurmSilent),
        ("echo 'slurm_load_jobs error: Protocol authentication error' >&2; exit 1", SlurmSilent),
        ("echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1", SlurmSilent),
        ("exec sleep 60", SlurmSilent),
        ("kill -KILL $$", SlurmSilent),
    ],
)
def test_who_does_not_answer_has_not_said_no(scontrol, monkeypatch, text, error):
    scontrol(text)
    monkeypatch.setattr(call_module, "LIMIT_S", 0.3)
    with pytest.raises(SlurmRefused) as raised:
        call(["scontrol", "show", "job", "7"])
    assert type(raised.value) is error


def test_a_command_that_is_not_there_is_a_refusal(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NoSuchCommand, match="no such command here"):
        call(["scontrol"])


def test_only_silence_is_waited_for(monkeypatch):
    monkeypatch.setattr(call_module, "ASK_AGAIN_S", 0.0)
    answers = iter([SlurmSilent("busy"), SlurmSilent("busy"), SlurmRefused("no")])

    def ask() -> None:
        raise next(answers)

    with pytest.raises(SlurmRefused, match="no"):
        patiently(ask, patience=60.0)
    assert next(answers, None) is None
    with pytest.raises(SlurmSilent):
        patiently(lambda: (_ for _ in ()).throw(SlurmSilent("busy")), patience=0.1)


def test_what_is_not_utf_8_is_read_all_the_same(scontrol):
    scontrol(r"printf 'JobName=\351t\351\n'")
    assert call(["scontrol"]).startswith("JobName=")


def test_of_an_array_only_the_record_of_the_job_itself_counts(scontrol):
    task = "JobId={} ArrayJobId=7 ArrayTaskId={} JobName=a JobState={}"
    records = [task.format(9, 2, "FAILED"), task.format(8, 1, "RUNNING"), task.format(7, 3, "PENDING")]
    scontrol("".join(f"echo '{record}'\n" for record in records))
    assert [queries.show_job(job)["JobState"] for job in "987"] == ["FAILED", "RUNNING", "PENDING"]
    with pytest.raises(SlurmUnclear):
        queries.show_job("6")


def test_a_preemption_mode_that_slurm_does_not_tell_is_not_known(scontrol):
    scontrol("echo 'Socket timed out on send/recv operation' >&2; exit 1")
    assert queries.preemption_cancels({"PreemptTime": "2026-11-21T08:00:00", "Requeue": "1"}) is None


def test_a_job_that_is_requeued_already_is(scontrol):
    scontrol("echo 'Job/step already completing or completed' >&2; exit 1")
    with pytest.raises(SlurmRefused):
        orders.requeue("7")
    scontrol("echo 'slurm_requeue error: Job is pending execution' >&2; exit 1")
    orders.requeue("7")


def test_a_name_with_a_comma_is_no_list_of_names(monkeypatch):
    rows = "2|node01|lr=1\n3|node[02-03]|lr=1,beta=2\n4||lr=1,beta=2\n5|node04|beta=2\n6||lr=1|beta=2\n"
    monkeypatch.setattr(queries, "call", lambda command: rows)
    assert queries.jobs_called("lr=1,beta=2") == {"3": "node[02-03]", "4": ""}
    cancelled = []
    monkeypatch.setattr(orders, "call", cancelled.append)
    orders.cancel_called("lr=1,beta=2")
    orders.cancel_called("nobody's")
    assert cancelled == [["scancel", "3", "4"]]


def test_a_successor_knows_nothing_of_the_job_that_submits_it(tmp_path, monkeypatch):
    tool = tmp_path / "sbatch"
    tool.write_text(f'#!/bin/sh\nenv >{tmp_path}/environ\necho "$*" >{tmp_path}/words\necho "8;lab"\n')
    tool.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n")
    ours = {"SLURM_JOB_ID": "7", "MRL_ATTEMPT": "3", "SLURM_UMASK": "0", "SBATCH_EXPORT": "NONE"}
    defaults = {"SBATCH_ACCOUNT": "team", "SBATCH_PARTITION": "other"}
    for name, value in {"PATH": f"{tmp_path}:/usr/bin:/bin", **ours, **defaults}.items():
        monkeypatch.setenv(name, value)
    job_id = orders.submit_successor("7", str(script), "it", "mrl:1", None, ["n1"], {"MRL_HOST_FAULTS": "1"})
    assert job_id == "8"
    words = (tmp_path / "words").read_text().split()
    options = ["--parsable", "--dependency=afterany:7", "--job-name=it", "--comment=mrl:1", "--exclude=n1"]
    assert words == [*options, str(script)]
    environ = dict(line.split("=", 1) for line in (tmp_path / "environ").read_text().splitlines())
    assert (environ["MRL_SUCCEEDS"], environ["MRL_HOST_FAULTS"]) == ("7", "1")
    assert not {*ours} & {*environ}
    assert environ["SBATCH_ACCOUNT"] == "team", "the user's default, where the script says nothing"
    assert "SBATCH_PARTITION" not in environ, "to sbatch it would count for more than the script does"


def test_a_silent_command_is_ended_in_its_own_limit(scontrol):
    scontrol("exec sleep 60")
    with pytest.raises(SlurmSilent, match=r"scontrol: no answer within 0\.2 s"):
        run(["scontrol"], limit_s=0.2)


def test_the_users_own_output_settings_do_not_reach_slurm(scontrol, monkeypatch):
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_TIMELIMIT", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/ours.conf")
    scontrol('echo "${SQUEUE_FORMAT-unset} $SLURM_TIME_FORMAT ${SLURM_TIMELIMIT-unset} $SLURM_CONF"')
    assert run(["scontrol"]).out == "unset standard unset /etc/ours.conf\n"


def test_a_banner_of_the_site_does_not_hide_the_id_of_a_job(slurm_says):
    slurm_says("sbatch", "echo 'welcome to the cluster'; echo '4711;lab'")
    assert orders.submit_command([], ["true"], dict(os.environ)) == "4711"


@pytest.mark.parametrize(
    ("command", "ask_slurm"),
    [
        ("scontrol", lambda: queries.show_job("7")),
        ("sinfo", queries.partitions),
        ("sbatch", lambda: orders.submit_command([], ["true"], dict(os.environ))),
        ("sbatch", lambda: orders.submit_successor("7", "job.sbatch", "it", "mrl:1", None, [], {})),
    ],
    ids=["a job", "the partitions", "the id of a new job", "the id of a successor"],
)
def test_a_command_that_is_content_and_says_nothing_has_not_answered(slurm_says, command, ask_slurm):
    """A wrapper of the site's, a disk that is full: neither is there no such job, nor has one been submitted."""
    slurm_says(command, "exit 0")
    with pytest.raises(SlurmUnclear, match="no answer that makes sense: ''"):
        ask_slurm()


@pytest.mark.parametrize(
    ("command", "answer", "ask_slurm"),
    [
        ("scontrol", "JobId=7 JobName=it", lambda: queries.show_job("7")),
        ("sinfo", "n1 idle\nn2", lambda: queries.node_states(["n1", "n2"])),
    ],
    ids=["a job without a state", "a node without one"],
)
def test_an_answer_that_breaks_off_is_none(slurm_says, command, answer, ask_slurm):
    slurm_says(command, f"printf '{answer}'")
    with pytest.raises(SlurmUnclear, match="no answer that makes sense"):
        ask_slurm()


def test_a_command_is_run_by_its_job_word_for_word(slurm_says, tmp_path):
    slurm_says("sbatch", f'for word; do echo "${{word#--wrap=}}"; done | tail -n 1 >{tmp_path}/wrapped; echo 8')
    orders.submit_command([], ["printf", "%s|", "two words", "it's", "$HOME", "*"], dict(os.environ))
    ran = subprocess.run(["sh", tmp_path / "wrapped"], capture_output=True, text=True, check=True)
    assert ran.stdout == "two words|it's|$HOME|*|"
