"""An evaluation as a separate process, for `mrl evaluate`:

    python -m megatron_rl.run.evaluate < EVALUATION.json

It writes its progress and finally its result to stdout, one JSON object per line, and errors to stderr, in one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.contract.shapes import to_json
from megatron_rl.generate.vllm.process import VllmGone
from megatron_rl.rank.world import die_with_parent
from megatron_rl.recipe.errors import ConfigurationError

T = TypeVar("T")


def main() -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it would log its configuration and deprecations
    try:
        _evaluate(sys.stdin.read())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (CheckpointError, ConfigurationError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except VllmGone as error:
        sys.stderr.write(f"{error}; answers so far are kept: repeat the command to resume\n")
        return EXIT_CRASHED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{where}{error.strerror or error}; answers so far are kept: repeat the command to resume\n")
        return EXIT_CRASHED
    return EXIT_FINISHED


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _evaluate(text: str) -> None:
    """Import late: imports take seconds, and signal handlers must be set before."""
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.recipe.evaluation_job import Evaluation
    from megatron_rl.run.evaluate.blocks import AnsweringEngine, EvaluationProgress
    from megatron_rl.run.evaluate.evaluator import evaluate

    def report(progress: EvaluationProgress) -> None:
        _say(progress=asdict(progress))

    with asyncio.Runner() as loop:

        def run(work: Coroutine[Any, Any, T], engine: AnsweringEngine) -> T | None:
            return loop.run(work)

        done = evaluate(Evaluation.model_validate_json(text), run, report)
    assert done is not None, "this rank can only be interrupted by a signal"
    result, out = done
    _say(result=to_json(result), out=str(out))


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
