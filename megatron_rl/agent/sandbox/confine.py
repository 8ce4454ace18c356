"""Confinement of a child process before it runs untrusted code. Linux; standard library only.

    memory, processor time, core dumps                      limits of the process (setrlimit)
    network, writing, processes, signals, other processes   a filter of system calls (seccomp), which needs no right and
                                                            cannot be taken off again

If the kernel or the processor has no such filter, the process tries a namespace without network (unshare), files it
writes stay empty, and the number of processes is limited.

The process can read whatever its user can read. Without a network that leaves it only in its answer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from typing import NamedTuple

from megatron_rl.contract.children import PR_SET_PDEATHSIG


class SystemCalls(NamedTuple):
    """System call numbers of a processor architecture."""

    column: int
    audit: int
    """AUDIT_ARCH_... value that a filter sees."""
    open: int | None
    openat: int
    clone: int
    clone3: int
    prlimit: int
    prctl: int
    socketpair: int
    other_numbers: int | None
    """Bit of the numbers of a second calling convention, which would bypass the table."""


MACHINES = {
    "x86_64": SystemCalls(0, 0xC000003E, 2, 257, 56, 435, 302, 157, 53, 0x40000000),
    "aarch64": SystemCalls(1, 0xC00000B7, None, 56, 220, 435, 261, 167, 199, None),
}


def refused(machine: SystemCalls) -> list[int]:
    return [number for numbers in _REFUSED.values() if (number := numbers[machine.column]) is not None]


_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # sockets
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # programs, sessions and namespaces
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # files
    "creat": (85, None),
    "openat2": (437, 437),
    "truncate": (76, 45),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # file systems
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # objects that outlive a process
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "memfd_create": (319, 279),
}


_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38  # prctl(2)
_SECCOMP_MODE_FILTER = 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # seccomp(2)
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # opcodes of BPF: ld abs, jeq, jset, ret
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data: of the call, of its first argument
_CLONE_THREAD, _CLONE_NEWUSER, _CLONE_NEWNET = 0x10000, 0x10000000, 0x40000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DATAGRAMS = 2  # bit of the types of socket that need no connection: SOCK_DGRAM, SOCK_RAW

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


def _program(machine: SystemCalls) -> bytes:
    """Return the filter in BPF: instructions of (opcode, instructions to skip if true, if false, operand)."""
    # A BPF program only jumps forward, by the number of instructions to skip. So each test stands before the
    # instruction that it guards, and falls into it or skips it:
    #
    #     (_EQUAL, 0, 1, number), refuse              equal: skip none, and refuse; else skip the refusal
    #
    # A call with an argument to check has its own body: load the argument, test it, refuse, allow. A number that no
    # test has matched reaches the last instruction, which allows it.
    refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    lines = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine.other_numbers is not None:
        lines += [(_ANY_BIT, 0, 1, machine.other_numbers), refuse]
    for number in refused(machine):
        lines += [(_EQUAL, 0, 1, number), refuse]
    # ENOSYS makes glibc fall back to clone, whose flags the filter can inspect.
    lines += [(_EQUAL, 0, 1, machine.clone3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    # A call is allowed if the test of its argument skips the refusal that follows.
    for call, argument, test in (
        (machine.clone, 0, (_ANY_BIT, 1, 0, _CLONE_THREAD)),  # a thread, and no process
        (machine.prlimit, 0, (_EQUAL, 1, 0, 0)),  # its own limits
        (machine.prctl, 0, (_EQUAL, 0, 1, PR_SET_PDEATHSIG)),  # it ends with its parent
        (machine.socketpair, 1, (_ANY_BIT, 0, 1, _DATAGRAMS)),
        (machine.openat, 2, (_ANY_BIT, 0, 1, _WRITES)),
        (machine.open, 1, (_ANY_BIT, 0, 1, _WRITES)),
    ):
        if call is not None:
            body = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument), test, refuse, (_RETURN, 0, 0, _ALLOW)]
            lines += [(_EQUAL, 0, len(body), call), *body]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


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
