"""Entry points of mrl and mrl-submit. Ctrl-C ends them with one word and exit code 130 at any moment, even while they
load; so this module imports only what the interpreter has already loaded."""

from __future__ import annotations

import gc
import os
import sys

EXIT_LOST, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
"""Exit codes as in contract.codes, which takes too long to import before Ctrl-C is handled."""


def mrl() -> None:
    _run("launcher.cli.main")


def mrl_submit() -> None:
    _run("launcher.cli.mrl_submit")


def _run(module: str) -> None:
    """Run the click command `main` of a module. Click's own error handling would report Ctrl-C as a failure."""
    try:
        _replace_unencodable()
        _require_current_directory()
        gc.set_threshold(200_000)  # loading creates many objects and frees few; collecting takes 5 % of the time
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
        if _output_is_lost():
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(EXIT_LOST)
        if error.filename is None:
            raise
        # A file that no command expects to fail, such as one of the installation: one line for each of them.
        from launcher.errors import Failed, show

        show(Failed(f"{error.filename}: {error.strerror}"), as_json="--json" in sys.argv[1:])
        sys.exit(EXIT_LOST)
    finally:
        gc.freeze()  # otherwise the interpreter collects all loaded objects twice more at exit


def _replace_unencodable() -> None:
    """Print a question mark for a character that the terminal lacks, instead of failing."""
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
    """Whether stdout is gone. If so, redirect it to /dev/null."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED
