"""A command that is missing, refuses or hangs gives a fact, not an exception."""

from __future__ import annotations

from launcher.backends.probe.command import CommandAnswer, ask


def test_what_a_command_says():
    assert ask(["sh", "-c", "echo yes; echo no >&2"]) == CommandAnswer("yes\n")


def test_a_refusal_is_its_first_complaint():
    assert ask(["sh", "-c", "echo; echo 'why not' >&2; echo more >&2; exit 3"]) == CommandAnswer("\n", "why not")
    assert ask(["sh", "-c", "exit 3"]).failure == "sh failed with exit code 3"


def test_a_missing_command():
    missing = ask(["no-such-command"])
    assert not missing.known
    assert not missing.there
    assert "no-such-command: no such command here" in str(missing.failure)


def test_a_silent_command_is_given_up():
    assert ask(["sleep", "3600"], limit_s=0.2).failure is not None


def test_the_users_formats_do_not_reach_slurm(monkeypatch):
    for name in ("SINFO_FORMAT", "SQUEUE_FORMAT", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "%i")
    assert ask(["sh", "-c", "echo $SINFO_FORMAT$SQUEUE_FORMAT$SACCT_FORMAT $SLURM_TIME_FORMAT"]).text == "standard\n"
