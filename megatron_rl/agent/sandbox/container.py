"""A container for one program: its processes, files and network are apart from those of the machine.

Linux; standard library only.

    the caller becomes the keeper   --fork-->   relay      the policy's address, from outside
              |
              +--fork, new namespaces-->        init       mounts; watches memory and processes; ends the rest
                                                  |
                                                  +--fork--> the program, without rights

Namespaces of the kernel, which need no privileges (user, mount, process, network, IPC, host name), make the walls. The
root file system is an overlay: below, a directory that nobody changes; above, a tmpfs of limited size that ends with
the program. (Before Linux 6.6 a tmpfs has no attributes of users. There, a directory of the image that was deleted
cannot be made again.) enroot mounts the same way, but its containers share the machine's processes and network, have no
limits, and start ten times more slowly.

Without the network of the machine, the program has a loopback interface alone. The keeper listens there, and the relay,
which has stayed outside, passes each connection on to the one address that the program may reach.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron_rl.agent.sandbox.container_root import (
    CannotContain,
    ContainerLimits,
    ProgramContainer,
    libc,
    make_root,
    why_refused,
)
from megatron_rl.contract.children import death_with_parent

_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC = 0x20000, 0x4000000, 0x8000000  # unshare(2)
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES = 24, 38  # prctl(2)
_SET_FLAGS, _UP = 0x8914, 1  # netdevice(7)

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION, _SET_PERMISSIONS, _OWN_SESSION = 1, 5, -3  # keyctl(2)
_KEPT = {0, 1, 3, 4, 5, 6, 7}
"""Capabilities over the program's files and processes: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID."""
_CAPABILITIES = 64
LOOK_S = 0.1
"""Seconds between two looks of init at memory and processes."""
_CONNECTIONS = 512
"""Connections of a program to the rank at a time, which has a limit of open files for all its programs; others wait."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def become_contained(
    container: ProgramContainer,
    folder: Path,
    reaches: tuple[str, int] | None,
    program: Callable[[], NoReturn],
    exceeded: Callable[[str], None],
) -> NoReturn:
    """Become the keeper of a container, and end as the program in it ends. Call it in a process with one thread.

    Args:
        folder: directory whose files the program finds, as copies, in its working directory.
        reaches: host and port that the program reaches as 127.0.0.1 and the same port, if it has no network.
        program: becomes the program, within the container.
        exceeded: called in init, before it ends the program, with the limit that was exceeded.

    Raises CannotContain.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the program
    to_relay = None if container.network or reaches is None else _start_relay(*reaches)
    _enter_namespaces(container)
    if not container.network:
        _raise_loopback()
        if to_relay is not None and reaches is not None:
            with to_relay, socket.create_server(("127.0.0.1", reaches[1]), backlog=128) as listener:
                socket.send_fds(to_relay, [b"1"], [listener.fileno()])
    readable, writable = os.pipe()
    if (init := os.fork()) == 0:
        os.close(readable)
        try:
            _be_init(container, folder, program, exceeded, writable)
        except CannotContain as error:
            os.write(writable, f"!{error}".encode())
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable, "rb") as reported:
        said = reported.read().decode()
    os.waitpid(init, 0)
    if said.startswith("!"):
        raise CannotContain(said[1:])
    _end_as(int(said) if said else -signal.SIGKILL)


def why_not_contained(container: ProgramContainer, folder: Path) -> str | None:
    """Start and end an empty container. Return why that is impossible on this machine; None if it is not."""
    readable, writable = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            become_contained(container, folder, None, lambda: os._exit(0), lambda limit: None)
        except BaseException as error:  # noqa: BLE001 - no error may return into the caller's code
            os.write(writable, str(error).encode() or b"unknown")
        finally:
            os._exit(1)
    os.close(writable)
    with os.fdopen(readable, "rb") as said:
        why = said.read().decode()
    _, status = os.waitpid(pid, 0)
    if why or status == 0:
        return why or None
    code = os.waitstatus_to_exitcode(status)
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"


def leave_keys() -> None:
    """Have this process and its children in a session without keys, which nobody can add to. Otherwise containers would
    inherit those of the user's session, such as Kerberos tickets. Raises CannotContain."""
    keyctl = _KEYCTL[os.uname().machine]
    if libc().syscall(keyctl, _JOIN_SESSION, None) >= 0:
        libc().syscall(keyctl, _SET_PERMISSIONS, _OWN_SESSION, 0)
    elif ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):  # nobody here has keys, the containers no more than we
        raise CannotContain(why_refused("keyctl"))


def _end_as(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# The keeper


def _enter_namespaces(container: ProgramContainer) -> None:
    user, group, parent = os.geteuid(), os.getegid(), os.getppid()
    spaces = _NEW_USER | _NEW_MOUNTS | _NEW_PROCESSES | _NEW_IPC | _NEW_HOST_NAME
    if libc().unshare(spaces | (0 if container.network else _NEW_NETWORK)):
        settings = "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns"
        raise CannotContain(f"{why_refused('unshare')}: user namespaces are switched off ({settings})")
    try:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(content, encoding="ascii")
    except OSError as error:
        raise CannotContain(f"{error.filename}: {error.strerror}") from error
    death_with_parent(parent)()  # a change of credentials may have taken it off
    socket.sethostname("container")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def _start_relay(host: str, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    keeper = os.getpid()
    if os.fork() == 0:
        try:
            death_with_parent(keeper)()
            ours.close()
            _, files, _, _ = socket.recv_fds(theirs, 1, 1)
            if files:
                asyncio.run(_relay(socket.socket(fileno=files[0]), host, port))
        finally:
            os._exit(0)
    theirs.close()
    return ours


async def _relay(listener: socket.socket, host: str, port: int) -> None:
    async def passed(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            try:
                while part := await source.read(2**16):
                    target.write(part)
                    await target.drain()
            finally:
                target.write_eof()

    room = asyncio.Semaphore(_CONNECTIONS)

    async def connected(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            async with room:
                far_source, far_target = await asyncio.open_connection(host, port)
                try:
                    await asyncio.gather(passed(source, far_target), passed(far_source, target))
                finally:
                    far_target.transport.abort()
        except OSError:
            pass  # the rank has ended, and so will the program
        finally:
            target.transport.abort()

    async with await asyncio.start_server(connected, sock=listener) as server:
        await server.serve_forever()


# Init


def _be_init(
    container: ProgramContainer,
    folder: Path,
    program: Callable[[], NoReturn],
    exceeded: Callable[[str], None],
    report: int,
) -> None:
    """Become the first process of the container, with which the kernel ends all others. Report the exit code of the
    program, negative for a signal. Raises CannotContain."""
    death_with_parent(0)()  # the keeper's process id in here
    make_root(container, folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    if (pid := os.fork()) == 0:
        try:
            os.close(report)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _give_up_rights(container.limits)
            program()
        finally:
            os._exit(1)
    for file in range(3):
        os.close(file)
    while (code := _collected(pid)) is None:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
        if limit := _exceeded(container.limits):
            exceeded(limit)
            code = -signal.SIGKILL
            break
    os.write(report, str(code).encode())
    os._exit(0)


def _collected(pid: int) -> int | None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == pid:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _exceeded(limits: ContainerLimits) -> str:
    """Return the limit that the processes of this container exceed together; empty if none."""
    pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    held = [_held(pid) for pid in pids if pid != 1] if len(pids) - 1 <= limits.processes else []
    if len(pids) - 1 > limits.processes or sum(threads for threads, _ in held) > limits.processes:
        return f"more than {limits.processes} processes"
    # Resident memory counts what processes share for each of them, but is read in less time.
    resident = sum(resident for _, resident in held)
    if resident > limits.memory_bytes and sum(_share_bytes(pid) for pid in pids if pid != 1) > limits.memory_bytes:
        return f"more than {limits.memory_bytes / 2**30:g} GiB of memory"
    return ""


def _held(pid: int) -> tuple[int, int]:
    """Return the threads and the resident bytes of a process."""
    with suppress(OSError):  # it has ended
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(after_name[17]), int(after_name[21]) * os.sysconf("SC_PAGE_SIZE")
    return 0, 0


def _share_bytes(pid: int) -> int:
    """Return the memory of a process, with its share of what it has in common with others."""
    with suppress(OSError, StopIteration):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def _give_up_rights(limits: ContainerLimits) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    # A limit of the user in this namespace, which a program meets between two looks of init alone: a program over its
    # limit is to be lost with that reason. It does not bind the machine's root.
    resource.setrlimit(resource.RLIMIT_NPROC, (2 * limits.processes, 2 * limits.processes))
    for capability in range(_CAPABILITIES):
        if capability not in _KEPT:
            libc().prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
