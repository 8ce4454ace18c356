"""The process of an environment, for `mrl serve-agent`:

    python -m megatron_rl.agent.server.agent --environment JSON --tokenizer JSON --token-file FILE [--host H] [--port N]

agent/server/serving.py documents its output and how it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_rl.agent.server.serving import refused, run_server, serve
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_USAGE
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.extras import install_command
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

STALL_S = 60.0
KEEP_ALIVE_S = 60


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve an environment.")
    parser.add_argument("--environment", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-file", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return run_server(options.token_file, options.host, options.port, partial(_build_and_serve, options))


def _build_and_serve(options: argparse.Namespace, tokens: list[str], listener: socket.socket) -> int:
    from megatron_rl.agent.api import build_environment
    from megatron_rl.model.tokenizer import build_tokenizer

    try:
        from megatron_rl.agent.server.agent.agent_service import AgentService, application
    except ImportError as error:
        return refused(f"serving needs `{install_command('train')}`: {error}", EXIT_USAGE)
    config = EnvironmentConfig.model_validate(json.loads(options.environment))
    try:
        tokenizer = build_tokenizer(TokenizerConfig.model_validate(json.loads(options.tokenizer)))
        environment = build_environment(config, tokenizer)
    except ValueError as error:
        return refused(f"environment {config.name}: {error}", EXIT_USAGE)
    service = AgentService(config.name, environment)
    asyncio.run(
        serve(
            application(service, tokens),
            listener,
            stall_s=STALL_S,
            keep_alive_s=KEEP_ALIVE_S,
            about={
                "environment": config.name,
                "problems": {name: len(its) for name, its in service.about.sets.items()},
            },
            leave=_at_once,
        )
    )
    return EXIT_FINISHED


async def _at_once() -> None:
    """Leave without waiting: the ranks repeat their requests when the server is back."""


if __name__ == "__main__":
    sys.exit(main())
