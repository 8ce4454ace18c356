"""mrl chat: a conversation with a policy in the terminal. The model runs in a child process; this one imports no
torch."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click

from launcher.backends.child import ModuleProcess
from launcher.cli.arguments import DEVICE, DTYPE, SAMPLING, SAMPLING_OPTIONS, TRUST_POLICY
from launcher.cli.completion import complete_run
from launcher.doctor.preflight import refuse_unready
from launcher.runs.policy_path import prepare_policy
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED
from megatron_rl.contract.text import printable_lines

MODULE = "megatron_rl.run.standalone.talk"
LEAVE, CLEAR = "/exit", "/clear"


@click.command("chat")
@click.argument("path", shell_complete=complete_run)
@click.option("--system", metavar="TEXT", help="System prompt.")
@SAMPLING_OPTIONS
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal answers."
)
@DTYPE
@DEVICE
@TRUST_POLICY
@click.pass_context
def command(ctx: click.Context, path: str, **options: Any) -> None:
    """Talk to PATH: a run (its newest checkpoint), a checkpoint, a directory of Hugging Face weights, their name in the
    cache of the hub, or package:NAME.

    Messages use the model's chat template; a model without one continues each line as it is, without the lines before.
    Ctrl-C ends an answer; at the prompt it ends the chat, like Ctrl-D and /exit. /clear starts a new conversation. In a
    pipe, each line is a message, and its answer a paragraph on stdout.

    \b
    Exit codes:
      0    ended
      1    failed
      2    PATH or an option cannot be used
      130  ended by Ctrl-C
    """
    refuse_unready((), options["device"], policy=path)
    path = prepare_policy(path, options["trust"])
    sampling = {name: options[name] for name in SAMPLING if options[name] is not None}
    asked = {name: options[name] for name in ("system", "dtype", "device", "seed")}
    with ModuleProcess(MODULE) as child:
        child.send(json.dumps({"path": path, "sampling": sampling, **asked}))
        ctx.exit(_Conversation(child, options["system"]).run())


class _Conversation:
    def __init__(self, child: ModuleProcess, system: str | None) -> None:
        self._child = child
        self._replies = child.said()
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Talk until the user ends the chat; return the exit code. Raises BadInput or Failed if the child ends
        first."""
        try:
            ready = self._next()["ready"]
            if self._terminal:
                step = "" if ready["step"] is None else f" after step {ready['step']}"
                how = "" if ready["chat"] else ", which has no chat template and continues what you type"
                click.echo(
                    f"{ready['name']}{step}{how}; {CLEAR} starts again, {LEAVE} or Ctrl-D ends the chat", err=True
                )
            for line in self._lines():
                if line.strip() == LEAVE:
                    break
                if line.strip() == CLEAR:
                    self._messages = list(self._system)
                elif line.strip():
                    self._ask(line, ready["chat"])
        except KeyboardInterrupt:
            if self._terminal:
                click.echo(err=True)
            return EXIT_INTERRUPTED
        return EXIT_FINISHED

    def _lines(self) -> Iterator[str]:
        if not self._terminal:
            yield from (line.rstrip("\n") for line in sys.stdin)
            return
        import_module("readline")  # gives input() editing and a history
        while True:
            try:
                yield input("> ")
            except EOFError:
                click.echo(err=True)
                return

    def _ask(self, line: str, keeps: bool) -> None:
        """Print the answer to a line as it arrives. keeps: whether the answer joins the conversation."""
        messages = [*self._messages, {"role": "user", "content": line}]
        self._child.send(json.dumps({"messages": messages}))
        pieces: list[str] = []
        stopped: list[int] = []

        def stop(number: int, frame: object) -> None:
            stopped.append(number)
            if len(stopped) > 1:
                raise KeyboardInterrupt
            self._child.signal(signal.SIGINT)

        before = signal.signal(signal.SIGINT, stop)
        try:
            while True:
                reply = self._next()
                if "text" in reply:
                    pieces.append(reply["text"])
                    click.echo(printable_lines(reply["text"]), nl=False)
                elif "refused" in reply:
                    click.echo(f"error: {printable_lines(reply['refused'])}", err=True)
                    return
                elif "end" in reply:
                    break
        finally:
            signal.signal(signal.SIGINT, before)
        click.echo(" ..." if reply["end"] != "stop" else "")
        if keeps:
            self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _next(self) -> dict[str, Any]:
        reply = next(self._replies, None)
        if reply is None:
            raise self._child.failure(self._child.wait())
        return reply
