"""Calls on files fail, wait and fall short as the rules say, in every process that they hold for, and only until they
are taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_faults import CALLS, CHANGES, HOUR_S, Fail, hits, make, preloaded, set_faults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("kit") / "faults")


@pytest.fixture(autouse=True)
def _without_rules(kit: Path) -> None:
    set_faults(kit)


def told(kit: Path, code: str, *words: str | Path) -> str:
    """Return what a Python prints, or the name of the error that ends it."""
    program = f"""
import errno, os, sys
try:
{"".join(f"    {line}{chr(10)}" for line in code.strip().splitlines())}
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(
        command, env={**os.environ, **preloaded(kit)}, check=True, capture_output=True, text=True
    ).stdout.strip()


ACTS = {
    "open": "open(sys.argv[1])",
    "create": "open(sys.argv[1], 'a')",
    "read": "os.read(os.open(sys.argv[1], os.O_RDONLY), 9)",
    "write": "os.write(os.open(sys.argv[1], os.O_WRONLY), b'text')",
    "close": "os.close(os.open(sys.argv[1], os.O_RDONLY))",
    "fsync": "os.fsync(os.open(sys.argv[1], os.O_RDONLY))",
    "truncate": "os.truncate(sys.argv[1], 1)",
    "rename": "os.replace(sys.argv[1], sys.argv[1] + '.new')",
    "link": "os.link(sys.argv[1], sys.argv[1] + '.link')",
    "unlink": "os.unlink(sys.argv[1])",
    "mkdir": "os.mkdir(sys.argv[1] + '.folder')",
    "stat": "os.stat(sys.argv[1])",
    "list": "os.listdir(os.path.dirname(sys.argv[1]))",
    "lock": "import fcntl; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)",
}


def test_each_call_fails_alone_and_only_below_its_path(kit: Path, tmp_path: Path) -> None:
    assert set(ACTS) == set(CALLS)
    for call, act in ACTS.items():
        others = tuple(name for name in CALLS if name not in (call, "open", "create"))
        found = []
        for number, (path, calls) in enumerate([("here", (call,)), ("here", others), ("elsewhere*", (call,))]):
            file = tmp_path / f"{call}-{number}" / "here"
            file.parent.mkdir()
            file.write_text("content")
            set_faults(kit, [Fail(f"{tmp_path}/*-{number}*" if path == "here" else f"*/{path}", calls, "EIO")])
            found.append(told(kit, act, file))
        assert found == ["EIO", "", ""], call


def test_rules_end_while_a_process_runs(kit: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try: print(open(sys.argv[1]).read(), flush=True)\n"
        "    except OSError as error: print(error.errno, flush=True)"
    )
    file = tmp_path / "file"
    file.write_text("content")
    before = hits(kit)
    process = subprocess.Popen(
        [sys.executable, "-c", program, file],
        env={**os.environ, **preloaded(kit)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    said = []
    for rules in ([], [Fail(str(file), ("open",), "ESTALE")], []):
        set_faults(kit, rules)
        print(file=process.stdin, flush=True)
        said.append(process.stdout.readline().strip())
    process.stdin.close()
    assert process.wait(60) == 0
    assert said == ["content", "116", "content"]
    assert hits(kit) == before + 1


def test_children_and_programs_that_they_become_are_hit_too(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    set_faults(kit, [Fail(str(file), ("open",), "EIO")])
    code = "import subprocess; print(subprocess.run(['cat', sys.argv[1]], capture_output=True, text=True).stderr)"
    assert "Input/output error" in told(kit, code, file)


def test_rules_hold_for_hosts_and_commands(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    host, look = os.uname().nodename, "print(open(sys.argv[1]).read())"
    for rule in (
        Fail("*", ("open",), "EIO", host=f"not-{host}"),
        Fail("*", ("open",), "EIO", command="*rank_main*"),
    ):
        set_faults(kit, [rule])
        assert told(kit, look, file) == "content"
    set_faults(kit, [Fail(str(file), ("open",), "EIO", host=host, command=f"*{file.name}*")])
    assert told(kit, look, file) == "EIO"


def test_full_disk_refuses_changes_and_nothing_else(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    set_faults(kit, [Fail(f"{tmp_path}/*", CHANGES, "ENOSPC")])
    assert told(kit, "print(open(sys.argv[1]).read())", file) == "content"
    assert told(kit, "open(sys.argv[1], 'w')", tmp_path / "new") == "ENOSPC"
    assert told(kit, "os.unlink(sys.argv[1])", file) == ""


def test_writes_fall_short_and_are_continued(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    set_faults(kit, [Fail(str(file), ("write",), short=True)])
    written = "print(os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x' * 1000))"
    assert 1 <= int(told(kit, written, file)) < 1000
    file.unlink()
    told(kit, "open(sys.argv[1], 'w').write('x' * 1000)", file)
    assert file.read_text() == "x" * 1000


def test_calls_are_delayed(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    set_faults(kit, [Fail(str(file), ("stat",), delay_s=0.05)])
    code = "import time; t = time.monotonic()\nfor _ in range(20): os.stat(sys.argv[1])\nprint(time.monotonic() - t)"
    assert float(told(kit, code, file)) > 0.02, "twenty waits of at least a millisecond"


def test_chance_is_kept(kit: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    set_faults(kit, [Fail(str(file), ("stat",), "EIO", chance=0.3)], seed=7)
    code = "print(sum(not os.path.exists(sys.argv[1]) for _ in range(2000)))"
    assert 450 < int(told(kit, code, file)) < 750


def test_wall_clock_jumps_and_waits_do_not(kit: Path) -> None:
    code = """
import threading, time
print(time.time(), time.monotonic(), threading.Event().wait(0.01), __import__('queue').Queue)
"""
    real, monotonic = map(float, told(kit, code).split()[:2])
    for sign in (1, -1):
        set_faults(kit, clock_s=sign * 5 * HOUR_S)
        moved, later = map(float, told(kit, code).split()[:2])
        assert abs(moved - real - sign * 5 * HOUR_S) < HOUR_S
        assert 0 <= later - monotonic < HOUR_S
    set_faults(kit, clock_s=5 * HOUR_S, clock_host="elsewhere")
    assert abs(float(told(kit, code).split()[0]) - real) < HOUR_S


def test_library_does_nothing_without_its_file(tmp_path: Path, kit: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    for control in ("", str(tmp_path / "absent")):
        variables = {**os.environ, **preloaded(kit), "MRL_FILE_FAULTS": control}
        set_faults(kit, [Fail("*", CALLS, "EIO")])
        done = subprocess.run(["cat", file], env=variables, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "content")


def test_torch_computes_and_saves_under_it(kit: Path, tmp_path: Path) -> None:
    set_faults(kit, [Fail(f"{tmp_path}/*", ("write",), short=True, chance=0.5)])
    code = """
import torch
saved = torch.arange(100_000.0)
torch.save(saved, sys.argv[1])
print(torch.equal(torch.load(sys.argv[1]), saved))
"""
    assert told(kit, code, tmp_path / "tensor") == "True"
