"""The process of the inference server, for `mrl serve`:

    python -m megatron_rl.run.serve PATH --token-file FILE [--host H] [--port N] ...

serving.py documents its output and how it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.agent.server.serving import refused, run_server, serve
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.recipe.extras import install_command

if TYPE_CHECKING:
    from megatron_rl.agent.server.application import Application
    from megatron_rl.generate.engine.opened_policy import OpenedPolicy

LOOK_EVERY_S = 0.05  # seconds between two checks whether all requests are answered


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return run_server(options.token_file, options.host, options.port, partial(_open_and_serve, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.run.serve", description="Serve a policy.")
    parser.add_argument("path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--grace-s", type=float, default=30.0)
    return parser


def _open_and_serve(options: argparse.Namespace, tokens: list[str], listener: socket.socket) -> int:
    """Import late: imports take seconds, and invalid arguments are reported before."""
    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.checkpoint.source import find_source
    from megatron_rl.contract.manifest import CheckpointError
    from megatron_rl.generate.engine.opened_policy import open_policy
    from megatron_rl.recipe.errors import ConfigurationError

    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    try:
        from megatron_rl.agent.server.application import Application
        from megatron_rl.generate.serving.access import ServerLimits
    except ImportError as error:
        return refused(f"serving needs `{install_command('serve')}`: {error}", EXIT_USAGE)
    limits = ServerLimits(max_waiting=options.max_waiting)
    try:
        with open_policy(
            find_source(options.path, options.dtype),
            device=options.device,
            threads=options.threads,
            max_length=options.max_length,
        ) as opened:
            application = Application(
                opened.engine,
                opened.tokenizer,
                model=options.name or opened.source.name,
                max_length=opened.engine.max_length,
                tokens=tokens,
                limits=limits,
            )
            gc.collect()
            gc.freeze()  # collecting torch's many objects would take longer than some answers
            asyncio.run(
                serve(
                    application,
                    listener,
                    stall_s=limits.stall_s,
                    keep_alive_s=limits.head_s,
                    about=_about(opened, options),
                    leave=partial(_finish, application, options.grace_s),
                )
            )
            if application.thread.computes:
                os._exit(EXIT_FINISHED)  # the engine's thread is in the middle of a step
            return EXIT_FINISHED
    except (ConfigurationError, CheckpointError) as error:
        return refused(str(error), EXIT_USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return refused(f"{where}{error.strerror or error}", EXIT_CRASHED)


def _about(opened: OpenedPolicy, options: argparse.Namespace) -> dict[str, Any]:
    source = opened.source
    return {
        "model": options.name or opened.source.name,
        "step": source.step,
        "checkpoint": str(source.folder),
        "max_length": opened.engine.max_length,
        "chat": source.tokenizer.chat_template is not None,
    }


async def _finish(application: Application, grace_s: float) -> None:
    """Stop the server when open requests are answered, or after `grace_s` seconds."""
    application.guard.closing = True
    give_up = time.monotonic() + grace_s
    while application.guard.open and time.monotonic() < give_up:
        await asyncio.sleep(LOOK_EVERY_S)
    application.thread.stop("the server is shutting down")


if __name__ == "__main__":
    sys.exit(main())
