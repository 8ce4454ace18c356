"""A running run in the terminal: lines as it proceeds, which a file or a pipe keeps."""

from __future__ import annotations

import time
from typing import Any

from launcher.cli.show.history import History, clock
from launcher.cli.show.scores import scores_in_words
from launcher.cli.show.status_rows import replica_lines
from launcher.cli.show.terminal import echo
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import number

LINE_EVERY_STEPS = 20
LINE_EVERY_S = 5.0
WAIT_EVERY_S = 30.0  # seconds between two lines that say what the run waits for
MOST_WAITS = 3


class ProgressLines:
    """One line every 20 steps or 5 seconds, for each change of phase, each evaluation and each new warning, and for
    replicas that the run waits for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phase = ""
        self._warned: set[str] = set()
        self._evaluated: int | None = None  # step of the last evaluation shown
        self._shown_step = -LINE_EVERY_STEPS
        self._shown_at = self._waited_at = self._began
        self._waits: list[tuple[Any, ...]] = []

    def show(self, history: History) -> None:
        """Print what is new; called several times a second."""
        now = time.monotonic()
        if self._evaluated is None:  # evaluations of earlier attempts are not new
            self._evaluated = max((line.step for line in history.evaluations), default=-1)
        for line in history.evaluations:
            if line.step > self._evaluated:
                self._evaluated = line.step
                if evaluation := evaluation_line(line):
                    echo(evaluation)
        if history.phase != self._phase:
            self._phase = history.phase
            echo(f"[{clock(now - self._began)}] {history.phase}")
        self._show_waits(history, now)
        fresh = history.step != self._shown_step and history.lines
        due = history.step >= self._shown_step + LINE_EVERY_STEPS or now >= self._shown_at + LINE_EVERY_S
        if fresh and (due or history.step == history.steps):
            self._shown_step, self._shown_at = history.step, now
            echo(step_line(history))
        for warning in history.warnings:
            if warning.name not in self._warned:
                self._warned.add(warning.name)
                echo(f"warning: {warning}")

    def _show_waits(self, history: History, now: float) -> None:
        waits = [(one["name"], one["state"], one["phase"], one["starts"]) for one in history.waits_for]
        if waits != self._waits or (waits and now >= self._waited_at + WAIT_EVERY_S):
            self._waits, self._waited_at = waits, now
            for line in waiting_lines(history):
                echo(f"[{clock(now - self._began)}] {line}")


def waiting_lines(history: History) -> list[str]:
    named = replica_lines(history.waits_for[:MOST_WAITS], time.time())
    further = len(history.waits_for) - len(named)
    return [*named, f"and {further} more replicas that do not answer"] if further else named


def step_line(history: History) -> str:
    line = history.lines[-1]
    eta = history.eta_s()
    reward = f"reward {shown(line, 'mean_reward', '.3f')}  " if number(line, "mean_reward") is not None else ""
    return (
        f"step {history.step:>{len(str(history.steps))}}/{history.steps}  {reward}"
        f"loss {shown(line, 'loss', '.4f')}  {tokens_per_s(line)} tokens/s"
        + (f"  {clock(eta)} left" if eta is not None else "")
    )


def evaluation_line(line: MetricsLine) -> str:
    scores = scores_in_words(line)
    return f"evaluation after step {line.step}: {scores}" if scores else ""


def shown(line: MetricsLine, name: str, form: str) -> str:
    value = number(line, name)
    return "-" if value is None else format(value, form)


def tokens_per_s(line: MetricsLine) -> str:
    return shown(line, "throughput/tokens_per_s", ",.0f")
