"""How one of our processes starts another."""

from __future__ import annotations

import sys


def module_command(module: str) -> list[str]:
    """Return the command that runs a module of ours by this interpreter.

    `python -m` alone puts the current directory first on the path. There a folder of the user's may have the name of a
    package, such as that of an environment which was just installed from it; -P leaves the directory out.
    """
    return [sys.executable, "-P", "-m", module]
