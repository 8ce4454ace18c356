"""Supervision of one run of a program, in a separate process.

It starts the program in a new session and its own working directory, reads its output, and ends it when it exceeds
its limit, when the connection to the rank closes, or when the nursery ends. All processes that the program leaves
behind become children of the supervisor, which ends them before it reports.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_rl.agent.environments.program.nursery_wire import (
    ENDING_BYTES,
    OUTPUT_CHARACTERS,
    PreparedProgram,
    ProgramEnd,
    ProgramJob,
    Rollout,
    place,
)
from megatron_rl.agent.sandbox.container import PATH, CannotContain, ProgramContainer, become_contained
from megatron_rl.contract.children import adopt_orphans, collect, death_with_parent, end_descendants, yield_memory
from megatron_rl.rank.processes.guard import END
from megatron_rl.rank.processes.printed import LastBytes

END_S = 5.0
"""Seconds for the kernel to end killed processes; one that hangs in a file system may need longer."""
CHUNK = 2**16


def be_program(
    job: ProgramJob, program: PreparedProgram, folder: Path, supervisor: int, output: tuple[int, int], report: int
) -> NoReturn:
    """Become the program of a job.

    Args:
        supervisor: process id of the parent, with which the program ends.
        output: files of its standard output and error output.
        report: file for the result of a function, or for the reason why the program cannot be started.
    """
    code = 1
    try:
        death_with_parent(supervisor)()
        yield_memory()  # not the rank, which loses far more
        _enter(job, folder, output, contained=program.container is not None)
        if program.container is not None and program.command is not None:
            _be_contained(job, program, program.container, folder, report)
        elif program.command is not None:
            _execute(program.command, report)
        else:
            assert program.rollout is not None  # one of both is given
            code = _call(program.rollout, job, report)
    except BaseException:  # noqa: BLE001 - no error may return into the supervisor's code
        traceback.print_exc()
    finally:
        os._exit(code)


def client() -> Any:
    import openai

    # The endpoint speaks plain HTTP and answers after training: the limit of the run bounds a call.
    http = openai.DefaultAsyncHttpxClient(timeout=None, verify=False, trust_env=False)
    return openai.AsyncOpenAI(timeout=None, http_client=http)


def _enter(job: ProgramJob, folder: Path, output: tuple[int, int], *, contained: bool) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for each in (signal.SIGCHLD, signal.SIGTERM):  # other signals to the ranks stay ignored
        signal.signal(each, signal.SIG_DFL)
    for number, file in enumerate(output, 1):
        os.dup2(file, number)
        os.close(file)
    with _input(folder, contained=contained) as problem:
        problem.write(f"{job.problem}\n".encode())
        problem.seek(0)
        if contained:
            fcntl.fcntl(problem, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.dup2(problem.fileno(), 0)
    os.chdir(folder)
    os.environ.update(job.variables)


def _input(folder: Path, *, contained: bool) -> IO[bytes]:
    """Return a file without a name. A container must not get one of the node's disk, which it could fill by writing to
    its own standard input."""
    if contained:
        return os.fdopen(os.memfd_create("problem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0)
    return tempfile.TemporaryFile(dir=folder)


def _execute(command: list[str], report: int) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(report, json.dumps({"unstarted": f"{command[0]}: {error.strerror or error}"}).encode())


def _be_contained(
    job: ProgramJob, program: PreparedProgram, container: ProgramContainer, folder: Path, report: int
) -> NoReturn:
    def run() -> NoReturn:
        os.environ.clear()
        os.environ.update({"PATH": PATH, "HOME": "/root", **image_variables(), **program.variables, **job.variables})
        _execute(program.command or [], report)
        os._exit(1)

    def exceeded(limit: str) -> None:
        os.write(report, json.dumps({"exceeded": limit}).encode())

    try:
        become_contained(container, folder, job.reaches, run, exceeded)
    except CannotContain as error:
        os.write(report, json.dumps({"unstarted": f"its container: {error}"}).encode())
        os._exit(1)


def image_variables() -> dict[str, str]:
    """Return the variables that the image sets: NAME=VALUE lines of /etc/environment, where enroot writes them."""
    try:
        lines = Path("/etc/environment").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip().strip("'\"") for name, given, value in pairs if given and name.strip()}


def _call(rollout: Rollout, job: ProgramJob, report: int) -> int:
    async def rolled_out() -> Any:
        async with client() as connected:
            returned: Awaitable[Any] = rollout(connected, json.loads(job.problem))
            return await returned

    code = 0
    try:
        text = json.dumps({"returned": asyncio.run(rolled_out())}, default=float)
        if len(text) > ENDING_BYTES:
            raise ValueError(f"a result of {len(text):,} characters: at most {ENDING_BYTES:,} are possible")
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        traceback.print_exc()
        text, code = json.dumps({"raised": f"{type(error).__name__}{place(error)}"}), 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(report, text.encode())
    return code


class ProgramRun:
    def __init__(self, job: ProgramJob, program: PreparedProgram, private: Sequence[int]) -> None:
        """Start the program. private: open files that it must not inherit."""
        self.code: int | None = None
        self._folder = tempfile.mkdtemp(dir=program.folder)
        try:
            for name, content in program.files.items():
                file = Path(self._folder, name)
                file.write_bytes(content)
                file.chmod(0o700)
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._ending, self._output, self._report = (
            LastBytes(ENDING_BYTES),
            LastBytes(4 * OUTPUT_CHARACTERS),
            LastBytes(ENDING_BYTES),
        )
        output, errors, report = os.pipe(), os.pipe(), os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for file_number in (*private, output[0], errors[0], report[0]):
                os.close(file_number)
            be_program(job, program, Path(self._folder), supervisor, (output[1], errors[1]), report[1])
        for readable, writable in (output, errors, report):
            os.close(writable)
            os.set_blocking(readable, False)
        self.pipes: dict[int, tuple[LastBytes, ...]] = {
            output[0]: (self._ending, self._output),
            errors[0]: (self._output,),
            report[0]: (self._report,),
        }
        """Pipes that are still open, with what is kept of each."""

    def read(self, pipe: int) -> bool:
        """Read a part of what a pipe holds; return whether it may hold more. A pipe that has ended is closed."""
        try:
            part = os.read(pipe, CHUNK)
        except BlockingIOError:
            return False
        for tail in self.pipes[pipe] if part else ():
            tail.add(part)
        if not part:
            os.close(pipe)
            del self.pipes[pipe]
        return bool(part)

    def reap(self) -> None:
        if (code := collect(self.pid)) is not None:
            self.code = code

    def ask_to_end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)

    def end_all(self) -> None:
        end_descendants(END_S, self.reap)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ended(self, over_limit: bool) -> ProgramEnd:
        for pipe in list(self.pipes):
            while self.read(pipe):
                pass
        code = -signal.SIGKILL if self.code is None else self.code
        output = self._output.text()[-OUTPUT_CHARACTERS:]
        return ProgramEnd(code, over_limit, self._ending.text(), output, **json.loads(self._report.text() or "{}"))


def supervise(connection: socket.socket, program: PreparedProgram, private: Sequence[int] = ()) -> None:
    """Serve one connection. END asks it to end the program, as a closed connection does.

    private: further open files that the program must not inherit.
    """
    adopt_orphans()
    with connection.makefile("rb") as arriving:
        job = ProgramJob(*json.loads(arriving.readline()))
    wakes, woken = os.pipe()  # gets the number of a signal: a child has ended, or END
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for each in (signal.SIGCHLD, END):
        signal.signal(each, lambda *_: None)
    deadline = time.monotonic() + job.limit_s
    try:
        run = ProgramRun(job, program, private=(connection.fileno(), wakes, woken, *private))
    except OSError as error:  # such as a full disk
        ended = ProgramEnd(1, unstarted=f"{error.filename or program.folder}: {error.strerror or error}")
        connection.sendall(json.dumps(ended).encode())
        return
    over_limit = abandoned = stopping = False
    try:
        with selectors.DefaultSelector() as waiting:
            for file in (connection.fileno(), wakes, *run.pipes):
                waiting.register(file, selectors.EVENT_READ)
            # One wait serves all ends of a run. The program ends: SIGCHLD writes a byte to `wakes`, and `reap` sets
            # the code. The rank gives up: its end of the connection closes, which is all that is ever read from it. The
            # nursery ends: END writes a byte to `wakes`. The limit passes: the wait returns with nothing. Each of the
            # last three asks the program to end and sets a new deadline, after which the loop leaves it to `end_all`.
            # Output is read all the while, since a program blocks on a pipe that is full.
            while run.code is None:
                for key, _ in waiting.select(max(0.0, deadline - time.monotonic())):
                    if key.fd == wakes:
                        abandoned |= END in os.read(wakes, CHUNK)
                        run.reap()
                    elif key.fd == connection.fileno():
                        abandoned = True
                        waiting.unregister(connection.fileno())
                    else:
                        run.read(key.fd)
                        if key.fd not in run.pipes:
                            waiting.unregister(key.fd)
                late = time.monotonic() >= deadline
                if stopping and late:
                    break
                if not stopping and (late or abandoned):
                    stopping, over_limit, deadline = True, late, time.monotonic() + job.grace_s
                    run.ask_to_end()
    finally:
        run.end_all()
    if not abandoned:
        with suppress(OSError):
            connection.sendall(json.dumps(run.ended(over_limit)).encode())
