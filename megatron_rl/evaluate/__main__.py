"""An evaluation as a process of its own, for `mrl evaluate`:

    python -m megatron_rl.evaluate < EVALUATION.json

Says how far it is and at last what was found on stdout, a JSON object a line, and what is wrong on stderr, in one line.
Where there are several ranks it starts the others, with their ranks as an argument (see standalone/siblings.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, NoReturn

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.shapes import to_json
from megatron_rl.rank.world import die_with_parent


def main(world: str | None = None) -> int:
    """The exit code. world: of a rank that another one has started."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it prints its configuration and deprecations
    try:
        _evaluate(sys.stdin.read(), world)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except _refusals() as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{where}{error.strerror or error}; what was answered is kept, and the same command goes on\n")
        return EXIT_CRASHED
    return EXIT_FINISHED


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _refusals() -> tuple[type[Exception], ...]:
    from megatron_rl.checkpoint.publish import CheckpointError
    from megatron_rl.errors import ConfigurationError

    return CheckpointError, ConfigurationError


def _evaluate(text: str, world: str | None) -> None:
    """Imports take seconds; by then there are handlers."""
    import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.agent.api import EvaluationResponse
    from megatron_rl.evaluate.blocks import Progress
    from megatron_rl.evaluate.config import Evaluation
    from megatron_rl.evaluate.evaluator import evaluate
    from megatron_rl.inference.engine import Engine
    from megatron_rl.standalone.siblings import end_process, siblings, world_of
    from megatron_rl.standalone.source import find_source

    def report(progress: Progress) -> None:
        _say(progress=asdict(progress))

    with asyncio.Runner() as loop:

        def run(work: Coroutine[Any, Any, list[EvaluationResponse]], engine: Engine) -> list[EvaluationResponse] | None:
            return loop.run(work)

        evaluation = Evaluation.model_validate_json(text)
        asked = evaluation.evaluate
        if world is not None:
            evaluate(evaluation, run, report, world_of(world))
            return
        if asked.ranks > 1:  # all evaluate what is the newest checkpoint now
            pinned = str(find_source(asked.checkpoint, asked.dtype).folder)
            evaluation = evaluation.model_copy(update={"evaluate": asked.model_copy(update={"checkpoint": pinned})})
        with siblings("megatron_rl.evaluate", evaluation.model_dump_json(), asked.ranks, end_process) as first:
            done = evaluate(evaluation, run, report, first)
    assert done is not None, "nobody asks this one to leave but by a signal"
    found, out = done
    _say(result=to_json(found), out=str(out))


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
