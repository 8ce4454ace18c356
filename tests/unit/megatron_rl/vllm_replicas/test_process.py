"""Reasons for which vLLM has gone, and what its processes leave behind. Programs stand in for vLLM."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from io import StringIO
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_rl.generate.vllm import deaths
from megatron_rl.generate.vllm.command import Served, vllm_environment
from megatron_rl.generate.vllm.private_folder import note_shared_memory, private_folder
from megatron_rl.generate.vllm.process import VllmGone, VllmProcess
from megatron_rl.generate.vllm.start import started
from megatron_rl.recipe.errors import ConfigurationError

SLEEPS = "__import__('time').sleep(60)"
SILENT = "vLLM does not answer /pause"
WORKER = "VLLM::Worker_TP0"
SERVER = f"""
import os, signal, subprocess, sys, time
worker = subprocess.Popen(["{WORKER}", "60"], executable="/bin/sleep")
print(*sys.argv[1:2], flush=True)
if sys.argv[1:]:  # vLLM ends its own processes some seconds after an error
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    worker.send_signal(signal.SIGKILL)
os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
print("RuntimeError: cancelled", flush=True)
time.sleep(60)
"""
LEAVES = f"""
import os, signal, subprocess, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
subprocess.Popen(["{WORKER}", "60"], executable="/bin/sleep")
time.sleep(60)
"""
SHARES = """
import sys, time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
semaphore = get_context("spawn").Semaphore()
print(f"Error: {segment.name} sem.{semaphore._semlock.name[1:]}", flush=True)
time.sleep(60)
"""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def server_of(process: VllmProcess) -> psutil.Process:
    (found,) = psutil.Process(process._guard.pid).children()
    return found


def watches_worker(process: VllmProcess) -> bool:
    return WORKER in [name for _, name in list(process._deaths._watched.values())]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., VllmProcess]]:
    """Start a program that ends with the test."""
    monkeypatch.setattr(deaths, "SCAN_S", 0.02)
    begun: list[VllmProcess] = []

    def begin(program: str, *arguments: str, folder: Path | None = None) -> VllmProcess:
        begun.append(VllmProcess([sys.executable, "-c", program, *arguments], {**os.environ}, StringIO(), folder))
        return begun[-1]

    yield begin
    for process in begun:
        process.end()


def test_a_failed_call_is_explained_by_the_end_of_the_process(begin: Callable[..., VllmProcess]) -> None:
    process = begin(SLEEPS)
    until(lambda: psutil.Process(process._guard.pid).children())
    server_of(process).kill()
    assert process.explained(SILENT).startswith("vLLM has ended (signal SIGKILL)")


def test_a_failed_call_of_a_living_process_keeps_its_message(
    begin: Callable[..., VllmProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.generate.vllm.process.EXIT_S", 0.1)
    assert begin(SLEEPS).explained(SILENT) == SILENT


def test_the_first_process_that_was_killed_is_the_reason_whatever_the_others_say(
    begin: Callable[..., VllmProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.generate.vllm.process.EXIT_S", 0.1)
    process = begin(SERVER)
    until(lambda: watches_worker(process))
    (worker,) = [each for each in server_of(process).children() if each.cmdline()[:1] == [WORKER]]
    worker.kill()
    until(lambda: process._deaths.first is not None and process._lines)
    reason = f"its process {WORKER} was killed by SIGKILL, by somebody or because memory ran out"
    assert process.explained(SILENT) == f"{SILENT}: {reason}"
    server_of(process).kill()
    process._guard.wait()
    with pytest.raises(VllmGone) as gone:
        process.check()
    assert str(gone.value) == f"vLLM has ended (signal SIGKILL): {reason}"


def test_an_error_is_the_reason_if_vllm_killed_its_processes_after_it(
    begin: Callable[..., VllmProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("megatron_rl.generate.vllm.process.EXIT_S", 0.1)
    process = begin(SERVER, "ValueError: no weights", str(tmp_path / "ends"))
    until(lambda: watches_worker(process) and process._lines)
    (tmp_path / "ends").touch()
    until(lambda: process._deaths.first is not None and len(process._lines) == 2)
    assert process.explained(SILENT) == f"{SILENT}: ValueError: no weights"


def test_a_worker_that_the_guard_kills_after_the_server_is_not_the_reason(begin: Callable[..., VllmProcess]) -> None:
    process = begin(LEAVES)
    until(lambda: watches_worker(process))
    server_of(process).send_signal(signal.SIGUSR1)
    assert process.explained(SILENT) == "vLLM has ended (exit code 3)"
    assert process._deaths.first is None


def test_a_server_that_ends_between_two_looks_at_its_guard_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guard(psutil.Process):
        def children(self, recursive: bool = False) -> list[psutil.Process]:
            return [psutil.Process()] if recursive else []

    looks: list[list[int]] = []
    monkeypatch.setattr(deaths, "SCAN_S", 0.02)
    monkeypatch.setattr(deaths, "psutil", SimpleNamespace(Process=Guard, Error=psutil.Error))
    watch = deaths.Deaths(os.getpid(), looks.append)
    until(lambda: len(looks) > 1)
    watch.close()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    process = VllmProcess([str(tmp_path / "none")], {**os.environ}, StringIO())
    assert process.explained(SILENT).endswith("none cannot be started: No such file or directory")
    process.end()


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        (
            "__import__('argparse').ArgumentParser(prog='vllm serve').parse_args()",
            ConfigurationError,
            r"see inference\.vllm\.args: .*\(exit code 2\): .*arguments: --none=3",
        ),
        ("raise SystemError('out of luck')", VllmGone, r"exit code 1\): SystemError: out of luck"),
    ],
)
def test_options_that_vllm_refuses_are_a_wrong_configuration_and_other_ends_are_not(
    program: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    served, command = Served(tmp_path / "model", tmp_path), [sys.executable, "-c", program, "--none=3"]
    with pytest.raises(error, match=said), started(command, {**os.environ}, served, StringIO(), "inference.vllm.args"):
        pass


def test_temporary_files_are_in_the_private_folder_and_the_compilers_cache_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = vllm_environment({"TMPDIR": "/scratch"}, Served(tmp_path / "model", tmp_path / "vllm"), cpu=True)
    assert found["TMPDIR"] == str(tmp_path / "vllm" / "tmp")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/mrl-compiled-{os.getuid()}"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no files")
def test_shared_memory_of_killed_processes_ends_with_the_folder(begin: Callable[..., VllmProcess]) -> None:
    with private_folder() as folder:
        process = begin(SHARES, folder=folder)
        until(lambda: process._lines)
        segments = [Path("/dev/shm", name) for name in process._lines[0][1].removeprefix("Error: ").split()]
        assert [*map(Path.exists, segments)] == [True, True]
        until((folder / "shared-memory.json").exists)
        server_of(process).kill()
        process.end()  # also kills Python's tracker of such memory
    assert [*map(Path.exists, segments)] == [False, False]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no files")
def test_shared_memory_of_others_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment of the same name that somebody has created since, and one that vLLM does not name so."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, other = SharedMemory(create=True, size=64), SharedMemory(f"other_{os.getpid()}", create=True, size=64)
    again = None
    try:
        with private_folder(for_sockets=False) as folder:
            note_shared_memory(folder, [os.getpid()])
            assert ours.name in (folder / "shared-memory.json").read_text()
            ours.unlink()
            again = SharedMemory(ours.name, create=True, size=64)
        assert Path("/dev/shm", again.name).exists()
        assert Path("/dev/shm", other.name).exists()
    finally:
        for segment in [again, other]:
            if segment is not None:
                segment.close()
                segment.unlink()
        ours.close()
