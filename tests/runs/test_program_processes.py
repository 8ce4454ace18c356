"""Processes of programs: what a program finds, how its end is reported, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from megatron_rl.agent.endpoint.agent import RolloutLost
from megatron_rl.agent.environments.program.nursery import _serve
from megatron_rl.agent.environments.program.nursery_wire import PreparedProgram, Program, ProgramEnd, ProgramJob
from megatron_rl.agent.environments.program.runner import ProgramRunner
from megatron_rl.recipe.errors import ConfigurationError

Result = TypeVar("Result")

VARIABLES = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "COLOUR": "blue"}


def job(problem: object = None, limit_s: float = 60.0, **variables: str) -> ProgramJob:
    return ProgramJob(json.dumps(problem), variables, limit_s, grace_s=0.3)


def with_runner(program: Program, work: Callable[[ProgramRunner], Awaitable[Result]]) -> Result:
    async def whole() -> Result:
        runner = ProgramRunner(program, VARIABLES)
        try:
            return await work(runner)
        finally:
            await runner.close()

    return asyncio.run(whole())


def python(tmp_path: Path, source: str, name: str = "agent.py") -> Program:
    """Command that runs a Python file."""
    file = tmp_path / name
    file.write_text(textwrap.dedent(source))
    return Program([sys.executable, name], None, [str(file)])


def run(program: Program, given: ProgramJob | None = None) -> ProgramEnd:
    return with_runner(program, lambda runner: runner.run(given or job()))


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def appears(file: Path, limit_s: float = 30.0) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if file.exists() and (content := file.read_text()):
            return content
        time.sleep(0.01)
    raise TimeoutError(f"{file} did not appear")


def test_a_command_gets_the_problem_its_variables_and_a_clean_folder_with_its_code(tmp_path: Path) -> None:
    program = python(
        tmp_path,
        """
        import json, os, sys
        print(json.dumps({
            "problem": json.loads(sys.stdin.readline()), "rest": sys.stdin.read(), "files": os.listdir(),
            "folder": os.getcwd(), "variables": {name: os.environ.get(name) for name in ("COLOUR", "KEY", "HOME")},
            "leads": os.getsid(0) == os.getpid(),
        }))
        """,
    )
    found = json.loads(run(program, job({"prompt": "1+1=\n", "answer": 2}, KEY="secret")).ending)
    folder = Path(found.pop("folder"))
    assert found == {
        "problem": {"prompt": "1+1=\n", "answer": 2},
        "rest": "",
        "files": ["agent.py"],
        "variables": {"COLOUR": "blue", "KEY": "secret", "HOME": None},
        "leads": True,
    }
    assert not folder.exists() and not folder.parent.exists()


def test_a_shell_script_of_the_code_is_executable(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("#!/bin/sh\nread -r problem\necho problem: $problem >&2\necho 0.5\n")
    ended = run(Program(["./agent.sh"], None, [str(tmp_path / "agent.sh")]), job({"a": 1}))
    assert (ended.code, ended.ending) == (0, "0.5\n")
    assert sorted(ended.output.splitlines()) == ["0.5", 'problem: {"a": 1}']  # two pipes, read when both have something


def test_of_ten_megabytes_of_output_the_end_is_kept(tmp_path: Path) -> None:
    program = python(tmp_path, "print('x' * 10_000_000)\nprint(1.0)")
    ended = run(program)
    assert ended.code == 0 and ended.ending.endswith("x\n1.0\n")
    assert len(ended.output) == 4000 and len(ended.ending) < 2**16


def test_a_program_over_its_limit_is_asked_to_end_and_then_killed(tmp_path: Path) -> None:
    program = python(
        tmp_path,
        """
        import signal, sys, time
        if "stubborn" in sys.stdin.read():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("begun", flush=True)
        time.sleep(600)
        """,
    )

    async def both(runner: ProgramRunner) -> list[ProgramEnd]:
        return await asyncio.gather(*(runner.run(job(kind, limit_s=1.5)) for kind in ("obedient", "stubborn")))

    obedient, stubborn = with_runner(program, both)
    assert (obedient.code, obedient.over_limit, obedient.ending) == (-signal.SIGTERM, True, "begun\n")
    assert (stubborn.code, stubborn.over_limit, stubborn.ending) == (-signal.SIGKILL, True, "begun\n")


STAYS = """
    import os, pathlib, subprocess, sys, time
    daemon = subprocess.Popen([sys.executable, "-c", "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
        "open(%r, 'w').write(str(os.getpid()))\\ntime.sleep(600)"])
    daemon.wait()
    while not os.path.exists(%r) or not open(%r).read(): time.sleep(0.01)
    %s
"""


def staying(tmp_path: Path, then: str) -> tuple[Program, Path]:
    """A program that starts a daemon, which writes its process id to the file."""
    file = tmp_path / "daemon.pid"
    return python(tmp_path, STAYS % (str(file), str(file), str(file), then)), file


def test_a_process_that_the_program_leaves_behind_is_killed_before_its_end_is_reported(tmp_path: Path) -> None:
    program, file = staying(tmp_path, "print(1.0)")
    ended = run(program)
    assert (ended.code, ended.ending) == (0, "1.0\n")
    assert gone(int(file.read_text()), limit_s=0.1)


def test_cancelling_a_run_ends_its_program_and_all_that_it_started(tmp_path: Path) -> None:
    program, file = staying(tmp_path, "time.sleep(600)")

    async def cancel(runner: ProgramRunner) -> None:
        task = asyncio.create_task(runner.run(job()))
        pid = int(await asyncio.to_thread(appears, file))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gone, pid)

    with_runner(program, cancel)


def test_a_killed_supervisor_loses_its_run_alone_and_leaves_no_process(tmp_path: Path) -> None:
    program, file = staying(tmp_path, "os.kill(os.getppid(), 9) if sys.stdin.read()[0] == '1' else print(0.0)")

    async def twice(runner: ProgramRunner) -> ProgramEnd:
        with pytest.raises(RolloutLost, match="was killed"):
            await runner.run(job(1))
        assert await asyncio.to_thread(gone, int(file.read_text()))
        return await runner.run(job(0))

    assert with_runner(program, twice).ending == "0.0\n"


def test_a_killed_nursery_is_started_again(tmp_path: Path) -> None:
    program = python(tmp_path, "import os\nprint(os.getppid(), os.popen('ps -o ppid= ' + str(os.getppid())).read())")

    async def kill(runner: ProgramRunner) -> ProgramEnd:
        supervisor, nursery = map(int, (await runner.run(job())).ending.split())
        assert gone(supervisor)
        os.kill(nursery, signal.SIGKILL)
        assert await asyncio.to_thread(gone, nursery)
        return await runner.run(job())

    assert with_runner(program, kill).code == 0


@pytest.mark.parametrize("follows", ["another run", "the end"])
@pytest.mark.parametrize("lost", ["nursery", "folder"])
def test_what_a_program_started_ends_with_its_nursery(tmp_path: Path, lost: str, follows: str) -> None:
    program, file = staying(tmp_path, "time.sleep(600) if sys.stdin.read()[0] == '1' else print(0.0)")

    async def lose(runner: ProgramRunner) -> None:
        running = asyncio.create_task(runner.run(job(1)))
        daemon = int(await asyncio.to_thread(appears, file))
        assert runner._nursery is not None and runner._folder is not None
        if lost == "nursery":
            os.kill(runner._nursery.pid, signal.SIGKILL)
            assert await asyncio.to_thread(gone, runner._nursery.pid)
        else:
            shutil.rmtree(runner._folder.path)
        if follows == "another run":
            assert (await runner.run(job(0))).code == 0
        else:
            await runner.close()
        assert gone(daemon, limit_s=0.1)
        with pytest.raises(RolloutLost):
            await running

    with_runner(program, lose)


RANK = """
import asyncio, json, sys
from megatron_rl.agent.environments.program.runner import ProgramRunner
from megatron_rl.agent.environments.program.nursery_wire import Program, ProgramJob

async def main():
    program = Program(*json.loads(sys.argv[1]))
    runner = ProgramRunner(program, {"PATH": "/usr/bin:/bin", "PYTHONPATH": sys.argv[2]})
    await runner.run(ProgramJob("{}", {}, 600, 0.3))

asyncio.run(main())
"""


def test_programs_end_with_a_killed_rank(tmp_path: Path) -> None:
    program, file = staying(tmp_path, "time.sleep(600)")
    rank = subprocess.Popen([sys.executable, "-c", RANK, json.dumps(program), os.pathsep.join(sys.path)])
    try:
        pid = int(appears(file))
        family = psutil.Process(rank.pid).children(recursive=True)
        assert len(family) >= 3 and pid in {process.pid for process in family}  # nursery, supervisor, program
    finally:
        rank.kill()
        rank.wait()
    assert all(gone(process.pid) for process in family if process.is_running())


def test_a_command_that_cannot_be_executed_says_why(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("no interpreter")
    ended = run(Program(["./agent"], None, [str(tmp_path / "agent")]))
    assert ended.unstarted == "./agent: Exec format error"


FUNCTIONS = """
    import os
    from dataclasses import dataclass

    class Third(float): ...

    async def rollout(client, problem):
        print("asked", os.environ["OPENAI_MODEL"], str(client.base_url))
        match problem:
            case "number": return 1
            case "mapping": return {"reward": Third(0.25), "calls": 2}
            case "nothing": return None
            case "raises": return {}["x"]
            case "exits": raise SystemExit(3)
            case "object": return object()
            case "long": return {"reward": 1.0, "note": "x" * 100_000}
            case "shares":
                os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
                return len(os.environ["SEEN"])
"""
SESSION = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "policy"}


def test_a_function_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    kinds = ["number", "mapping", "nothing", "raises", "exits", "object", "long", "shares", "shares"]

    async def all_kinds(runner: ProgramRunner) -> list[ProgramEnd]:
        return await asyncio.gather(*(runner.run(job(kind, **SESSION)) for kind in kinds))

    number, mapping, nothing, raises, exits, whole, long, *shares = with_runner(
        Program(None, "functions:rollout", [str(file)]), all_kinds
    )
    assert (number.code, number.returned, number.output) == (0, 1, "asked policy http://127.0.0.1:9/v1/\n")
    assert mapping.returned == {"reward": 0.25, "calls": 2}
    assert (nothing.code, nothing.returned) == (0, None)
    assert (raises.code, raises.raised) == (1, "KeyError (functions.py:13)")
    assert "Traceback" in raises.output
    assert exits.raised == "SystemExit (functions.py:14)"
    assert whole.raised == "TypeError"
    assert "ValueError: a result of 100,0" in long.output
    assert [each.returned for each in shares] == [1, 1]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each test leaves no working directory."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("", "absent_module:rollout", "cannot be imported: ModuleNotFoundError: No module named 'absent_module'"),
        ("1 / 0", "agent:rollout", r"cannot be imported: ZeroDivisionError: division by zero \(agent.py:1\)"),
        ("import sys; sys.exit(2)", "agent:rollout", "cannot be imported: SystemExit: 2"),
        ("import os; os._exit(7)", "agent:rollout", r"has ended: exit code 7"),
        ("rollout = 1", "agent:rollout", r"defines another kind of rollout: async def rollout\(client, problem\)"),
        ("", "agent:rollout", "defines no rollout"),
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()\n"
            "async def rollout(client, problem): return 1",
            "agent:rollout",
            "starts 1 threads",
        ),
    ],
)
def test_a_function_that_can_never_run_ends_the_run_with_its_reason(
    tmp_path: Path, source: str, function: str, message: str
) -> None:
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(ConfigurationError, match=message):
        run(Program(None, function, [str(tmp_path / "agent.py")]))


def test_a_full_disk_of_the_node_is_no_fault_of_the_recipe(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the run starts again, and is not held."""
    code = small_disk / "agent.py"
    code.write_text("async def rollout(client, problem): return 1\n" * 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(RuntimeError, match="has ended: exit code 1"):
        run(Program(None, "agent:rollout", [str(code)]))


def test_a_working_directory_that_cannot_be_made_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    async def in_no_folder(runner: ProgramRunner) -> ProgramEnd:
        assert (await runner.run(job())).code == 0
        (folder,) = (tmp_path / "scratch").iterdir()
        folder.rmdir()
        folder.touch()
        return await runner.run(job())

    ended = with_runner(python(tmp_path, "print(1)"), in_no_folder)
    assert ended.code == 1 and "Not a directory" in ended.unstarted


def test_programs_whose_folder_is_removed_get_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner of temporary files ends no run, and what a function imports late is there again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "late.py").write_text("VALUE = 3")
    (tmp_path / "agent.py").write_text("async def rollout(client, problem):\n    import late\n    return late.VALUE\n")

    async def cleaned(runner: ProgramRunner) -> list[int]:
        first = await runner.run(job(**SESSION))
        (folder,) = (tmp_path / "scratch").iterdir()
        shutil.rmtree(folder)
        return [first.returned, (await runner.run(job(**SESSION))).returned]

    program = Program(None, "agent:rollout", [str(tmp_path / name) for name in ("agent.py", "late.py")])
    assert with_runner(program, cleaned) == [3, 3]
    assert [*(tmp_path / "scratch").iterdir()] == []


def test_a_nursery_that_cannot_fork_loses_that_rollout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank, connection = socket.socketpair()
    with control, rank:
        with ours, connection:
            socket.send_fds(ours, [b"1"], [connection.fileno()])
        _serve(control, PreparedProgram(["true"], None, {}, ""))
        assert rank.recv(1) == b""
