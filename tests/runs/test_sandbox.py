"""Requests to a sandbox may hang, grow, crash or be hostile: only that answer is lost, with a reason."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rl.agent.sandbox import confined_process
from megatron_rl.agent.sandbox.limits import Ending, ProcessLimits, ProcessResult
from megatron_rl.agent.sandbox.process_pools import ProgramPool, WorkerPool

LIMITS = ProcessLimits(wall_s=60.0, cpu_s=20, memory_bytes=2**29, output_bytes=2**20)
SHORT = ProcessLimits(wall_s=0.5, cpu_s=20, memory_bytes=2**29, output_bytes=2**20)


@pytest.fixture(scope="module")
def programs() -> Iterator[ProgramPool]:
    pool = ProgramPool(processes=2)
    yield pool
    pool.close()


def run(programs: ProgramPool, source: str, standard_input: str = "", limits: ProcessLimits = LIMITS) -> ProcessResult:
    return asyncio.run(programs.run(source, standard_input, limits))


def test_program_reads_its_input_and_its_output_is_the_answer(programs: ProgramPool) -> None:
    source = "import sys\nprint(sum(map(int, input().split())), len(sys.stdin.read()))"
    assert run(programs, source, "3 4\n" + "x" * 200_000) == ProcessResult(Ending.OK, "7 200000\n")


@pytest.mark.parametrize(
    "source",
    [
        "def add(a, b): return (a + b, [b])",
        "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        print('not the answer')\n"
        "        return a + b, [b]",
    ],
)
def test_function_returns_its_answer(programs: ProgramPool, source: str) -> None:
    assert asyncio.run(programs.call(source, "add", [1, 2], LIMITS)) == ProcessResult(Ending.OK, [3, [2]])


HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", Ending.ERROR, "Operation not permitted"),
    "memory hog": ("x = bytearray(2**40)", Ending.ERROR, "MemoryError"),
    "slow hog": ("x = []\nwhile True: x.append(bytearray(2**24))", Ending.ERROR, "MemoryError"),
    "10 GB of output": ("while True: print('x' * 2**16)", Ending.WRONG_FORMAT, "more than 1048576 bytes"),
    "10 GB of errors": ("import sys\nwhile True: sys.stderr.write('x' * 2**16)", Ending.WRONG_FORMAT, "more than"),
    "sleeps": ("import time; time.sleep(1e6)", Ending.TIME_OUT, "more than 0.5 s"),
    "closes its output and goes on": (
        "import os, time; [os.close(file) for file in (0, 1, 2)]; time.sleep(1e6)", Ending.TIME_OUT, "more than 0.5 s"
    ),
    "endless loop": (
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        Ending.TIME_OUT,
        "more than 1 s of processor time",
    ),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 1))", Ending.ERROR, "Operation not permitted"),
    "kills its owner": ("import os; os.kill(os.getppid(), 0)", Ending.ERROR, "Operation not permitted"),
    "kills everybody": ("import os; os.kill(-1, 0)", Ending.ERROR, "Operation not permitted"),
    "outlives its owner": (
        "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0, 'refused'", Ending.ERROR, "refused"
    ),
    "leaves its group": ("import os; os.setsid()", Ending.ERROR, "Operation not permitted"),
    "writes a file": ("open('/tmp/mrl-was-here', 'w')", Ending.ERROR, "Operation not permitted"),
    "removes its owner's files": ("import os; os.unlink('/tmp/mrl-was-here')", Ending.ERROR, "Operation not permitted"),
    "changes its user": (
        "import os; os.setresuid(os.getuid(), os.getuid(), os.getuid())", Ending.ERROR, "Operation not permitted"
    ),
    "locks its owner's files": (
        "import fcntl; fcntl.flock(open('/etc/passwd'), fcntl.LOCK_SH)", Ending.ERROR, "Operation not permitted"
    ),
    "locks a range of its owner's files": (
        "import fcntl; fcntl.lockf(open('/etc/passwd'), fcntl.LOCK_SH)", Ending.ERROR, "Operation not permitted"
    ),
    "is told by a signal of each key": (
        "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)", Ending.ERROR, "Operation not permitted"
    ),
    "calls what is newer than the filter": (
        "import ctypes; assert ctypes.CDLL(None, use_errno=True).syscall(463, 0, 0, 0, 0, 0) == 0, ctypes.get_errno()",
        Ending.ERROR,
        str(errno.ENOSYS),
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", Ending.ERROR, "SIGSEGV"),
    "no program": ("def (", Ending.ERROR, "SyntaxError"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_loses_only_its_own_answer(programs: ProgramPool, name: str) -> None:
    source, ending, detail = HOSTILE[name]
    limits = SHORT if "0.5 s" in detail else LIMITS
    if "processor" in detail:
        limits = ProcessLimits(wall_s=120.0, cpu_s=1, memory_bytes=2**29)
    outcome = run(programs, source, limits=limits)
    assert outcome.ending is ending and detail in outcome.detail, str(outcome)


SIGNALS = {
    "kill": "os.kill(victim, 9)",
    "owner of a pipe": """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, victim)
fcntl.fcntl(r, fcntl.F_SETSIG, 9)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")""",
    "owner of a pipe, by its kind": """
r, w = os.pipe()
fcntl.fcntl(r, 15, struct.pack("ii", 1, victim))  # F_SETOWN_EX, F_OWNER_PID
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")""",
    "owner of a socket": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack("i", victim))  # FIOSETOWN
fcntl.ioctl(a, 0x5452, struct.pack("i", 1))  # FIOASYNC
b.send(b"x")""",
    "process group of a socket": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8902, struct.pack("i", -victim))  # SIOCSPGRP
fcntl.ioctl(a, 0x5452, struct.pack("i", 1))  # FIOASYNC
b.send(b"x")""",
    "command with bits that the kernel ignores": """
r, w = os.pipe()
command = ctypes.c_ulong(2**32 + fcntl.F_SETOWN)
number = {"x86_64": 72, "aarch64": 25}[os.uname().machine]
if ctypes.CDLL(None, use_errno=True).syscall(number, r, command, victim) < 0:
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")""",
}


@pytest.mark.parametrize("name", SIGNALS)
def test_no_signal_of_a_program_reaches_another_process(programs: ProgramPool, name: str) -> None:
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        source = f"import ctypes, fcntl, os, socket, struct\nvictim = {victim.pid}\n{SIGNALS[name]}"
        outcome = run(programs, source)
        assert victim.poll() is None
        assert outcome.ending is Ending.ERROR and "Operation not permitted" in outcome.detail, str(outcome)
    finally:
        victim.kill()
        victim.wait()


def test_a_program_takes_nothing_from_a_pipe_of_another_process(programs: ProgramPool) -> None:
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("the kernel has no Landlock")
    read, write = os.pipe()
    os.write(write, b"answer")
    try:
        outcome = run(programs, f"import os; os.read(os.open('/proc/{os.getpid()}/fd/{read}', os.O_RDONLY), 6)")
        assert outcome.ending is Ending.ERROR and "Permission denied" in outcome.detail, str(outcome)
        os.set_blocking(read, False)
        assert os.read(read, 9) == b"answer"
    finally:
        os.close(read)
        os.close(write)


def test_output_that_another_process_has_taken_ends_nothing(
    programs: ProgramPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, read = [], os.read

    def late(file: int, size: int) -> bytes:
        if not taken and not os.get_blocking(file):
            taken.append(file)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return read(file, size)

    monkeypatch.setattr(confined_process.os, "read", late)
    assert run(programs, "print(1)") == ProcessResult(Ending.OK, "1\n") and taken


SHARED = {
    "removes a segment": "libc.shmctl(segment, 0, None)",
    "writes a segment": "libc.shmat(segment, None, 0)",
    "removes a semaphore": "libc.semctl(semaphore, 0, 0)",
    "waits for a semaphore": "libc.semop(semaphore, struct.pack('HhH', 0, 1, 0), 1)",
    "removes a queue": "libc.msgctl(queue, 0, None)",
    "reads a queue": "libc.msgrcv(queue, ctypes.create_string_buffer(16), 8, 0, 0o4000)",
}


@pytest.mark.parametrize("name", SHARED)
def test_a_program_reaches_no_shared_object_of_its_user(programs: ProgramPool, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    segment, semaphore, queue = libc.shmget(0, 4096, 0o600), libc.semget(0, 1, 0o600), libc.msgget(0, 0o600)
    assert min(segment, semaphore, queue) >= 0 and libc.msgsnd(queue, struct.pack("l8s", 1, b"message"), 8, 0) == 0
    try:
        given = f"segment, semaphore, queue = {segment}, {semaphore}, {queue}"
        attack = f"if {SHARED[name]} == -1: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
        source = f"import ctypes, os, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n{given}\n{attack}"
        outcome = run(programs, source)
        assert outcome.ending is Ending.ERROR and "Operation not permitted" in outcome.detail, str(outcome)
    finally:
        removed = [libc.shmctl(segment, 0, None), libc.semctl(semaphore, 0, 0), libc.msgctl(queue, 0, None)]
    assert removed == [0, 0, 0]


USEFUL = {
    "asks for a terminal": ("import os, shutil; print(os.isatty(0), shutil.get_terminal_size()[0] > 0)", "False True"),
    "sets flags of files": (
        "import fcntl, os; r, w = os.pipe(); os.set_inheritable(r, True); os.set_blocking(r, False)\n"
        "fcntl.fcntl(w, fcntl.F_SETFL, fcntl.fcntl(w, fcntl.F_GETFL) | os.O_NONBLOCK); print(os.get_blocking(w))",
        "False",
    ),
    "copies files": ("import fcntl, os; print(os.dup2(0, 20), fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 30))", "20 30"),
    "runs coroutines and threads": (
        "import asyncio\nasync def f(): return await asyncio.to_thread(sum, [1, 2])\nprint(asyncio.run(f()))",
        "3",
    ),
}


@pytest.mark.parametrize("name", USEFUL)
def test_a_harmless_program_notices_nothing(programs: ProgramPool, name: str) -> None:
    source, output = USEFUL[name]
    assert run(programs, source) == ProcessResult(Ending.OK, f"{output}\n")


def test_result_of_a_function_is_never_unpickled(programs: ProgramPool) -> None:
    source = "import os\nclass E:\n    def __reduce__(self): return os.system, ('id',)\ndef f(): return E()"
    outcome = asyncio.run(programs.call(source, "f", [], LIMITS))
    assert outcome == ProcessResult(
        Ending.WRONG_FORMAT, detail="E cannot be written as JSON: Object of type E is not JSON serializable"
    )


@pytest.mark.parametrize(
    "reply", [b"\x80\x04cos\nsystem\n", b"[" * 50_000, b'["king", 1]', b'["killed", ""]', b"7", b""]
)
def test_forged_reply_of_a_program_is_accepted_only_as_json(programs: ProgramPool, reply: bytes) -> None:
    source = f"""
import os
def f():
    for file in range(1, 9):
        try: os.write(file, {reply!r})
        except OSError: pass
    os._exit(0)
"""
    assert asyncio.run(programs.call(source, "f", [], LIMITS)).ending is Ending.WRONG_FORMAT


def test_program_killed_from_outside_is_not_wrong(programs: ProgramPool) -> None:
    async def kill() -> ProcessResult:
        running = asyncio.ensure_future(programs.run("import time; time.sleep(1e6)", "", LIMITS))
        while not programs._running:
            await asyncio.sleep(0.01)
        (process,) = programs._running
        os.kill(process.pid, signal.SIGKILL)
        return await running

    outcome = asyncio.run(kill())
    assert outcome.ending is Ending.KILLED


def test_abandoned_program_is_killed(programs: ProgramPool) -> None:
    """A leaving rank must not wait for it."""

    async def leave() -> None:
        running = asyncio.ensure_future(programs.run("import time; time.sleep(1e6)", "", LIMITS))
        while not programs._running:
            await asyncio.sleep(0.01)
        (process,) = programs._running
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)

    asyncio.run(leave())


def test_endless_regular_expression_loses_its_answer() -> None:
    """The C code of a verifier, which no exception interrupts."""
    pool = WorkerPool("sandbox_functions:backtracks", 1, ProcessLimits(wall_s=1.0, cpu_s=60, memory_bytes=2**29))

    async def ask() -> list[ProcessResult]:
        return [await pool.ask("a" * length) for length in (3, 60, 3)]

    first, second, third = asyncio.run(ask())
    pool.close()
    assert first == third == ProcessResult(Ending.OK, False)
    assert second == ProcessResult(Ending.TIME_OUT, detail="no answer within 1 s")


@pytest.mark.parametrize(
    ("request_", "ending", "detail"),
    [
        ("raise", Ending.ERROR, "ZeroDivisionError"),
        ("set", Ending.WRONG_FORMAT, "set cannot be written as JSON"),
        ("grow", Ending.MEMORY_LIMIT, "more than 0.5 GiB"),
        ("long", Ending.WRONG_FORMAT, "more than 1048576 bytes"),
    ],
)
def test_failure_of_a_worker_is_classified_and_the_next_request_answered(
    worker: WorkerPool, request_: str, ending: Ending, detail: str
) -> None:
    async def ask() -> tuple[ProcessResult, ProcessResult]:
        return await worker.ask(request_), await worker.ask("pid")

    failed, after = asyncio.run(ask())
    assert failed.ending is ending and detail in failed.detail, str(failed)
    assert after.ending is Ending.OK


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerPool]:
    pool = WorkerPool("sandbox_functions:answer", 1, LIMITS)
    yield pool
    pool.close()


def test_worker_is_reused(worker: WorkerPool) -> None:
    async def ask() -> set[int]:
        return {(await worker.ask("pid")).value for _ in range(3)}

    assert len(asyncio.run(ask())) == 1


def test_worker_changes_no_flag_of_the_log_of_its_owner(worker: WorkerPool) -> None:
    """Prints of the owner would fail where it does not wait for a full pipe."""
    assert os.get_blocking(2)
    assert asyncio.run(worker.ask("does not wait")) == ProcessResult(Ending.OK, 0)
    blocking = os.get_blocking(2)
    os.set_blocking(2, True)
    assert blocking


def test_worker_sees_no_secret_of_its_owner(worker: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    pool = WorkerPool("sandbox_functions:answer", 1, LIMITS)
    names = asyncio.run(pool.ask("environment")).value
    pool.close()
    assert "PATH" in names and "WANDB_API_KEY" not in names


def test_network_is_removed_without_system_call_filter_or_the_log_warns() -> None:
    program = """
import resource, socket
from megatron_rl.agent.sandbox import confine
confine.MACHINES.clear()
print(confine.confine())
print(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
try:
    socket.create_connection(("127.0.0.1", 9), 5.0)
except OSError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    missing, file_size, error = run.stdout.splitlines()
    assert "no filter of system calls" in missing and "changing files" in missing and file_size == "0"
    assert "the network" in missing or "unreachable" in error
