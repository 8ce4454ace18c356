"""Keys of random numbers: what is drawn for one purpose is the same whenever, wherever and beside whatever it is.

A hash with a published standard (BLAKE2b, RFC 7693): Python's and numpy's may change between versions, it cannot, so a
run that resumes on another machine or interpreter draws the same.
"""

from __future__ import annotations

from hashlib import blake2b


def stable_key(purpose: str, *parts: int) -> int:
    """64-bit hash of `purpose` and integers; different purposes never share random numbers. In [0, 2**64)."""
    text = ":".join([purpose, *map(str, parts)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def group_key(seed: int, ordinal: int, try_: int, policy_version: int) -> int:
    """Key of the random numbers that answer one prompt."""
    return stable_key("group", seed, ordinal, try_, policy_version)


def turn_key(group: int, sample: int, turn: int) -> int:
    """Key of a later turn of one conversation, whose prompt no other sample of its group shares; turn 0, which all do,
    is answered under the group's own key."""
    return stable_key("turn", group, sample, turn)
