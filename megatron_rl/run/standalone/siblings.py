"""Ranks of a policy besides this process: processes of this machine that it starts, watches and ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_rl.contract.children import how_ended, module_command
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_USAGE, PARENT_VARIABLE, STEP_VARIABLE
from megatron_rl.rank.standalone_world import StandaloneWorld
from megatron_rl.recipe.errors import ConfigurationError

MET_S = 5.0
"""Seconds for this process to notice the loss of a rank itself; collectives do so immediately."""
LAST_LINES = 40
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of the ranks, unless already set: they communicate only within the machine."""


@contextmanager
def siblings(module: str, asked: str, size: int, lost: Callable[[str], NoReturn]) -> Iterator[StandaloneWorld]:
    """Yield the world of this process, rank 0 of `size`, while the other ranks run.

    Args:
        module: each rank runs `python -m module WORLD`, see `world_of`.
        asked: their stdin.
        lost: called with the reason if a rank ends too early, in any thread. It must end this process, which may be
            waiting for that rank.

    Raises ConfigurationError if a rank reports that `asked` cannot be used.
    """
    if size == 1:
        yield StandaloneWorld.single()
        return
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="mrl-ranks-") as folder:
        others = _Siblings(module, asked, size, Path(folder), lost)
        try:
            yield StandaloneWorld(0, size, 0, dist.FileStore(str(others.store), size))
        except RuntimeError as error:
            if (loss := others.loss(MET_S)) is None:
                raise
            if loss.is_refusal:
                raise ConfigurationError(loss.why) from error
            others.give_up(loss)
        finally:
            others.end()


def end_process(why: str) -> NoReturn:
    """End this process with the reason on stderr; a `lost` for `siblings`."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(EXIT_CRASHED)


def world_of(text: str) -> StandaloneWorld:
    rank, size, store = json.loads(text)
    return StandaloneWorld(rank, size, rank, dist.FileStore(store, size))


@dataclass(frozen=True, slots=True)
class _Loss:
    rank: int
    code: int
    stderr: list[str]

    @property
    def is_refusal(self) -> bool:
        return self.code == EXIT_USAGE

    @property
    def why(self) -> str:
        last = next((line.strip() for line in reversed(self.stderr) if line.strip()), "")
        if self.is_refusal:
            return last
        return f"rank {self.rank} has ended ({how_ended(self.code)}){': ' if last else ''}{last}"


class _Siblings:
    def __init__(self, module: str, asked: str, size: int, folder: Path, lost: Callable[[str], NoReturn]) -> None:
        self.store = folder / "store"
        self._folder, self._lost = folder, lost
        self._ending = threading.Event()
        self._died = threading.Event()
        self._losses: list[_Loss] = []
        environment = {name: value for name, value in os.environ.items() if name != STEP_VARIABLE}
        self._processes = []
        for rank in range(1, size):
            process = subprocess.Popen(
                [*module_command(module), json.dumps([rank, size, str(self.store)])],
                env=environment | {PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C must reach only rank 0, which ends the others
            )
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process, asked), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[str], asked: str) -> None:
        assert process.stdin and process.stderr
        with suppress(BrokenPipeError):  # it has already ended, see below
            process.stdin.write(asked)
            process.stdin.close()
        stderr = deque(process.stderr, maxlen=LAST_LINES)
        code = process.wait()
        if self._ending.is_set():
            return
        self._losses.append(_Loss(rank, code, list(stderr)))
        self._died.set()
        if not self._ending.wait(MET_S):
            self.give_up(self._losses[0])

    def loss(self, within_s: float) -> _Loss | None:
        """Return the rank that was lost first; None if none is lost within that time."""
        return self._losses[0] if self._died.wait(within_s) else None

    def give_up(self, loss: _Loss) -> NoReturn:
        """End this process, and thereby the other ranks."""
        sys.stderr.writelines(loss.stderr)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lost(loss.why)

    def end(self) -> None:
        """End the other ranks, which hold nothing that needs saving."""
        self._ending.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
