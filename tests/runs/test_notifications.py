"""Notifications: a command and a webhook get each event once; no failure of theirs affects the run, and no file of the
run has the URL. Runs are real except for their ranks, and the server is a real one on this machine."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import commands
import pytest
from run_helpers import fake_ranks
from waiting import until

from launcher.host.attempt import notify
from launcher.host.attempt.notify import Notifier, NotifySettings
from launcher.host.process.lock import owner_of
from megatron_rl.contract.attempt_records import AttemptEnd, MetricsLine, Progress
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, read_lines, write
from megatron_rl.contract.run_records import Notification

SECRET = "s3cr3t-path"


class Hook:
    """A webhook's server, with what it got and how it answers."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.code, self.delay_s = 200, 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(hook.delay_s)
                hook.got.append({"path": self.path, **json.loads(body)})
                self.send_response(hook.code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTERS", "")
    monkeypatch.delenv("MRL_CLUSTER", raising=False)
    return tmp_path


def submit(*words: str, script: str = "train") -> subprocess.CompletedProcess[str]:
    return commands.run(["mrl-submit", "demo", "--run-dir", "r", *words], before=fake_ranks(script))


def ended(run: RunDir) -> None:
    until(lambda: owner_of(run.lock) is None and notifications(run))


def notifications(run: RunDir) -> list[Notification]:
    return read_lines(Notification, run.notifications).records  # type: ignore[union-attr]


def test_a_finished_run_calls_the_webhook_and_the_command_and_writes_the_url_nowhere(
    hook: Hook, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HOOK", hook.url)
    done = submit("notify={webhook: MY_HOOK, command: [sh, -c, 'echo \"$MRL_EVENT $MRL_RUN $MRL_ATTEMPT\" >>../told']}")
    assert done.returncode == 0, done.stderr
    until(lambda: hook.got and (home.parent / "told").exists())
    (got,) = hook.got
    assert got["path"] == f"/{SECRET}"
    assert (got["event"], got["run"], got["attempt"]) == ("finished", "r", 1)
    assert got["run_dir"] == str(home / "r")
    assert got["text"] == got["content"] == "r: finished: finished after step 5"
    assert (home.parent / "told").read_text() == "finished r 1\n"
    assert [one.event for one in notifications(RunDir(home / "r"))] == ["finished"]
    written = [path for path in home.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
    assert SECRET not in done.stdout + done.stderr


def test_a_crashed_run_is_held_and_its_url_may_be_in_a_file(hook: Hook, home: Path) -> None:
    (home / "hook").write_text(hook.url + "\n")
    assert submit(f"notify.webhook={home}/hook", script="train,crash").returncode == 1
    until(lambda: hook.got)
    (got,) = hook.got
    assert got["event"] == "held"
    assert "RuntimeError" in got["text"]


def test_a_webhook_that_fails_is_noted_without_its_url(hook: Hook, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOOK", hook.url)
    hook.code = 500
    assert submit("notify={webhook: MY_HOOK, command: [sh, -c, 'echo no mail >&2; exit 3']}").returncode == 0
    log = RunDir(home / "r").attempt(1).log(0, role="supervisor")
    until(lambda: "HTTP 500" in log.read_text())
    assert "notify: the webhook failed (exit code 1): the webhook answered HTTP 500\n" in log.read_text()
    assert "notify: the command failed (exit code 3): no mail\n" in log.read_text()
    assert SECRET not in log.read_text()


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("http://127.0.0.1:9/s3cr3t-path", "the webhook cannot be reached: Connection refused"),
        ("http://s3cr3t-path:x/", "the webhook cannot be "),
        ("s3cr3t-path", "MY_HOOK holds no URL"),
        ("", "MY_HOOK is not set, or empty"),
    ],
)
def test_an_unusable_url_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str, why: str
) -> None:
    monkeypatch.setenv("MY_HOOK", where)
    notifier = Notifier(RunDir(tmp_path), NotifySettings(["held"], webhook="MY_HOOK"))
    notifier.send("held", "held", "crashed", 1)
    notifier.close()
    said = capsys.readouterr().err
    assert why in said
    assert "s3cr3t" not in said


def test_a_command_that_hangs_is_killed_and_delays_the_end_by_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "SEND_S", 1.0)
    notifier = Notifier(RunDir(tmp_path), NotifySettings(["held"], ["sh", "-c", "sleep 3600; echo late >late"]))
    notifier.send("held", "held", "crashed", 1)
    notifier.close()
    assert "did not end within 1 s, and was killed" in capsys.readouterr().err


def test_an_event_is_sent_once_also_by_a_later_process_and_only_if_it_is_asked_for(tmp_path: Path) -> None:
    settings = NotifySettings(["held"], ["sh", "-c", f"echo $MRL_EVENT >>{tmp_path}/told"])
    for _ in range(2):
        notifier = Notifier(RunDir(tmp_path), settings)
        for event, key in (("held", "held after attempt 1"), ("finished", "finished")):
            notifier.send(event, key, "text", 1)
            notifier.send(event, key, "text", 1)
        notifier.close()
    assert (tmp_path / "told").read_text() == "held\n"


@pytest.mark.parametrize(
    ("outcome", "then", "event"),
    [
        ("finished", "over", "finished"),
        ("crashed", "held", "held"),
        ("crashed", "over", "held"),  # a local run, which nothing starts again
        ("misconfigured", "held", "held"),
        ("crashed", "requeue", "restarted"),
        ("drained", "requeue", "restarted"),
        ("drained", "stays", "restarted"),
        ("drained", "over", None),
        ("stopped", "over", None),
    ],
)
def test_ends_of_attempts_are_events(outcome: str, then: str, event: str | None) -> None:
    assert notify.event_of(AttemptEnd(1, 0.0, outcome, then=then)) == event


def test_a_stall_is_sent_once_per_attempt_and_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = run.attempt(1)
    write_progress = Progress("training", 2)
    attempt.folder.mkdir(parents=True)
    write(attempt.progress, write_progress)
    notifier = Notifier(run, NotifySettings(["stalled"], ["true"], stalled_s=600.0))
    (watch,) = notifier.watch(attempt)
    append(run.metrics, MetricsLine(1, {"loss": 0.1}))
    watch(1000.0)
    append(run.metrics, MetricsLine(2, {"loss": 0.1}))
    for now in range(1100, 1690, 10):
        watch(float(now))
    assert notifications(run) == []
    for now in range(1690, 2500, 10):
        watch(float(now))
    (sent,) = notifications(run)
    assert sent.text == "no new step for 10 minutes after step 2, in phase training"
    append(run.metrics, MetricsLine(3, {"loss": 0.1}))
    for now in range(2500, 3200, 10):
        watch(float(now))
    assert [one.key for one in notifications(run)] == [
        "stalled after step 2 of attempt 1",
        "stalled after step 3 of attempt 1",
    ]
    notifier.close()


def test_a_collapse_of_the_reward_is_sent_once_although_the_run_resumes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [
        MetricsLine(
            step, {"mean_reward": 0.1 + 0.008 * min(step, 60) + 0.01 * (step % 2) - (0.4 if step > 80 else 0.0)}
        )
        for step in range(1, 100)
    ]
    for number in (1, 2):
        notifier = Notifier(run, NotifySettings(["reward-collapse", "warning"], ["true"]))
        (watch,) = notifier.watch(run.attempt(number))
        for line in lines if number == 1 else ():
            append(run.metrics, line)
            watch(1000.0 + 10 * line.step)
        watch(5000.0)
        notifier.close()
    sent = notifications(run)
    assert [one.event for one in sent] == ["reward-collapse", "warning"]
    assert "The mean reward of the last 10 steps is 0.265; until step 80 it had risen to 0.585" in sent[0].text
