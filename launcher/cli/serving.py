"""Server processes of mrl serve and mrl serve-agent: token file, start, signals and messages. Imports no torch."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click

from launcher.backends.child import Interrupted, interruptible
from launcher.cli.show.terminal import echo
from launcher.errors import BadInput

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
    except Interrupted:
        raise click.Abort from None
    except BadInput as error:
        raise type(error)(reason) if reason else error from None
