"""Keys of random numbers. Each purpose has its own key, so a draw does not depend on time, rank or neighbouring draws.

The hash is a published standard (BLAKE2b, RFC 7693). Those of Python and numpy may change between versions, but a run
that resumes on another machine or interpreter must draw the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b


def stable_key(purpose: str, *parts: int) -> int:
    """Return a 64-bit hash of `purpose` and integers, in [0, 2**64). Different purposes never share random numbers."""
    text = ":".join([purpose, *map(str, parts)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def group_key(seed: int, ordinal: int, try_: int, policy_version: int) -> int:
    return stable_key("group", seed, ordinal, try_, policy_version)


def turn_key(group: int, sample: int, turn: int) -> int:
    """Return the key of a later turn of one conversation, whose prompt is unique within its group. All samples share
    turn 0, which uses the group's own key."""
    return stable_key("turn", group, sample, turn)
