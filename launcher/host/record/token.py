"""The token of a run, with which its processes that listen know those that may ask them."""

from __future__ import annotations

import re
import secrets

from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir

BYTES = 32  # of randomness

_WHOLE = re.compile(r"[A-Za-z0-9_-]{32,}\n")


def make_token(run: RunDir) -> None:
    """Have the run a token, for the eyes of its owner alone; one that is whole and that nobody else can read stays.
    Before any of its ranks starts: they read it once. Raises OSError."""
    try:
        private = run.token.stat().st_mode & 0o077 == 0
        if private and _WHOLE.fullmatch(run.token.read_text(encoding="ascii", errors="replace")):
            return
    except FileNotFoundError:
        pass
    write_atomic(run.token, secrets.token_urlsafe(BYTES) + "\n", private=True)
