"""mrl serve: a policy behind OpenAI's HTTP API, or an environment for runs. A child process serves; this one imports no
torch."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click

from launcher.backends.child import ChildInterrupted, interruptible
from launcher.cli.arguments import DEVICE, DTYPE, TRUST_POLICY
from launcher.cli.completion import complete_run
from launcher.cli.show.terminal import echo
from launcher.doctor.preflight import refuse_unready
from launcher.errors import BadInput
from launcher.job.evaluation_request import checked_environment, parse_args
from launcher.recipe.load import load_recipe, read_resolved
from launcher.runs.policy_path import prepare_policy
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import required_extras

SERVER, PORT = "megatron_rl.run.serve", 8000
AGENT_SERVER, AGENT_PORT = "megatron_rl.agent.server.agent", 8100


@click.command("serve")
@click.argument("path", required=False, shell_complete=complete_run)
@click.option(
    "--environment",
    metavar="NAME",
    help="Instead of a policy, serve this environment (`mrl environments`) to runs whose environment is `remote`: its "
    "problems, conversations and rewards. Short: mrl serve-agent NAME.",
)
@click.option(
    "--tokenizer",
    metavar="RECIPE",
    help="With --environment, required: recipe or directory of the runs that will connect; its tokenizer encodes the "
    "prompts.",
)
@click.option(
    "--env-args",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --environment: argument of it, as in YAML: dataset_args.max_terms=3, or a mapping. Repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="0: any free port. Default: 8000, or 8100 with --environment."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File of accepted bearer tokens, one per line; created if missing. Default: ~/.config/mrl/serve-token.",
)
@click.option("--name", help="Name of the model for clients. Default: of the run or directory.")
@DEVICE
@DTYPE
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads. Default: all processors.")
@click.option("--max-length", type=click.IntRange(min=2), help="Largest number of tokens of a prompt with its answer.")
@click.option(
    "--max-waiting",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Answers that may wait for a row; further requests are rejected (429).",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish running requests after Ctrl-C.",
)
@TRUST_POLICY
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when ready: {address, model, ...}.")
@click.pass_context
def command(
    context: click.Context,
    path: str | None,
    environment: str | None,
    tokenizer: str | None,
    env_args: tuple[str, ...],
    token_file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve PATH: a run (its newest checkpoint), a checkpoint, a directory of Hugging Face weights, their name in the
    cache of the hub, or package:NAME.

    Endpoints: completions, chat completions, models and load with a bearer token; health, ping
    and version without.
    Ctrl-C stops the server after it has answered running requests; a second Ctrl-C stops it at once.

    With --environment only --tokenizer, --env-args, --host, --port, --token-file and --json are read. The ranks connect
    to it and generate what it asks of the model; it need not reach them. It may be restarted while runs wait: give it
    the same --port, --token-file and arguments.

    \b
    Exit codes:
      0    stopped by Ctrl-C or SIGTERM
      1    failed while serving
      2    PATH, the environment or its arguments, token or address cannot be used
      130  stopped before it was ready, or at once
    """
    if (path is None) == (environment is None):
        raise click.UsageError("give PATH, the policy to serve, or --environment NAME", context)
    if environment is not None and tokenizer is None:
        raise click.UsageError("--environment needs --tokenizer RECIPE", context)
    tokens = options["token_file"] = token_file or default_token_file()
    if options["port"] is None:
        options["port"] = PORT if environment is None else AGENT_PORT
    if environment is None:
        words, module, usage = _policy_words(str(path), options), SERVER, _usage
    else:
        words = _environment_words(environment, str(tokenizer), env_args, options)
        module, usage = AGENT_SERVER, _usage_of_environment
    make_token_file(tokens)
    serve(module, words, tokens, None if as_json else usage)


def _policy_words(path: str, options: dict[str, Any]) -> list[str]:
    refuse_unready(["serve"], options["device"], policy=path)
    path = prepare_policy(path, options.pop("trust"))
    given = {**options, "grace_s": options["grace"]}
    del given["grace"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    return [*words, "--", path]


def _environment_words(name: str, asked: str, env_args: tuple[str, ...], options: dict[str, Any]) -> list[str]:
    environment = checked_environment(EnvironmentConfig(name=name, args=parse_args(env_args)), "--environment")
    run = RunDir(Path(asked))
    tokenizer = (read_resolved(run.resolved) if run.resolved.is_file() else load_recipe(asked).config).tokenizer
    refuse_unready([*required_extras(environment), *(["huggingface"] if tokenizer.type == "huggingface" else [])])
    shared = [f"--{one.replace('_', '-')}={options[one]}" for one in ("host", "port", "token_file")]
    as_text = environment.model_dump_json(), tokenizer.model_dump_json()
    return [f"--environment={as_text[0]}", f"--tokenizer={as_text[1]}", *shared]


def _usage(ready: dict[str, Any]) -> str:
    """Return the address and a command to paste. The token stays out of every command's arguments, which other users
    see."""
    address, model, token = ready["address"], ready["model"], shlex.quote(ready["token_file"])
    step = "" if ready["step"] is None else f" after step {ready['step']}"
    asked: dict[str, Any]
    if ready["chat"]:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        route, asked = "completions", {"prompt": "1+2="}
    body = shlex.quote(json.dumps(asked))
    return f"""\
{model}{step} at {address}, {ready["max_length"]} tokens of context; Ctrl-C stops it

    echo "Authorization: Bearer $(head -n 1 {token})" | curl -H @- {address}/v1/{route} -d {body}
"""


def _usage_of_environment(ready: dict[str, Any]) -> str:
    problems = ", ".join(f"{count} in {name}" for name, count in ready["problems"].items())
    return f"""\
{ready["environment"]} at {ready["address"]}, problems: {problems}; Ctrl-C stops it

    environment:
      name: remote
      args: {{url: "{ready["address"]}", token_file: {json.dumps(ready["token_file"])}}}
"""


TOKEN_BYTES = 32


def default_token_file(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".config")
    return Path(home) / "mrl" / "serve-token"


def make_token_file(file: Path) -> None:
    """Create the token file, readable by this account only, unless it exists. Raises BadInput."""
    if file.is_file():
        if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            click.echo(f"warning: other users can read {file}; run chmod 600 on it", err=True)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", encoding="ascii") as made:  # mode 0600
            made.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            made.flush()
            with suppress(FileExistsError):  # another server has just made it
                os.link(made.name, file)
    except OSError as error:
        raise BadInput(f"--token-file {file} cannot be created: {error.strerror}") from error


def serve(module: str, arguments: Sequence[str], tokens: Path, usage: Callable[[dict[str, Any]], str] | None) -> None:
    """Run a server until it ends.

    Args:
        usage: formats the message that the server prints when it is ready; None: print that message as JSON.

    Raises:
        BadInput, Failed: the server refused its arguments, or failed.
        click.Abort: the server was interrupted before it was ready, or twice.
    """
    reason = ""
    try:
        with interruptible(module, *arguments, errors=None) as child:
            for message in child.said():
                reason = message.get("error", reason)
                if "address" in message:
                    message |= {"token_file": str(tokens.absolute())}
                    echo(usage(message) if usage else json.dumps(message))
    except ChildInterrupted:
        raise click.Abort from None
    except BadInput as error:
        raise type(error)(reason) if reason else error from None
