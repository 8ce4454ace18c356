"""How a running job looks: a panel that redraws itself on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from launcher.cli.show.progress import RECENT, Row, Status, accuracies, clock, mean, sparkline

LINE_EVERY_STEPS = 20
LINE_EVERY_S = 5.0


class View(ABC):
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._evaluated: int | None = None

    def show(self, status: Status) -> None:
        """Called several times a second."""
        if self._evaluated is None:  # evaluations of earlier attempts are no news
            self._evaluated = max((row["step"] for row in status.evaluations), default=-1)
        for row in status.evaluations:
            if row["step"] > self._evaluated:
                self._evaluated = row["step"]
                self.say(evaluation_line(row))
        self.draw(status)

    @abstractmethod
    def draw(self, status: Status) -> None: ...

    @abstractmethod
    def say(self, text: str) -> None:
        """Something that stays on the screen."""

    @abstractmethod
    def close(self) -> None: ...


def choose_view(name: str) -> View:
    console = Console(highlight=False)
    return LiveView(name, console) if console.is_terminal and not console.is_dumb_terminal else PlainView()


class PlainView(View):
    """A line every 20 steps or 5 seconds, for every change of phase and every evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = ""
        self._shown_step = -LINE_EVERY_STEPS
        self._shown_at = self._began

    def draw(self, status: Status) -> None:
        now = time.monotonic()
        if status.phase != self._phase:
            self._phase = status.phase
            self.say(f"[{clock(now - self._began)}] {status.phase}")
        fresh = status.step != self._shown_step and status.rows
        due = status.step >= self._shown_step + LINE_EVERY_STEPS or now >= self._shown_at + LINE_EVERY_S
        if fresh and (due or status.step == status.steps):
            self._shown_step, self._shown_at = status.step, now
            self.say(step_line(status))

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class LiveView(View):
    """One panel at the bottom of the terminal; what is said scrolls above it."""

    def __init__(self, name: str, console: Console) -> None:
        super().__init__()
        self._name = name
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def draw(self, status: Status) -> None:
        self._live.update(self._panel(status), refresh=True)

    def _panel(self, status: Status) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", justify="right")
        grid.add_column()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(status.steps, status.step, width=40), f"{status.step}/{status.steps}")
        grid.add_row("step", bar)
        rewards = status.rewards()
        if rewards:
            grid.add_row("reward", f"[bold green]{mean(rewards[-RECENT:]):.3f}[/]  {sparkline(rewards)}")
            row = status.rows[-1]
            grid.add_row("loss", f"{number(row, 'loss', '.4f')}  [dim]grad norm[/] {number(row, 'grad_norm', '.3f')}")
            grid.add_row("speed", f"{tokens_per_s(row)} tokens/s  {number(row, 'time/step_s', '.2f')} s a step")
        eta = status.eta_s()
        left = f", about {clock(eta)} left" if eta is not None else ""
        grid.add_row("time", f"{clock(time.monotonic() - self._began)}{left}")
        return Panel(grid, title=f"[bold]{self._name}[/] · {status.phase}", title_align="left", expand=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._live.stop()


def step_line(status: Status) -> str:
    row = status.rows[-1]
    eta = status.eta_s()
    return (
        f"step {status.step:>{len(str(status.steps))}}/{status.steps}  reward {number(row, 'mean_reward', '.3f')}  "
        f"loss {number(row, 'loss', '.4f')}  {tokens_per_s(row)} tokens/s"
        + (f"  {clock(eta)} left" if eta is not None else "")
    )


def evaluation_line(row: Row) -> str:
    scores = "  ".join(f"{name} {value:.3f}" for name, value in sorted(accuracies(row).items()))
    return f"evaluation after step {row['step']}: greedy accuracy {scores}"


def number(row: Row, key: str, form: str) -> str:
    """Absent means not finite, or not measured in that step."""
    return format(row[key], form) if key in row else "-"


def tokens_per_s(row: Row) -> str:
    return number(row, "throughput/tokens_per_s", ",.0f")
