"""Views of a running job: a panel that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.cli.show.history import RECENT, History, clock, evaluation_values, mean, shown_accuracy, sparkline
from launcher.cli.show.status_rows import replica_lines
from launcher.cli.show.terminal import echo
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import number

LINE_EVERY_STEPS = 20
LINE_EVERY_S = 5.0
WAIT_EVERY_S = 30.0
"""Seconds between two plain lines that say what the run waits for."""
MOST_WAITS = 3


class View(ABC):
    _evaluated: int | None = None  # step of the last evaluation shown

    def show(self, history: History) -> None:
        """Show the current state of the run; called several times a second."""
        if self._evaluated is None:  # evaluations of earlier attempts are not new
            self._evaluated = max((line.step for line in history.evaluations), default=-1)
        for line in history.evaluations:
            if line.step > self._evaluated:
                self._evaluated = line.step
                if evaluation := evaluation_line(line):
                    self.announce(evaluation)
        self.draw(history)

    @abstractmethod
    def draw(self, history: History) -> None: ...

    @abstractmethod
    def announce(self, text: str) -> None:
        """Print a line that stays on the screen."""

    @abstractmethod
    def close(self) -> None: ...


class PlainView(View):
    """One line every 20 steps or 5 seconds, for each change of phase, each evaluation and each new warning, and for
    replicas that the run waits for."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phase = ""
        self._warned: set[str] = set()
        self._shown_step = -LINE_EVERY_STEPS
        self._shown_at = self._waited_at = self._began
        self._waits: list[tuple[Any, ...]] = []

    def draw(self, history: History) -> None:
        now = time.monotonic()
        if history.phase != self._phase:
            self._phase = history.phase
            self.announce(f"[{clock(now - self._began)}] {history.phase}")
        self._draw_waits(history, now)
        fresh = history.step != self._shown_step and history.lines
        due = history.step >= self._shown_step + LINE_EVERY_STEPS or now >= self._shown_at + LINE_EVERY_S
        if fresh and (due or history.step == history.steps):
            self._shown_step, self._shown_at = history.step, now
            self.announce(step_line(history))
        for warning in history.warnings:
            if warning.name not in self._warned:
                self._warned.add(warning.name)
                self.announce(f"warning: {warning}")

    def _draw_waits(self, history: History, now: float) -> None:
        waits = [(one["name"], one["state"], one["phase"], one["starts"]) for one in history.waits_for]
        if waits != self._waits or (waits and now >= self._waited_at + WAIT_EVERY_S):
            self._waits, self._waited_at = waits, now
            for line in waiting_lines(history):
                self.announce(f"[{clock(now - self._began)}] {line}")

    def announce(self, text: str) -> None:
        echo(text)

    def close(self) -> None:
        pass


class LiveView(View):
    def __init__(self, name: str, console: Console) -> None:
        self._began = time.monotonic()
        self._name = name
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def draw(self, history: History) -> None:
        self._live.update(self._panel(history), refresh=True)

    def _panel(self, history: History) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(history.steps, history.step, width=40), f"{history.step}/{history.steps}")
        grid.add_row("step", bar)
        rewards = history.rewards()
        if rewards:
            bars = sparkline(rewards) if self._console.encoding.startswith("utf") else ""
            grid.add_row("reward", f"[bold green]{mean(rewards[-RECENT:]):.3f}[/]  {bars}")
        if history.lines:
            line = history.lines[-1]
            grid.add_row("loss", f"{shown(line, 'loss', '.4f')}  [dim]grad norm[/] {shown(line, 'grad_norm', '.3f')}")
            grid.add_row("speed", f"{tokens_per_s(line)} tokens/s  {shown(line, 'time/step_s', '.2f')} s per step")
        eta = history.eta_s()
        left = f", about {clock(eta)} left" if eta is not None else ""
        for wait in waiting_lines(history):
            grid.add_row("replica", Text(wait, style="yellow"))
        for warning in history.warnings:
            grid.add_row("warning", Text(str(warning), style="yellow"))
        grid.add_row("time", f"{clock(time.monotonic() - self._began)}{left}")
        title = f"[bold]{escape(self._name)}[/]: {escape(history.phase)}"
        return Panel(grid, title=title, title_align="left", expand=False)

    def announce(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()


class Display(View):
    """A panel on a capable terminal, else lines. The run does not depend on it: if the panel fails, lines follow, and
    if these fail too, nothing is shown."""

    def __init__(self, name: str) -> None:
        self._view: View | None = PlainView()
        with self._guarded():
            console = Console(highlight=False)
            if console.is_terminal and not console.is_dumb_terminal:
                self._view = LiveView(name, console)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - rich exits if the terminal is gone
            self._view = PlainView() if isinstance(self._view, LiveView) else None
            echo(f"note: the display failed, but the run continues: {type(error).__name__}: {error}", err=True)

    def draw(self, history: History) -> None:
        with self._guarded():
            if self._view:
                self._view.draw(history)

    def announce(self, text: str) -> None:
        with self._guarded():
            if self._view:
                self._view.announce(text)

    def close(self) -> None:
        with self._guarded():
            if self._view:
                self._view.close()


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
    """Describe an evaluation: greedy accuracy on each set, and lost answers; empty without a set."""
    found, lost = evaluation_values(line, "greedy_accuracy"), evaluation_values(line, "failed_rollouts")
    scores = [
        f"{name} {shown_accuracy(found.get(name))}" + (f" ({lost[name]:.0f} answers lost)" if name in lost else "")
        for name in sorted({*found, *lost})
    ]
    return f"evaluation after step {line.step}: greedy accuracy {'  '.join(scores)}" if scores else ""


def shown(line: MetricsLine, name: str, form: str) -> str:
    value = number(line, name)
    return "-" if value is None else format(value, form)


def tokens_per_s(line: MetricsLine) -> str:
    return shown(line, "throughput/tokens_per_s", ",.0f")
