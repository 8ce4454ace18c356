"""Notifications about a run, by a command or a webhook of the user's (recipe key `notify`).

Each event is sent at most once in the life of a run: it is recorded before it is sent. Threads send, through processes
with a time limit, so that a server that does not answer delays nothing but the end of a job, by at most CLOSE_S.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Callable, NamedTuple

from launcher.host.attempt import webhook
from launcher.host.judge.policy import OVER, STARTS_AGAIN
from launcher.host.judge.sentence import describe_end
from launcher.host.process.limited import run_limited
from launcher.host.record.ledger import read_ledger_or_complain
from megatron_rl.contract.attempt_records import AttemptEnd, Progress
from megatron_rl.contract.codes import CRASHED, FINISHED, LOST, MISCONFIGURED
from megatron_rl.contract.metrics_index import WatchedRecord
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Unreadable, append, if_readable, read, read_lines
from megatron_rl.contract.run_records import Notification
from megatron_rl.contract.text import printable

FINISHED_EVENT, HELD_EVENT, RESTARTED, STALLED = "finished", "held", "restarted", "stalled"
COLLAPSE, WARNING = "reward-collapse", "warning"
OF_COLLAPSE = ("reward-collapse", "constant-rewards")  # rules of contract.window_rules

WATCH_S = 5.0  # seconds between two reads of the record
SUSPENDED_S = 300.0  # seconds without a call after which this machine was suspended
SEND_S = 30.0  # seconds for a command or a webhook, after which it is killed
CLOSE_S = 10.0  # seconds that the end of a job waits for them
LONGEST_TEXT = 2000  # characters


class NotifySettings(NamedTuple):
    on: Sequence[str]
    command: Sequence[str] | None = None
    webhook: str | None = None  # name of a variable, or path of a file, with the URL
    stalled_s: float = 1800.0

    @classmethod
    def parse(cls, text: str) -> NotifySettings:
        return cls(**json.loads(text))


class Notifier:
    """Sends the events of one run, from this process. Without settings nothing is sent."""

    def __init__(self, run: RunDir, settings: NotifySettings | None) -> None:
        self._run, self._settings = run, settings
        self._before = self._newest_end()  # of earlier starts of this process's work
        self._threads: list[threading.Thread] = []
        self._sent: set[str] | None = None  # keys; None: not read yet

    def watch(self, attempt: Attempt) -> list[Callable[[float], None]]:
        """Return the task that notifies of stalls and warnings, if settings ask for it; call it often."""
        if self._settings is None:
            return []
        return [RecordWatch(self, self._run, attempt, self._settings.stalled_s)]

    def report_end(self) -> None:
        """Notify of the newest end in the ledger, if this process has seen it."""
        end = self._newest_end()
        if end is None or end == self._before:
            return
        event = event_of(end)
        if event is not None:
            key = event if event == FINISHED_EVENT else f"{event} after attempt {end.attempt}"
            self.send(event, key, describe_end(end, time.time()), end.attempt)

    def send(self, event: str, key: str, text: str, attempt: int) -> None:
        """Send an event in the background, unless one with this key was sent before."""
        if self._settings is None or event not in self._settings.on or key in self._known():
            return
        self._known().add(key)
        notification = Notification(event, key, printable(text)[:LONGEST_TEXT], attempt, time.time())
        try:
            append(self._run.notifications, notification)
        except OSError as error:  # a full disk is a reason to notify: it may then be sent twice
            print(f"notify: {self._run.notifications}: {error.strerror}", file=sys.stderr)
        thread = threading.Thread(target=_deliver, args=(self._run, self._settings, notification), daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        give_up = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def _newest_end(self) -> AttemptEnd | None:
        """The ledger's last line, if it is the end of an attempt and somebody wants to know."""
        lines = read_ledger_or_complain(self._run) if self._settings else []
        return lines[-1] if lines and isinstance(lines[-1], AttemptEnd) else None

    def _known(self) -> set[str]:
        if self._sent is None:
            found = read_lines(Notification, self._run.notifications)
            self._sent = set() if isinstance(found, Unreadable) else {one.key for one in found.records}
        return self._sent


def event_of(end: AttemptEnd) -> str | None:
    """Event of the end of an attempt; None for a run that its user stopped."""
    if end.outcome == FINISHED:
        return FINISHED_EVENT
    if end.then in STARTS_AGAIN:
        return RESTARTED
    if end.then == OVER and end.outcome not in (CRASHED, LOST, MISCONFIGURED):
        return None
    return HELD_EVENT


class RecordWatch:
    """Looks for warnings and for stalls, `stalled_s` seconds without a new step, in the record of a run."""

    def __init__(self, notifier: Notifier, run: RunDir, attempt: Attempt, stalled_s: float) -> None:
        self._notifier, self._attempt, self._stalled_s = notifier, attempt, stalled_s
        self._record = WatchedRecord(run)
        self._step = 0
        self._progress_at: float | None = None
        self._looked = 0.0

    def __call__(self, now: float) -> None:
        """Look at the record, if it is time. now: time.monotonic()."""
        if now < self._looked + min(WATCH_S, self._stalled_s / 5):
            return
        if now > self._looked + SUSPENDED_S:
            self._progress_at = now
        self._looked = now
        lines, before = self._record.new(), self._step
        self._step = self._record.summary.step
        fresh = bool(lines) or self._step != before
        if fresh or self._progress_at is None:
            self._progress_at = now
        number = self._attempt.number
        for warning in self._record.summary.watch.warnings if fresh else ():
            key = f"{warning.name} since step {warning.since}"
            if warning.name in OF_COLLAPSE:
                self._notifier.send(COLLAPSE, f"{COLLAPSE}: {key}", f"step {self._step}: {warning}", number)
            self._notifier.send(WARNING, f"{WARNING}: {key}", f"{warning.name}: {warning}", number)
        if now - self._progress_at >= self._stalled_s:
            self._notifier.send(STALLED, f"stalled after step {self._step} of attempt {number}", self._stall(), number)

    def _stall(self) -> str:
        progress = if_readable(read(Progress, self._attempt.progress))
        phase = f", in phase {progress.phase}" if progress is not None else ""
        return f"no new step for {self._stalled_s / 60:.0f} minutes after step {self._step}{phase}"


def _deliver(run: RunDir, settings: NotifySettings, notification: Notification) -> None:
    name = os.path.basename(os.path.abspath(run.root))
    text = f"{name}: {notification.event}: {notification.text}"
    facts = {
        "event": notification.event,
        "run": name,
        "run_dir": os.path.abspath(run.root),
        "attempt": notification.attempt,
    }
    environ = dict(os.environ, MRL_TEXT=text, **{f"MRL_{key.upper()}": str(value) for key, value in facts.items()})
    if settings.command:
        _call("the command", settings.command, environ)
    if settings.webhook:
        environ.update(MRL_WEBHOOK=settings.webhook, MRL_PAYLOAD=json.dumps({"text": text, "content": text, **facts}))
        _call("the webhook", [sys.executable, "-I", webhook.__file__], environ)


def _call(what: str, command: Sequence[str], environ: dict[str, str]) -> None:
    try:
        done = run_limited(command, SEND_S, environ)
    except subprocess.TimeoutExpired:
        why = f"did not end within {SEND_S:.0f} s, and was killed"
    except (OSError, ValueError) as error:
        why = f"cannot be started: {error}"
    else:
        if done.returncode == 0:
            return
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = f"failed (exit code {done.returncode}): {printable(last)}"
    print(f"notify: {what} {why}", file=sys.stderr)
