"""mrl and mrl-submit as started by a shell, without the half second of imports: each command is forked from a process
that has imported them. It has its own session, and the given environment, directory and streams.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import pkgutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

PROGRAMS = {name: Path(sys.executable).with_name(name) for name in ("mrl", "mrl-submit")}
ROOMS = ("launcher.cli", "launcher.backends", "launcher.doctor", "launcher.job", "launcher.runs", "launcher.start")
"""Packages that commands import when they run, except those that need an optional library."""


ANSWER = struct.Struct("i")
"""Message with the process id of a command, then one with its exit code."""


class Command:
    """A started command with the part of the interface of subprocess.Popen that tests use. Text only."""

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
        before: str = "",
    ) -> None:
        """
        Args:
            words: mrl or mrl-submit, and its arguments.
            stdout, stderr: a file descriptor, or as for Popen. Standard input is empty.
            before: Python code that the process runs first.
        """
        self.args = list(map(str, words))
        self.returncode: int | None = None
        self._pipes: dict[str, IO[str]] = {}
        self._said: dict[str, str] = {}
        ours: list[int] = []

        def stream(name: str, wanted: int | None) -> int:
            if wanted != subprocess.PIPE:
                return wanted if wanted is not None else {"stdout": 1, "stderr": 2}[name]
            reading, writing = os.pipe()
            self._pipes[name] = os.fdopen(reading, encoding="utf-8", errors="replace")
            ours.append(writing)
            return writing

        nothing = os.open(os.devnull, os.O_RDONLY)
        out = stream("stdout", stdout)
        err = out if stderr == subprocess.STDOUT else stream("stderr", stderr)
        self._channel, theirs = socket.socketpair()
        request = {
            "argv": [str(PROGRAMS[self.args[0]]), *self.args[1:]],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "before": before,
        }
        socket.send_fds(_server(), [json.dumps(request).encode()], [nothing, out, err, theirs.fileno()])
        theirs.close()
        for descriptor in (nothing, *ours):
            os.close(descriptor)
        self.pid = self._answer()

    @property
    def stdout(self) -> IO[str]:
        return self._pipes["stdout"]

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = self._answer()
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        return self.returncode

    def _answer(self) -> int:
        (number,) = ANSWER.unpack(self._channel.recv(ANSWER.size))
        return int(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        def read(name: str, pipe: IO[str]) -> None:
            self._said[name] = pipe.read()

        readers = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in self._pipes.items()]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return self._said.get("stdout", ""), self._said.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(words: Sequence[str | Path], timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; kill it after `timeout` seconds. options: arguments of Command."""
    command = Command(words, **options)
    try:
        said, errors = command.communicate(timeout)
        return subprocess.CompletedProcess(command.args, command.wait(), said, errors)
    finally:
        command.kill()


@functools.cache
def _server() -> socket.socket:
    """Start the process that commands are forked from. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    file = str(theirs.fileno())
    process = subprocess.Popen([sys.executable, __file__, file], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # first
    return ours


def _load() -> None:
    from launcher.cli import entry
    from launcher.recipe.load import load_recipe

    assert entry
    for room in ROOMS:
        for module in pkgutil.walk_packages(import_module(room).__path__, f"{room}."):
            import_module(module.name)
    load_recipe("demo")  # builds the validators of its sections, and finds the environments


def _next_command(control: socket.socket) -> dict[str, Any]:
    """Wait for requests. Returns the request, in a new process for each command."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not request:
            os._exit(0)
        *streams, channel = descriptors
        if os.fork() == 0:
            control.close()
            pid = os.fork()
            if pid == 0:
                os.close(channel)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return dict(json.loads(request))
            for stream in streams:
                os.close(stream)
            os.write(channel, ANSWER.pack(pid))
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):  # no one waits for the exit code
                os.write(channel, ANSWER.pack(os.waitstatus_to_exitcode(status)))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    _load()
    gc.freeze()  # otherwise each command would scan all imported objects at its end
    command = _next_command(socket.socket(fileno=int(sys.argv[1])))
    os.setsid()
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    tempfile.tempdir = None  # read again from the new environment
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")
    sys.argv = command["argv"]
    from launcher.cli import entry

    exec(command["before"], {})
    {"mrl": entry.mrl, "mrl-submit": entry.mrl_submit}[Path(sys.argv[0]).name]()


if __name__ == "__main__":
    main()
