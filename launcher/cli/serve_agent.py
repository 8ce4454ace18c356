"""mrl serve-agent: an environment over HTTP, for runs whose environment is `remote`. It runs in a child process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.cli.serving import default_token_file, make_token_file, serve
from launcher.doctor.preflight import refuse_unready
from launcher.job.evaluation_request import checked_environment, parse_args
from launcher.recipe.load import load_recipe, read_resolved
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.registry import required_extras
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.config import TokenizerConfig

SERVER = "megatron_rl.server.agent"


@click.command("serve-agent", short_help="Serve an environment to runs in other processes (environment: remote).")
@click.argument("name")
@click.option(
    "--tokenizer",
    "asked",
    required=True,
    metavar="RECIPE",
    help="Recipe or directory of the runs that will connect; its tokenizer encodes the prompts.",
)
@click.option(
    "--env-args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment, as in YAML: dataset_args.max_terms=3, or a mapping. Repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="0: any free port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File of accepted bearer tokens, one per line; created if missing. Default: ~/.config/mrl/serve-token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when ready: {address, environment, ...}.")
def command(
    name: str,
    asked: str,
    env_args: tuple[str, ...],
    host: str,
    port: int,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Serve the environment NAME (`mrl environments`): its problems, conversations and rewards.

    The ranks connect to it and generate what it asks of the model; it need not reach them. It may be restarted while
    runs wait: give it the same --port, --token-file and arguments.

    \b
    Exit codes:
      0    stopped by Ctrl-C or SIGTERM
      1    failed while serving
      2    NAME, its arguments, the token or the address cannot be used
      130  stopped before it was ready, or at once
    """
    environment = checked_environment(EnvironmentConfig(name=name, args=parse_args(env_args)), "NAME")
    tokenizer = _tokenizer(asked)
    refuse_unready([*required_extras(environment), *(["huggingface"] if tokenizer.type == "huggingface" else [])])
    tokens = token_file or default_token_file()
    make_token_file(tokens)
    options = {
        "--environment": environment.model_dump_json(),
        "--tokenizer": tokenizer.model_dump_json(),
        "--host": host,
        "--port": str(port),
        "--token-file": str(tokens),
    }
    given = [word for option in options.items() for word in option]
    serve(SERVER, given, tokens, None if as_json else _usage)


def _tokenizer(asked: str) -> TokenizerConfig:
    run = RunDir(Path(asked))
    return (read_resolved(run.resolved) if run.resolved.is_file() else load_recipe(asked).config).tokenizer


def _usage(ready: dict[str, Any]) -> str:
    problems = ", ".join(f"{count} in {name}" for name, count in ready["problems"].items())
    return f"""\
{ready["environment"]} at {ready["address"]}, problems: {problems}; Ctrl-C stops it

    environment:
      name: remote
      args: {{url: "{ready["address"]}", token_file: {json.dumps(ready["token_file"])}}}
"""
