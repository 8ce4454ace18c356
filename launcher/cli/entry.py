"""The programs mrl and mrl-submit. Ctrl-C ends them with a word and 130 at any moment, also while they load: what is
imported here, before there is a guard, is what the interpreter has loaded by itself."""

from __future__ import annotations

import gc
import os
import sys

EXIT_LOST, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
"""As in contract.codes, which takes too long to import before there is a guard."""


def mrl() -> None:
    """The program mrl."""
    _run("launcher.cli.main")


def mrl_submit() -> None:
    """The program mrl-submit."""
    _run("launcher.cli.mrl_submit")


def _run(module: str) -> None:
    """Run the click command `main` of a module; click's own way to end would call Ctrl-C a failure."""
    try:
        _replace_unencodable()
        _require_current_directory()
        gc.set_threshold(200_000)  # loading makes many objects and drops few: to look takes a twentieth of it
        from importlib import import_module

        import click

        try:
            sys.exit(import_module(module).main(standalone_mode=False))
        except click.ClickException as error:
            from launcher.errors import show

            show(error, as_json="--json" in sys.argv[1:])
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(_interrupted())
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except OSError as error:
        if not _output_is_lost():
            raise
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_LOST)
    finally:
        gc.freeze()  # or the interpreter looks twice more at all that was loaded before it leaves


def _replace_unencodable() -> None:
    """Have a terminal that lacks a character show a question mark, instead of an error in the middle of the work."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a stream that was closed is None
            stream.reconfigure(errors="replace")


def _require_current_directory() -> None:
    try:
        os.getcwd()  # noqa: PTH109 - pathlib takes a while to load
    except FileNotFoundError:
        print("error: the current directory was removed; cd to another one", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _output_is_lost() -> bool:
    """Whether stdout takes nothing any more; what is still said there goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED
