"""mrl serve: a policy behind OpenAI's HTTP API. It runs in a child process; this one imports no torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import TP_HELP
from launcher.cli.completion import complete_run
from launcher.cli.serving import default_token_file, make_token_file, serve
from launcher.doctor.preflight import refuse_unready
from launcher.runs.policy import prepare_policy

SERVER = "megatron_rl.server"


@click.command("serve", short_help="Serve a policy over HTTP with OpenAI's API.")
@click.argument("path", shell_complete=complete_run)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File of accepted bearer tokens, one per line; created if missing. Default: ~/.config/mrl/serve-token.",
)
@click.option("--name", help="Name of the model for clients. Default: of the run or directory.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: that of the recipe or the weights.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help=TP_HELP)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of each process. Default: all processors.")
@click.option("--max-length", type=click.IntRange(min=2), help="Largest number of tokens of a prompt with its answer.")
@click.option(
    "--max-waiting",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Answers that may wait for a row; further requests are rejected (429).",
)
@click.option(
    "--requests-per-minute", type=click.IntRange(min=1), help="Limit per token; further requests are rejected (429)."
)
@click.option("--open-metrics", is_flag=True, help="Answer /metrics without a token, as Prometheus asks by default.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish running requests after Ctrl-C.",
)
@click.option("--trust", is_flag=True, help="Open files of another user: a checkpoint can run code as you.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when ready: {address, model, ...}.")
def command(path: str, token_file: Path | None, trust: bool, as_json: bool, open_metrics: bool, **options: Any) -> None:
    """Serve PATH: a run (its newest checkpoint), a checkpoint, a directory of Hugging Face weights, their name in the
    cache of the hub, or package:NAME.

    Endpoints: completions, chat completions, models, tokenize, detokenize and metrics with a bearer token; health, ping
    and version without.
    Ctrl-C stops the server after it has answered running requests; a second Ctrl-C stops it at once.

    \b
    Exit codes:
      0    stopped by Ctrl-C or SIGTERM
      1    failed while serving
      2    PATH, token or address cannot be used
      130  stopped before it was ready, or at once
    """
    refuse_unready(["serve"], options["device"], options["tp"], path)
    path = prepare_policy(path, trust)
    tokens = token_file or default_token_file()
    make_token_file(tokens)
    options |= {"token_file": tokens, "grace_s": options.pop("grace")}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    given += ["--open-metrics"] if open_metrics else []
    serve(SERVER, [*given, "--", path], tokens, None if as_json else _usage)


def _usage(ready: dict[str, Any]) -> str:
    """Return the address and commands to paste. The token stays out of every command's arguments, which other users
    see."""
    address, model, token = ready["address"], ready["model"], shlex.quote(ready["token_file"])
    step = "" if ready["step"] is None else f" after step {ready['step']}"
    asked: dict[str, Any]
    if ready["chat"]:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
        call = f'client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}])'
    else:
        route, asked = "completions", {"prompt": "1+2="}
        call = f'client.completions.create(model="{model}", prompt="1+2=")'
    body = shlex.quote(json.dumps(asked))
    return f"""\
{model}{step} at {address}, {ready["max_length"]} tokens of context; Ctrl-C stops it

    echo "Authorization: Bearer $(head -n 1 {token})" | curl -H @- {address}/v1/{route} -d {body}

    from openai import OpenAI
    client = OpenAI(base_url="{address}/v1", api_key=open({ready["token_file"]!r}).readline().strip())
    {call}
"""
