"""Code of the process that becomes a program: a command is executed, a function is called."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.contract.children import death_with_parent, yield_memory
from megatron_rl.environments.program.nursery_wire import ENDING_BYTES, ProgramJob
from megatron_rl.environments.program.prepared import PreparedProgram, Rollout, client, place


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
        _enter(job, folder, output)
        if program.command is not None:
            _execute(program.command, report)
        else:
            assert program.rollout is not None  # one of both is given
            code = _call(program.rollout, job, report)
    except BaseException:  # noqa: BLE001 - no error may return into the supervisor's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter(job: ProgramJob, folder: Path, output: tuple[int, int]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for each in (signal.SIGCHLD, signal.SIGTERM):  # other signals to the ranks stay ignored
        signal.signal(each, signal.SIG_DFL)
    for number, file in enumerate(output, 1):
        os.dup2(file, number)
        os.close(file)
    with tempfile.TemporaryFile(dir=folder) as problem:
        problem.write(f"{job.problem}\n".encode())
        problem.seek(0)
        os.dup2(problem.fileno(), 0)
    os.chdir(folder)
    os.environ.update(job.variables)


def _execute(command: list[str], report: int) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(report, json.dumps({"unstarted": f"{command[0]}: {error.strerror or error}"}).encode())


def _call(rollout: Rollout, job: ProgramJob, report: int) -> int:
    """Call a function and report its result; return the exit code."""

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
