"""Server processes of mrl serve and mrl serve-agent: token file, start, signals and messages. Imports no torch."""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Any

import click

from launcher.cli.show.terminal import echo
from launcher.errors import BadInput, Failed
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, HASH_SEED, PARENT_VARIABLE

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOKEN_BYTES = 32


def default_token_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Token file of this account, which all of its servers share."""
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


def serve(command: list[str], tokens: Path, usage: Callable[[dict[str, Any]], str] | None) -> None:
    """Run a server until it ends. It has a session of its own, so that each Ctrl-C reaches it once, from here.

    Args:
        usage: formats the message that the server prints when it is ready; None: print that message as JSON.

    Raises:
        BadInput, Failed: the server refused its arguments, or failed.
        click.Abort: the server was interrupted before it was ready, or twice.
    """
    child: subprocess.Popen[str] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # the child inherits this until it can handle them
    try:
        child = subprocess.Popen(
            command,
            env={**os.environ, **HASH_SEED, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        with child:
            _watch(child, tokens, usage)
    except OSError as error:
        raise Failed(f"the server cannot be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(child: subprocess.Popen[str], tokens: Path, usage: Callable[[dict[str, Any]], str] | None) -> None:
    """Print the usage when the server is ready, and wait for its end."""
    assert child.stdout is not None
    reason = None
    for line in child.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # output of a library
        if not isinstance(message, dict):
            continue
        reason = message.get("error", reason)
        if "address" in message:
            message |= {"token_file": str(tokens.absolute())}
            echo(usage(message) if usage else json.dumps(message))
    code = child.wait()
    if code == EXIT_FINISHED:
        return
    if code == EXIT_INTERRUPTED:
        raise click.Abort
    raise (BadInput if code == EXIT_USAGE else Failed)(reason or f"the server ended with exit code {code}")
