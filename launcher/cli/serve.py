"""mrl serve: a policy behind OpenAI's HTTP interface, by a process of its own: here is no torch."""

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
from megatron_rl.contract.children import module_command

SERVER = module_command("megatron_rl.server")


@click.command("serve", short_help="Answer by a policy over HTTP, as OpenAI's API does.")
@click.argument("path", shell_complete=complete_run)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the interface to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Bearer tokens that are let in, one a line; made where it is not there. Default: ~/.config/mrl/serve-token.",
)
@click.option("--name", help="Of the model, for clients. Default: that of the run or directory.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Default: the recipe's, or that of the weights.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help=TP_HELP)
@click.option("--threads", type=click.IntRange(min=1), help="Of the CPU, of each process. Default: all processors.")
@click.option("--max-length", type=click.IntRange(min=2), help="Longest prompt and answer together, in tokens.")
@click.option(
    "--weights-from",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of weights that a run writes (inference.server.folder), which it may have read here after every step.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Answers that may wait for room; then requests are turned away (429).",
)
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="For each token; more are turned away (429).")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds that requests under way have to be answered after Ctrl-C.",
)
@click.option("--trust", is_flag=True, help="Of another user: what is in a checkpoint can act as you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object when it is ready: {address, model, ...}.")
def command(
    path: str,
    host: str,
    port: int,
    token_file: Path | None,
    name: str | None,
    device: str,
    dtype: str | None,
    tp: int,
    threads: int | None,
    max_length: int | None,
    weights_from: Path | None,
    max_waiting: int,
    requests_per_minute: int | None,
    grace: float,
    trust: bool,
    as_json: bool,
) -> None:
    """Serve PATH: a run (its newest checkpoint), a checkpoint, a directory of Hugging Face weights, their name in the
    cache of the hub, or package:NAME.

    Completions, chat completions, models, tokenize, detokenize, health and metrics, always by token. Ctrl-C ends it
    once what is under way is answered; a second one at once.

    \b
    Exit codes:
      0    stopped by Ctrl-C or SIGTERM
      1    it failed while it served
      2    PATH, token or address cannot be used
      130  stopped before it was ready, or at once
    """
    refuse_unready(["serve"], device, tp, path)
    path = prepare_policy(path, trust)
    tokens = token_file or default_token_file()
    make_token_file(tokens)
    options: dict[str, Any] = {
        "--host": host,
        "--port": port,
        "--token-file": tokens,
        "--name": name,
        "--device": device,
        "--dtype": dtype,
        "--tp": tp,
        "--threads": threads,
        "--max-length": max_length,
        "--weights-from": weights_from,
        "--max-waiting": max_waiting,
        "--requests-per-minute": requests_per_minute,
        "--grace-s": grace,
    }
    given = [word for key, value in options.items() if value is not None for word in (key, str(value))]
    serve([*SERVER, *given, "--", path], tokens, None if as_json else _how_to_ask)


def _how_to_ask(said: dict[str, Any]) -> str:
    """What is served where, and lines to paste. The token stays out of every command's arguments, which others see."""
    address, model, token = said["address"], said["model"], shlex.quote(said["token_file"])
    step = "" if said["step"] is None else f" after step {said['step']}"
    asked: dict[str, Any]
    if said["chat"]:
        route, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
        call = f'client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}])'
    else:
        route, asked = "completions", {"prompt": "1+2="}
        call = f'client.completions.create(model="{model}", prompt="1+2=")'
    body = shlex.quote(json.dumps(asked))
    return f"""\
{model}{step} at {address}, {said["max_length"]} tokens of context; Ctrl-C ends it

    echo "Authorization: Bearer $(head -n 1 {token})" | curl -H @- {address}/v1/{route} -d {body}

    from openai import OpenAI
    client = OpenAI(base_url="{address}/v1", api_key=open({said["token_file"]!r}).readline().strip())
    {call}
"""
