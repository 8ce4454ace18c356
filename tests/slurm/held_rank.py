"""Rank that trains, and waits at a place chosen by the test until it is asked to leave or is killed.

    python held_rank.py PLACES -m MODULE --run-dir DIR --attempt N

A profile whose `python` is this command up to PLACES holds all its ranks. PLACES is a JSON list of objects:

    attempt, step   the attempt, and the step in progress (evaluate, save: the finished step); by default all
    where           start (before any import), teach, or a phase of the loop: generate (each answer has some tokens),
                    log-probs, train (in the first micro-batch), save (files are half written), evaluate
    rank            the rank; by default all ranks
    then            goes on (default), fails (raises), or finds the disk full (in a save, without waiting)
    seconds         longest wait without a request to leave

The file attempts/NNN/held.RANK exists while a rank waits. The rank polls ten times a second for a request to leave, as
if busy with short pieces of work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.contract.paths import RunDir

LIMIT = 300.0
"""Seconds after which a held rank continues without a request to leave: the test has failed by then."""
TOKENS = 1
"""Engine steps before a generation or evaluation is held; the shortest answers have two tokens."""

Place = dict[str, Any]


class Boom(RuntimeError):
    """Exception that a rank raises at a place with `then: fails`."""


class Held:
    """Places at which this rank waits."""

    def __init__(self, places: list[Place], run_dir: str, attempt: int) -> None:
        self.folder = RunDir(run_dir).attempt(attempt)
        self.rank = int(os.environ["SLURM_PROCID"])
        self.safe_points: Any = None  # megatron_rl.rank.safe_points.SafePoints, once created
        mine = {"attempt": attempt, "rank": self.rank}
        self._places = [place for place in places if all(place.get(key, mine[key]) == mine[key] for key in mine)]
        self._passed: Counter[tuple[str, int]] = Counter()

    def arrive(self, where: str, step: int, skip: int = 0) -> None:
        """Wait if the test chose this place and the rank has passed it `skip` times."""
        self._passed[where, step] += 1
        here = [place for place in self._places if place["where"] == where and place.get("step", step) == step]
        if not here or self._passed[where, step] != skip + 1:
            return
        then = here[0].get("then", "goes on")
        mark = self.folder.folder / f"held.{self.rank}"
        mark.write_text(f"{where} of step {step}\n")
        if then != "finds the disk full":
            until = time.monotonic() + here[0].get("seconds", LIMIT)
            while not self._asked() and time.monotonic() < until:
                time.sleep(0.1)
        mark.unlink()
        if then == "fails":
            raise Boom(f"boom in {where}")
        if then == "finds the disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder.folder))

    def _asked(self) -> bool:
        """Whether the rank was asked to leave: by its drain listener or, before that exists, by the drain file."""
        return self.safe_points.drain.asked if self.safe_points is not None else self.folder.drain.exists()


def hold(held: Held) -> None:
    """Patch the training loop so that it calls `held.arrive` at each place."""
    from megatron_rl.checkpoint import checkpoint_writer
    from megatron_rl.generate.engine.engine import Engine
    from megatron_rl.learn.training import trainer, warm_up
    from megatron_rl.rank.safe_points import PHASES, SafePoints

    phases = {words: phase for phase, words in PHASES.items()}

    def before(owner: Any, name: str, arrive: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def replaced(*arguments: Any, **named: Any) -> Any:
            arrive(*arguments)
            return original(*arguments, **named)

        setattr(owner, name, replaced)

    def at_phase(skip: int) -> None:
        if held.safe_points is not None:
            held.arrive(phases.get(held.safe_points.activity.doing, ""), held.safe_points.activity.step, skip)

    def half_written(folder: Path, *_: Any) -> None:
        with contextlib.suppress(OSError):
            (folder / f"__{held.rank}_0.distcp").write_bytes(b"half of it")
        held.arrive("save", int(folder.name[len("step-") :].split(".")[0]))

    before(SafePoints, "__init__", lambda safe_points, *_: setattr(held, "safe_points", safe_points))
    before(Engine, "step", lambda _: at_phase(TOKENS))
    before(trainer, "predicted_logprobs", lambda *_: at_phase(0))
    before(warm_up, "predicted_logprobs", lambda *_: held.arrive("teach", 0, skip=3))
    before(checkpoint_writer, "write_part", half_written)


def main() -> None:
    places, dash_p, dash_m, module, *arguments = sys.argv[1:]
    assert (dash_p, dash_m) == ("-P", "-m"), sys.argv
    if os.environ["MRL_STEP"] == "train":
        named = dict(zip(arguments[::2], arguments[1::2], strict=True))
        held = Held(json.loads(places), named["--run-dir"], int(named["--attempt"]))
        held.arrive("start", 0)
        hold(held)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
