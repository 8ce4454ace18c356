"""Pure: commands that a message offers, as they can be pasted into a shell."""

from __future__ import annotations

import shlex


def mrl(words: str, run: str, more: str = "") -> str:
    """`mrl cancel --drain 'my run'`: whatever the run is called, the shell and mrl take it for that one word.

    Args:
        words: subcommand and options.
        run: name or path.
        more: what follows the run, as it is.
    """
    dashes = "--" if run.startswith("-") else ""
    return " ".join(filter(None, ("mrl", words, dashes, shlex.quote(run), more)))
