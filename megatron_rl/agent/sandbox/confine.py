"""Confinement of a child process before it runs untrusted code. Linux; standard library only.

    memory, processor time, core dumps                      limits of the process (setrlimit)
    network, writing, processes, signals, other processes   a filter of system calls (seccomp), which needs no right and
                                                            cannot be taken off again
    pipes, memory and files of other processes              a domain of Landlock (Linux 5.13), if the kernel has it

If the kernel or the processor has no such filter, the process tries a namespace without network (unshare), files it
writes stay empty, and the number of processes is limited.

The process can read whatever files its user can read. Without a network that leaves it only in its answer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Sequence

from megatron_rl.agent.sandbox.system_calls import MACHINES, NEWEST, SystemCalls, refused
from megatron_rl.contract.children import PR_SET_PDEATHSIG

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38  # prctl(2)
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # numbers of calls, the same on all machines
_MAKE_BLOCK = 2**11  # landlock(7)
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # seccomp(2)
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # opcodes of BPF: ld abs, jeq, jgt, jset, ret
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data: of the call, of its first argument
_CLONE_THREAD, _CLONE_NEWUSER, _CLONE_NEWNET = 0x10000, 0x10000000, 0x40000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AF_UNIX = 1
_DATAGRAMS = 2  # bit of the types of socket that need no connection: SOCK_DGRAM, SOCK_RAW
_PR_SCHED_CORE = 62  # prctl(2); it also changes how other processes are scheduled
_F_SETFL = 4  # fcntl(2)
_O_ASYNC = 0x2000
"""Flag of a file about which the kernel sends signals, for a terminal to all processes in its foreground."""
_FCNTL = (0, 1, 2, 3, _F_SETFL, 1030)
"""Commands of fcntl that are allowed: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Others name a
process that gets signals, or lock files of the user."""
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Commands of ioctl that are allowed: TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Some of the
others name a process that gets signals, and those of devices do anything."""

STACK_BYTES = 100 * 2**20
"""Stack limit in bytes; Linux reserves 128 MiB for it to grow."""
FEW_PROCESSES = 64
"""Processes allowed beyond those of the user, if system calls cannot be filtered."""


def limit_memory(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_stack_limit() -> None:
    """Let the stack of this thread grow to STACK_BYTES, which deep recursion through C needs, for example by
    lru_cache."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


def limit_processor(seconds: int, *, for_good: bool) -> None:
    """Allow `seconds` more of processor time; then SIGXCPU ends the process.

    for_good: whether the limit can be raised no more.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft if for_good else hard))


def confine() -> str | None:
    """Give up network, writing, processes and signals permanently. Return what could not be given up, in words; None if
    nothing."""
    _enter_domain()
    why = _filter_calls()
    if why is None:
        return None
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    processes, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = min(_processes() + FEW_PROCESSES, *(limit for limit in (processes, hard) if limit >= 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return f"the network, and changing files ({why}; unshare: {os.strerror(ctypes.get_errno())})"
    return f"changing files ({why})"


def _enter_domain() -> None:
    """Have the kernel refuse what /proc shows of other processes, if it has Landlock. Otherwise this process could open
    the pipes of its owner there, and take what is in them."""
    libc = _libc()
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A domain keeps its processes from those outside it. A rule set must handle some access: this one refuses that to
    # create block devices.
    handled = ctypes.create_string_buffer(struct.pack("Q", _MAKE_BLOCK), 8)
    rules = libc.syscall(_LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(8), 0)
    if rules >= 0:
        libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0)
        os.close(rules)


def _filter_calls() -> str | None:
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        return f"no filter of system calls for {os.uname().machine}"
    program = _program(machine)
    filled = ctypes.create_string_buffer(program)
    libc = _libc()
    # struct sock_fprog: the number of instructions and their address
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(filled)))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return None


_Line = tuple[int, int, int, int]
_REFUSE: _Line = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_ABSENT: _Line = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)


def _program(machine: SystemCalls) -> bytes:
    """Return the filter in BPF: instructions of (opcode, instructions to skip if true, if false, operand)."""
    # A BPF program only jumps forward, by the number of instructions to skip. So each test stands before the
    # instruction that it guards, and falls into it or skips it:
    #
    #     (_EQUAL, 0, 1, number), _REFUSE             equal: skip none, and refuse; else skip the refusal
    #
    # A call with arguments to check has its own body: for each of them load it, test it, refuse; then allow. A number
    # that no test has matched reaches the last instruction, which allows it.
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine.other_numbers is not None:
        lines += [(_ANY_BIT, 0, 1, machine.other_numbers), _REFUSE]
    lines += [(_GREATER, 0, 1, NEWEST), _ABSENT]
    for number in refused(machine):
        lines += [(_EQUAL, 0, 1, number), _REFUSE]
    # ENOSYS makes glibc fall back to clone, whose flags the filter can inspect.
    lines += [(_EQUAL, 0, 1, machine.clone3), _ABSENT]
    for call, checks in (
        (machine.clone, [_load(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _REFUSE]),  # a thread, and no process
        (machine.prlimit, _one_of(0, (0,))),  # its own limits
        (machine.prctl, [*_not(0, PR_SET_PDEATHSIG), *_not(0, _PR_SCHED_CORE)]),  # it ends with its parent
        (machine.socketpair, [*_one_of(0, (_AF_UNIX,)), *_no_bit(1, _DATAGRAMS)]),
        (machine.openat, _no_bit(2, _WRITES)),
        (machine.open, _no_bit(1, _WRITES)),
        (machine.ioctl, _one_of(1, _IOCTL)),
        # The flags are checked only with F_SETFL: other commands leave there what the register held.
        (machine.fcntl, [*_one_of(1, _FCNTL), _load(1), (_EQUAL, 0, 3, _F_SETFL), *_no_bit(2, _O_ASYNC)]),
    ):
        if call is not None:
            body = [*checks, (_RETURN, 0, 0, _ALLOW)]
            lines += [(_EQUAL, 0, len(body), call), *body]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _load(argument: int) -> _Line:
    """Load the lower half of an argument: of the arguments that are checked, the kernel takes no more."""
    return _LOAD, 0, 0, _ARGUMENT + 8 * argument


def _one_of(argument: int, allowed: Sequence[int]) -> list[_Line]:
    return [_load(argument), *((_EQUAL, len(allowed) - i, 0, value) for i, value in enumerate(allowed)), _REFUSE]


def _not(argument: int, value: int) -> list[_Line]:
    return [_load(argument), (_EQUAL, 0, 1, value), _REFUSE]


def _no_bit(argument: int, bits: int) -> list[_Line]:
    return [_load(argument), (_ANY_BIT, 0, 1, bits), _REFUSE]


def _processes() -> int:
    """Count the threads of this user on this machine, which is what the kernel limits."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{entry.name}/task"))  # noqa: PTH208
            except OSError:
                continue  # gone
    return count


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
