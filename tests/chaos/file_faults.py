"""Files that fail, wait or take less than they are given, and wall clocks that jump, in the processes of a run.

file_faults.c is preloaded into the run's steps and its batch host process by two variables of the cluster profile, so
the product is as users have it. Rules change during the run and hold at once in all its processes, on all nodes of the
lab, because each maps the same file.

    folder = make(tmp_path / "file-faults")
    profile["environment"] = preloaded(folder)
    set_faults(folder, [Fail(f"{run_dir}/*", ("read",), "EIO", chance=0.01)])
    set_faults(folder)                                   # all is well again
"""

from __future__ import annotations

import errno
import mmap
import random
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault import Fault, Target, Undo

CALLS = (
    *("open", "create", "read", "write", "close", "fsync", "truncate"),
    *("rename", "link", "unlink", "mkdir", "stat", "list", "lock"),
)
"""Calls that a rule can hit, in the order of the bits in file_faults.c; `create` is every opening for a change."""
CHANGES = ("create", "write", "close", "fsync", "truncate", "rename", "link", "mkdir")
"""Calls that fail on a full disk."""
LIBRARY, CONTROL = "file_faults.so", "control"
MAGIC, RULES = 0x6D726C66, 16
HEADER = struct.Struct("<IIQq64sQ")
RULE = struct.Struct("<512s64s128sIiIIQ")
COUNT_AT, HITS_AT = 4, HEADER.size - 8

HOUR_S = 3600.0


@dataclass(frozen=True)
class Fail:
    """Fault of calls on some files. Patterns are those of fnmatch(3); `*` matches slashes too."""

    path: str
    calls: tuple[str, ...]
    error: str | None = None
    """Name of an errno; None: the call succeeds."""
    chance: float = 1.0
    delay_s: float = 0.0
    """Longest wait before the call."""
    short: bool = False
    """Whether a write takes only a part of its bytes."""
    host: str = "*"
    command: str = "*"
    """Pattern of the process's command line."""


def make(folder: Path) -> Path:
    """Compile the library into a folder, with a control file that has no rules. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("file_faults.c")
    command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-o", folder / LIBRARY, source, "-ldl"]
    subprocess.run(command, check=True)
    (folder / CONTROL).write_bytes(HEADER.pack(MAGIC, 0, 0, 0, b"*", 0).ljust(HEADER.size + RULES * RULE.size, b"\0"))
    (folder / CONTROL).chmod(0o666)
    return folder


def preloaded(folder: Path) -> dict[str, str]:
    """Environment of the processes that the rules of this folder hold for."""
    return {"LD_PRELOAD": str(folder / LIBRARY), "MRL_FILE_FAULTS": str(folder / CONTROL)}


def set_faults(
    folder: Path, rules: Sequence[Fail] = (), *, clock_s: float = 0.0, clock_host: str = "*", seed: int = 0
) -> None:
    """Replace all rules, and move the wall clock of some hosts by `clock_s` seconds."""
    assert len(rules) <= RULES, f"at most {RULES} rules"
    with (folder / CONTROL).open("r+b") as file, mmap.mmap(file.fileno(), 0) as control:
        struct.pack_into("<I", control, COUNT_AT, 0)  # processes look at rules only below this count
        for index, rule in enumerate(rules):
            RULE.pack_into(control, HEADER.size + index * RULE.size, *_packed(rule))
        struct.pack_into("<Qq64s", control, COUNT_AT + 4, seed, int(clock_s * 1e9), clock_host.encode())
        struct.pack_into("<I", control, COUNT_AT, len(rules))


def hits(folder: Path) -> int:
    """Number of calls that a rule has hit so far."""
    return int(struct.unpack_from("<Q", (folder / CONTROL).read_bytes(), HITS_AT)[0])


def _packed(rule: Fail) -> tuple[bytes, bytes, bytes, int, int, int, int, int]:
    texts = [text.encode() for text in (rule.path, rule.host, rule.command)]
    assert all(len(text) < size for text, size in zip(texts, (512, 64, 128), strict=True)), rule
    calls = sum(1 << CALLS.index(name) for name in set(rule.calls))
    code = getattr(errno, rule.error) if rule.error else 0
    return (*texts, calls, code, int(rule.delay_s * 1000), int(rule.short), int(rule.chance * 2**32))  # type: ignore[return-value]


Choose = Callable[[Target, random.Random], Sequence[Fail]]


def _files(kind: str, choose: Choose) -> Fault:
    """Fault of a shared file system: rules for the run's directory."""

    def apply(target: Target, chance: random.Random) -> Undo | None:
        folder = target.file_faults
        if folder is None:
            return None
        set_faults(folder, choose(target, chance), seed=chance.getrandbits(63))
        return lambda: set_faults(folder)

    return Fault(kind, apply)


def _clock(kind: str, sign: int) -> Fault:
    def apply(target: Target, chance: random.Random) -> Undo | None:
        folder, hosts = target.file_faults, _nodes(target)
        if folder is None or not hosts:
            return None
        host = chance.choice(["*", *hosts])
        set_faults(folder, clock_s=sign * chance.uniform(1.0, 48.0) * HOUR_S, clock_host=host)
        return lambda: set_faults(folder)

    return Fault(kind, apply)


def _nodes(target: Target) -> list[str]:
    """Nodes of the attempt in progress."""
    starts = [line["nodes"] for line in target.run.ledger() if line["event"] == "start"]
    return list(starts[-1]) if starts else []


def _all(target: Target) -> str:
    return f"{target.run_dir}/*"


def _on_one_node(target: Target, chance: random.Random) -> str:
    return chance.choice(["*", *_nodes(target)])


FAULTS = (
    _files(
        "some calls on the run's files fail with EIO",
        lambda target, chance: [Fail(_all(target), CALLS, "EIO", 0.02, host=_on_one_node(target, chance))],
    ),
    _files(
        "the run's files are stale",
        lambda target, chance: [
            Fail(_all(target), ("open", "read", "stat", "list"), "ESTALE", 0.2, host=_on_one_node(target, chance))
        ],
    ),
    _files("no space is left for the run", lambda target, _: [Fail(_all(target), CHANGES, "ENOSPC")]),
    _files(
        "the user's quota is used up", lambda target, _: [Fail(_all(target), ("write", "fsync", "close"), "EDQUOT")]
    ),
    _files(
        "checkpoints cannot be written", lambda target, _: [Fail(f"{target.run_dir}/checkpoints/*", CHANGES, "EIO")]
    ),
    _files("files cannot be locked", lambda target, _: [Fail(_all(target), ("lock",), "ENOLCK")]),
    _files("calls on the run's files take up to 5 s", lambda target, _: [Fail(_all(target), CALLS, None, 0.05, 5.0)]),
    _files("writes are short", lambda target, _: [Fail(_all(target), ("write",), None, 0.5, short=True)]),
    _clock("the clock jumps forward", +1),
    _clock("the clock jumps back", -1),
)
