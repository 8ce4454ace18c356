"""heartbeats/N.beats: the latest heartbeats of the ranks of one node, each in its own slot.

N is the rank in the first slot: the node's first rank, where ranks are numbered node by node. A rank writes its slot in
place, and no byte of another slot. So a node costs the file system one file and no rename, and a rank that hangs or
dies hides no other. A slot is a line of JSON, spaces, and a checksum that does not match a half-written one. An
older mrl wrote heartbeats/RANK.json, which is read as a file with one slot.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from megatron_rl.contract.attempt_records import Heartbeat
from megatron_rl.contract.files import names_in, read_bytes
from megatron_rl.contract.records import decode, encode_line, if_readable

SLOT = 512  # bytes; a heartbeat takes about 200, and a host's name at most 64 more
_CHECK = 9  # bytes of the checksum, in hexadecimal, and of a line break
_OF_OLDER = b"{\n"  # start of a file of an older mrl


class SlotName(NamedTuple):
    file: str
    number: int


def write_heartbeat(folder: Path, beat: Heartbeat, local_rank: int = 0) -> None:
    """Write a heartbeat of the rank with this number on its node. Raises OSError."""
    text = encode_line(beat).encode("utf-8").ljust(SLOT - _CHECK)
    if len(text) > SLOT - _CHECK:
        raise OSError(f"a heartbeat of {len(text)} bytes does not fit into its slot")
    path = folder / f"{beat.rank - local_rank}.beats"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, text + b"%08x\n" % zlib.crc32(text), local_rank * SLOT)
    finally:
        os.close(descriptor)  # only now does a network file system show it to other nodes


def read_slots(folder: Path) -> dict[SlotName, bytes]:
    """Return the slots of all ranks that have written one; without those of a file that cannot be read. Raises OSError
    if the folder cannot be listed."""
    found = {}
    for file in _files(folder):
        with contextlib.suppress(OSError):
            found.update(_slots(file, read_bytes(f"{folder}/{file}")))
    return found


def is_whole(slot: bytes) -> bool:
    """Whether a slot is not half-written."""
    text, check = slot[:-_CHECK], slot[-_CHECK:]
    return slot.startswith(_OF_OLDER) or check == b"%08x\n" % zlib.crc32(text)


def decode_slot(slot: bytes) -> Heartbeat | None:
    """Return the heartbeat in a slot; None if it is half-written or damaged."""
    if not is_whole(slot):
        return None
    text = slot if slot.startswith(_OF_OLDER) else slot[:-_CHECK]
    return if_readable(decode(Heartbeat, text, "heartbeat"))


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """Return the last heartbeat of one rank; None if there is none, or it cannot be read."""
    with contextlib.suppress(OSError):
        files = {int(file.partition(".")[0]): file for file in _files(folder)}
        # The file of its node begins with the closest rank before it, unless ranks are numbered otherwise.
        for first in sorted(files, key=lambda first: (first > rank, -first)):
            for slot in _slots(files[first], read_bytes(folder / files[first])).values():
                beat = decode_slot(slot)
                if beat is not None and beat.rank == rank:
                    return beat
    return None


def _files(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if re.match(r"-?[0-9]+\.(beats|json)$", name)]


def _slots(file: str, data: bytes) -> dict[SlotName, bytes]:
    if data.startswith(_OF_OLDER):
        return {SlotName(file, 0): data}
    starts = [start for start in range(0, len(data), SLOT) if data[start]]  # 0: this rank has not written yet
    return {SlotName(file, start // SLOT): data[start : start + SLOT] for start in starts}
