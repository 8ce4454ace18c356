"""Process that starts the programs of one rank.

    rank --(socket)--> nursery --(fork)--> supervisor --(fork)--> program, and all that it starts

Starting Python and importing a client takes a second; a fork takes milliseconds. For each run the rank sends one end of
a new connection, on which the supervisor receives the job and reports its end (supervisor.py). That connection closes
when the rank ends in any way, and then the program ends too. When the nursery ends in any way, the kernel sends END to
its supervisors. They keep the nursery's own socket open, so that the rank sees its end when nothing is left.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_rl.agent.environments.program.nursery_wire import (
    MESSAGE_BYTES,
    READY,
    PreparedProgram,
    Program,
    ProgramImage,
    Rollout,
    place,
)
from megatron_rl.agent.environments.program.supervisor import END_S, supervise
from megatron_rl.agent.sandbox.container import ContainerLimits, ProgramContainer, leave_keys, why_not_contained
from megatron_rl.agent.sandbox.container_root import CannotContain
from megatron_rl.agent.sandbox.image_root import UnusableImage, root_of
from megatron_rl.contract.children import OUTSIDE_SIGNALS, adopt_orphans, death_with_parent
from megatron_rl.rank.processes.guard import END
from megatron_rl.recipe.errors import note_task_code

LOOK_S = 1.0


def main() -> None:
    parent, number, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for each in OUTSIDE_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    death_with_parent(parent)()  # the user's module may hang while it is imported
    adopt_orphans()
    control = socket.socket(fileno=number)
    try:
        try:
            program = Program(*json.loads(control.recv(MESSAGE_BYTES)))
            image = None if program.image is None else ProgramImage(*program.image)
            with _container(image, folder) as container:
                variables = {} if image is None else image.variables
                prepared = prepare(program, folder)._replace(container=container, variables=variables)
                if container is not None:
                    _leave_keys()  # the files of the user are read
                death_with_parent(parent, 0)()  # from here on it leaves cleanly when the control socket closes
                control.send(READY)
                _serve(control, prepared)
        except UnusableProgram as error:
            control.send(str(error).encode()[:MESSAGE_BYTES])
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the rank may be dead


def _serve(control: socket.socket, program: PreparedProgram) -> None:
    nursery, supervisors = os.getpid(), set[int]()
    arriving = select.poll()
    arriving.register(control, select.POLLIN)
    while True:
        _reap(supervisors)
        if not arriving.poll(LOOK_S * 1000):
            continue
        message, files, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            break
        connection = socket.socket(fileno=files[0])
        try:
            pid = os.fork()
        except OSError:  # such as too many processes; that loses this rollout, and not those that run
            traceback.print_exc()
            connection.close()
            continue
        if pid == 0:
            _be_supervisor(control, connection, program, nursery)
        supervisors.add(pid)
        connection.close()
    for pid in supervisors:  # the connections of some may be open
        os.kill(pid, END)
    deadline = time.monotonic() + 2 * END_S
    while supervisors and time.monotonic() < deadline:
        _reap(supervisors)
        time.sleep(0.01)


def _be_supervisor(control: socket.socket, connection: socket.socket, program: PreparedProgram, nursery: int) -> None:
    try:
        death_with_parent(nursery, END)()  # ends this process until it handles the signal, which it does for a program
        supervise(connection, program, private=[control.fileno()])
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(0)


def _reap(supervisors: set[int]) -> None:
    """Collect ended children. If a supervisor was killed, end all that it left behind."""
    killed = False
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            killed = killed or (pid in supervisors and os.WIFSIGNALED(status))
            supervisors.discard(pid)
    if killed:
        for orphan in psutil.Process().children():
            if orphan.pid not in supervisors:
                for process in (orphan, *orphan.children(recursive=True)):
                    with suppress(psutil.Error):
                        process.kill()


class UnusableProgram(Exception):
    """The program can never run; the message says why."""


@contextmanager
def _container(image: ProgramImage | None, folder: str) -> Iterator[ProgramContainer | None]:
    """Unpack the image, and try a container of it. Raises UnusableProgram."""
    if image is None:
        yield None
        return
    try:
        with root_of(Path(image.path)) as root, tempfile.TemporaryDirectory(dir=folder) as empty:
            container = ProgramContainer(str(root), ContainerLimits(*image.limits), image.network)
            if why := why_not_contained(container, Path(empty)):
                raise UnusableProgram(f"environment.args.container: this node cannot make one: {why}")
            yield container
    except UnusableImage as error:
        raise UnusableProgram(f"environment.args.container: {error}") from error


def _leave_keys() -> None:
    try:
        leave_keys()
    except CannotContain as error:
        raise UnusableProgram(f"environment.args.container: {error}") from error


def prepare(program: Program, folder: str) -> PreparedProgram:
    """Read the files and import the function. Raises UnusableProgram."""
    try:
        files = {Path(file).name: Path(file).read_bytes() for file in program.files}
    except OSError as error:
        raise UnusableProgram(f"environment.args.files: {error}") from error
    if program.function is None:
        return PreparedProgram(program.command, None, files, folder)
    code = Path(folder, "code")
    code.mkdir()
    for name, content in files.items():
        (code / name).write_bytes(content)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(code))
    rollout = _function(program.function)
    try:
        import openai  # noqa: F401 - so that no run needs to import it
    except ImportError as error:
        raise UnusableProgram(f"environment.args.function needs a client, `pip install openai`: {error}") from error
    return PreparedProgram(None, rollout, files, folder)


def _function(named: str) -> Rollout:
    module_name, _, name = named.partition(":")
    where = f"environment.args.function {named}"
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # the user's module may raise anything
        why = f"{type(error).__name__}: {error}{place(error)}"
        raise UnusableProgram(f"{where}: the module cannot be imported: {why}") from error
    note_task_code(module_name)
    found: Rollout | None = getattr(module, name, None)
    if found is None or not inspect.iscoroutinefunction(found):
        lacks = "defines no" if found is None else "defines another kind of"
        raise UnusableProgram(f"{where}: the module {lacks} {name}: async def {name}(client, problem) -> float | dict")
    threads = psutil.Process().num_threads() - 1
    if threads:
        raise UnusableProgram(
            f"{where}: the module starts {threads} threads when it is imported, which no run would have, because each "
            f"run is a fork: start them in {name}"
        )
    return found


if __name__ == "__main__":
    main()
