"""The programs mrl and mrl-submit. Ctrl-C ends them with a word and 130 at any moment, also while they load."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130  # as in contract.codes, which takes too long to import before there is a guard


def mrl() -> NoReturn:
    """The program mrl."""
    _run("launcher.cli.main")


def mrl_submit() -> NoReturn:
    """The program mrl-submit."""
    _run("launcher.cli.mrl_submit")


def _run(module: str) -> NoReturn:
    """Run the click command `main` of a module; click's own way to end would call Ctrl-C a failure."""
    gc.set_threshold(50_000)  # loading makes many objects and drops few: looking for garbage takes a twentieth of it
    try:
        from importlib import import_module

        import click

        try:
            sys.exit(import_module(module).main(standalone_mode=False))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(_interrupted())
    except KeyboardInterrupt:
        sys.exit(_interrupted())


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED
