"""Process that starts the programs of one rank.

    rank --(socket)--> nursery --(fork)--> supervisor --(fork)--> program, and all that it starts

Starting Python and importing a client takes a second; a fork takes milliseconds. For each run the rank sends one end of
a new connection, on which the supervisor receives the job and reports its end (supervisor.py). That connection closes
when the rank ends in any way, and then the program ends too.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

import psutil

from megatron_rl.contract.children import OUTSIDE_SIGNALS, adopt_orphans, death_with_parent
from megatron_rl.environments.program.nursery_wire import MESSAGE_BYTES, READY, Program
from megatron_rl.environments.program.prepared import PreparedProgram, UnusableProgram, prepare
from megatron_rl.environments.program.supervisor import END_S, supervise

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
            program = prepare(Program(*json.loads(control.recv(MESSAGE_BYTES))), folder)
        except UnusableProgram as error:
            control.send(str(error).encode()[:MESSAGE_BYTES])
            return
        death_with_parent(parent, 0)()  # from here on it leaves cleanly when the control socket closes
        control.send(READY)
        _serve(control, program)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the rank may be dead


def _serve(control: socket.socket, program: PreparedProgram) -> None:
    """Fork a supervisor for each connection, until the rank closes the control socket."""
    supervisors: set[int] = set()
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
        pid = os.fork()
        if pid == 0:
            _be_supervisor(control, connection, program)
        supervisors.add(pid)
        connection.close()
    deadline = time.monotonic() + 2 * END_S  # their connections are closed as well
    while supervisors and time.monotonic() < deadline:
        _reap(supervisors)
        time.sleep(0.01)


def _be_supervisor(control: socket.socket, connection: socket.socket, program: PreparedProgram) -> None:
    """Supervise one run in a forked process, and exit: nothing may return into the loop of the nursery."""
    try:
        control.close()
        supervise(connection, program)
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


if __name__ == "__main__":
    main()
