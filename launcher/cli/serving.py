"""Processes that serve until Ctrl-C: their token file, their start, and what they say. Here is no torch."""

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
    """Of this account: what was written down for one server also opens the next."""
    home = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".config")
    return Path(home) / "mrl" / "serve-token"


def make_token_file(file: Path) -> None:
    """Make the file with a token in it, for this account alone, unless it is there. Raises BadInput."""
    if file.is_file():
        if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            click.echo(f"warning: others can read {file}: chmod 600 it", err=True)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", encoding="ascii") as made:  # mode 0600
            made.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            made.flush()
            with suppress(FileExistsError):  # made by another server that was started just now
                os.link(made.name, file)
    except OSError as error:
        raise BadInput(f"--token-file {file} cannot be made: {error.strerror}") from error


def serve(command: list[str], tokens: Path, how_to_ask: Callable[[dict[str, Any]], str] | None) -> None:
    """Until the server ends. It has a session of its own: each Ctrl-C reaches it once, by us.

    how_to_ask: what to tell people of what it said when it was ready; None: that itself, as JSON.

    Raises BadInput, Failed, or click.Abort.
    """
    child: subprocess.Popen[str] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if child is not None and child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # the child's too, until it knows what to do about them
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
            _watch(child, tokens, how_to_ask)
    except OSError as error:
        raise Failed(f"the server cannot be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(child: subprocess.Popen[str], tokens: Path, how_to_ask: Callable[[dict[str, Any]], str] | None) -> None:
    """Say when it is ready, and wait for its end. Raises BadInput, Failed, or click.Abort."""
    assert child.stdout is not None
    why = None
    for line in child.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # of a library
        if not isinstance(said, dict):
            continue
        why = said.get("error", why)
        if "address" in said:
            said |= {"token_file": str(tokens.absolute())}
            echo(how_to_ask(said) if how_to_ask else json.dumps(said))
    code = child.wait()
    if code == EXIT_FINISHED:
        return
    if code == EXIT_INTERRUPTED:
        raise click.Abort
    raise (BadInput if code == EXIT_USAGE else Failed)(why or f"the server ended with exit code {code}")
