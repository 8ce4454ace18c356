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
    fcntl: int
    ioctl: int
    other_numbers: int | None
    """Bit of the numbers of a second calling convention, which would bypass the table."""


MACHINES = {
    "x86_64": SystemCalls(0, 0xC000003E, 2, 257, 56, 435, 302, 157, 53, 72, 16, 0x40000000),
    "aarch64": SystemCalls(1, 0xC00000B7, None, 56, 220, 435, 261, 167, 199, 25, 29, None),
}


def refused(machine: SystemCalls) -> list[int]:
    return [number for numbers in _REFUSED.values() if (number := numbers[machine.column]) is not None]


_NEWEST = 462
"""Largest number of a system call, the same on all machines, that was judged for this table. The next one, setxattrat
of Linux 6.13, changes files."""

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
    # users and groups: a change undoes the death with the parent
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
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
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
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
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "flock": (73, 32),
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
    # the kernel, also where the user is root
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # objects that outlive a process, or that processes of a user share
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # objects of which a user or a machine has few
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}


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
    lines += [(_GREATER, 0, 1, _NEWEST), _ABSENT]
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
