"""Whatever operation on the cache of images, and whatever answer of enroot, fails: the import gives a whole image or
one error, leaves nothing half done, replaces no image by another one unasked, and the next import succeeds."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_injection import OLDER, ONCE, Clock, Fault, FaultyFiles, Tally, faults

from launcher.host.image import __main__ as program
from launcher.host.image import enroot
from launcher.host.image.cache import find

REFERENCE = "nvcr.io#nvidia/pytorch:25.06-py3"
DIGESTS = ["sha256:" + "4d5b" * 16, "sha256:" + "e07a" * 16]
MOMENT_S, LONG_S = 2.0, 60.0
TOOL_FAULTS = ("missing", "EACCES", "EIO", "time-out", "refusal", "garbage", "nothing")


class Node:
    """A node that imports an image. Its enroot is a function: it resolves tags from version 4 on, and writes a file."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, resolves: bool) -> None:
        self.cache = root / "images"
        self.clock, self.files = Clock(patch), FaultyFiles(root, patch)
        self.tag = 0
        self.tools: list[str] = []
        self.tool_fault: Fault | None = None
        self._resolves = resolves
        patch.setattr(program.signal, "signal", lambda *given: None)  # those of this process stay
        patch.setattr(enroot, "run_limited", self._ask)
        patch.setattr(enroot, "Child", self._start)

    def ask(self, *words: str) -> int:
        """Import; the exit code."""
        self.files.starts()
        return program.main(["--reference", REFERENCE, "--cache", str(self.cache), *words])

    def images(self) -> dict[str, bytes]:
        with self.files.aside():
            return {path.name: path.read_bytes() for path in self.cache.glob("*.sqsh")}

    def found(self) -> bytes | None:
        """The image that the reference stands for here."""
        with self.files.aside():
            file = find(REFERENCE, self.cache)
            return file.read_bytes() if file else None

    def _failing(self, command: list[str]) -> str | None:
        self.tools.append(" ".join(command[:2]))
        fault = self.tool_fault
        kind = fault.kind if fault and len(self.tools) - 1 == fault.at else None
        if kind == "missing":
            raise FileNotFoundError(2, "No such file or directory", command[0])
        if kind == "EACCES":
            raise PermissionError(13, "Permission denied", command[0])
        if kind == "EIO":
            raise OSError(5, "Input/output error", command[0])
        return kind

    def _ask(self, command: list[str], limit_s: float, environ: Any = None) -> subprocess.CompletedProcess[bytes]:
        kind = self._failing(command)
        if kind == "time-out":
            self.clock.sleep(limit_s)
            raise subprocess.TimeoutExpired(command, limit_s)
        said = f"{DIGESTS[self.tag]}\n".encode() if command[:2] == ["enroot", "digest"] else b"a\nb\n"
        if kind in ("garbage", "nothing"):
            said = b"\0\xff{" if kind == "garbage" else b""
        refused = kind == "refusal" or (command[:2] == ["enroot", "digest"] and not self._resolves)
        return subprocess.CompletedProcess(command, int(refused), said, b"no such command\n" if refused else b"")

    def _start(self, command: list[str], *given: Any, **options: Any) -> Import:
        kind = self._failing(command)
        if kind == "refusal":
            return Import(1)
        content = {"garbage": b"hsqs", "nothing": b""}.get(kind or "", image(self.tag))
        with self.files.aside():
            Path(command[3]).write_bytes(content[: 10 if kind == "time-out" else None])
        return Import(None if kind == "time-out" else 0)


class Import:
    """enroot, importing: it has ended, or never does."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def exit_code(self) -> int | None:
        return self._code

    def close(self) -> None:
        """Do nothing: the process has ended."""


def image(tag: int) -> bytes:
    return struct.pack("<4s36xQ", b"hsqs", 4096).ljust(4095, b"\0") + bytes([tag])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with pytest.MonkeyPatch.context() as patch:

        def make(resolves: bool = True) -> Node:
            patch.undo()
            shutil.rmtree(tmp_path / "root", ignore_errors=True)
            shutil.rmtree(tmp_path / "root.older", ignore_errors=True)
            (tmp_path / "root").mkdir()
            return Node(tmp_path / "root", patch, resolves)

        yield make


STATES = ("new", "known", "moved", "unresolved")
"""An import into an empty cache, of an existing image, of a tag that now stands for another image and is resolved
again, and by an enroot that cannot resolve tags."""


def begin(make: Callable[..., Node], state: str) -> Node:
    node = make(resolves=state != "unresolved")
    if state in ("known", "moved"):
        with node.files.aside():
            assert node.ask() == 0
            node.tag = 1  # a second import would get another one
    node.files.remember()
    node.tools.clear()
    node.files.operations.clear()
    return node


def problems_of(node: Node, state: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Problems after an import, and after the next one, in which nothing fails any more."""
    words = ("--refresh",) if state == "moved" else ()
    before = node.images()
    capsys.readouterr()
    code = node.ask(*words)
    said, after = capsys.readouterr(), node.images()
    wrong = [f"deleted: {name}" for name in before.keys() - after.keys()]
    wrong += [f"half done: {name}" for name, content in after.items() if len(content) != len(image(0))]
    wanted = image(node.tag) if state == "moved" else image(0)
    if code == 0:
        wrong += [] if after.get(Path(said.out.strip()).name) == node.found() == wanted else [f"{said.out!r} is wrong"]
    elif code != 1 or said.err.count("error: ") != 1:
        wrong.append(f"it ended with {code}: {said.err!r}")
    elif before and node.found() is None:
        wrong.append("the image of before is not found any more")
    node.files.fail(None)
    node.tool_fault = None
    if node.ask(*words) != 0 or node.found() != wanted:
        wrong.append("the next import fails")
    of_an_atomic_write = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
    left = [path.name for path in node.cache.glob(".*.tmp") if not of_an_atomic_write.fullmatch(path.name)]
    return wrong + [f"debris: {name}" for name in left]


def sweep(make: Callable[..., Node], state: str, capsys: Any, each: int | None, seconds: float) -> Tally:
    whole = begin(make, state)
    assert whole.ask(*(("--refresh",) if state == "moved" else ())) == 0
    seen, tally, problems = whole.files.operations, Tally(), []
    for fault in faults(seen, each, seconds):
        node = begin(make, state)
        node.files.fail(fault)
        problems += [f"{fault} ({seen[fault.at]}): {one}" for one in problems_of(node, state, capsys)]
        tally.count(fault, seen[fault.at].kind)
    assert not problems, "\n".join(problems[:20])
    assert tally.operations >= {"open", "read", "stat"} | ({"create", "rename", "lock"} if state != "known" else set())
    return tally


@pytest.mark.parametrize("state", STATES)
def test_an_import_outlasts_the_failure_of_an_operation_on_the_cache(make, capsys, record_property, state):
    sweep(make, state, capsys, 1, ONCE).report(f"import of a {state} image, once", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [ONCE, LONG_S])
@pytest.mark.parametrize("state", STATES)
def test_an_import_outlasts_every_fault_of_every_operation(make, capsys, record_property, state, seconds):
    tally = sweep(make, state, capsys, None, seconds)
    tally.report(f"import of a {state} image, for {seconds:.0f} s", record_property)


@pytest.mark.parametrize("state", STATES)
def test_an_import_outlasts_an_enroot_that_gives_no_answer_of_use(make, capsys, record_property, state):
    whole = begin(make, state)
    assert problems_of(whole, state, capsys) == []
    tally, problems = Tally(), []
    for at, tool in enumerate(whole.tools):
        for kind in TOOL_FAULTS:
            node, fault = begin(make, state), Fault(kind, at)
            node.tool_fault = fault
            problems += [f"{kind} of {tool}: {one}" for one in problems_of(node, state, capsys)]
            tally.count(fault, tool)
    tally.report(f"import of a {state} image", record_property)
    assert not problems, "\n".join(problems[:20])


def test_an_image_that_is_there_is_not_imported_again_for_a_moment_in_which_it_cannot_be_read(make):
    whole = begin(make, "known")
    assert whole.ask() == 0
    for fault in faults(whole.files.operations, None, MOMENT_S, without=OLDER):
        node = begin(make, "known")
        node.files.fail(fault)
        assert (node.ask(), node.tools) == (0, []), fault
