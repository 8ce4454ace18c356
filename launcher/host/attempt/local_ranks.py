"""Ranks of a local run: processes of this machine, in a world that trains and one for each replica. They end with this
process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.attempt.interfaces import ReplicaRanks, Steps
from launcher.host.attempt.replicas import Replicas
from launcher.host.attempt.runner import LEAVE_LIMIT_S
from launcher.host.judge.verdict import RankExit
from launcher.host.record.evidence import Observed
from megatron_rl.contract.child import KILLED_S, Child
from megatron_rl.contract.codes import HASH_SEED, PARENT_VARIABLE, SILENCE_VARIABLE, START_VARIABLE
from megatron_rl.contract.paths import NUMBER_OPTIONS, Attempt, RankFiles, Replica, RunDir

CLOSE_S = 2.0  # seconds for the kernel to end a killed process

# Threads of a rank wait for each other at the end of each operator. If other work takes a core from one of them, the
# rest would spin for milliseconds, which makes steps five times as long. Waking a sleeping thread takes about 50 us, as
# long as an operator. So threads spin for about that time (1000 in libgomp's counting), then sleep.
WAITING_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}

# Each step needs again the memory that the previous one freed. By default glibc returns large blocks to the kernel,
# which clears their pages before it hands them out again: a fifth of SmolLM2's training time.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


class LocalReplicas(NamedTuple):
    kind: str  # of `FOLDERS`
    replicas: int
    ranks: int  # processes of each
    gpus: int  # GPUs of each, if its processes start the workers on equal shares of them; 0: each process has one
    command: Sequence[str]  # command of a rank; --run-dir, --attempt and the option of the number are added
    shares_devices: bool = False  # whether they are on the GPUs of the training ranks, not on others after those

    @property
    def devices(self) -> int:
        """GPUs of each; on CPUs processes."""
        return self.gpus or self.ranks

    @property
    def own_devices(self) -> int:
        """GPUs of all that only they use; on CPUs processes."""
        return 0 if self.shares_devices else self.replicas * self.devices


class RankSettings(NamedTuple):
    ranks: int  # number of training ranks
    threads: int  # OMP and MKL threads of each rank
    device: str  # cpu or cuda
    silence_limit: float  # seconds
    grace: float  # seconds between SIGTERM and SIGKILL
    command: Sequence[str]  # command of a training rank; --run-dir and --attempt are added
    replicas: Sequence[LocalReplicas] = ()


class LocalRanks(Steps):
    tick_s = 0.1
    remind_s = 2.0
    end_together = False

    def __init__(self, run: RunDir, attempt: Attempt, settings: RankSettings) -> None:
        self._run, self._attempt, self._settings = run, attempt, settings
        self._training = _Processes(settings.grace)
        self._first = {}  # kind of replicas -> it, and the number of its first GPU
        files, first = [], settings.ranks
        for of in settings.replicas:
            files += [attempt.replica(number, of.kind) for number in range(of.replicas)]
            self._first[of.kind] = of, 0 if of.shares_devices else first
            first += of.own_devices
        self.replicas = Replicas(files, self._start_replica, settings.silence_limit)

    def start(self) -> None:
        # Ranks inherit this: without a handler, SIGUSR1 (drain) and SIGQUIT (dump the stack) would kill them.
        for signum in (signal.SIGUSR1, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_IGN)
        settings = self._settings
        command = [*settings.command, *self._which()]
        self._training.start(command, self._environment(), settings.ranks, 0, self._attempt)

    def exits(self) -> list[RankExit]:
        return self._training.exits()

    @property
    def code(self) -> int:
        return self._training.code

    def are_stuck(self, now: float) -> bool:
        """Whether the training ranks still run KILLED_S after they were killed, for example held by a driver."""
        return self._training.are_stuck(now)

    def signal(self, signum: int) -> None:
        for world in self._worlds():
            world.signal(signum)

    def end(self, now: float, hurried: bool) -> None:
        for world in self._worlds():
            world.end(now, hurried)

    def close(self) -> None:
        """End all ranks; replicas have `grace` seconds to leave cleanly."""
        self._training.close()
        replicas = self.replicas.ranks
        give_up = time.monotonic() + self._settings.grace + CLOSE_S
        while any(world.observed(time.monotonic()) is None for world in replicas) and time.monotonic() < give_up:
            for world in replicas:
                world.end(time.monotonic(), hurried=False)
            time.sleep(self.tick_s)
        for world in replicas:
            world.close()

    def _worlds(self) -> list[ReplicaRanks]:
        return [self._training, *self.replicas.ranks]

    def _start_replica(self, files: Replica, start: int) -> ReplicaRanks:
        settings, (of, first) = self._settings, self._first[files.kind]
        command = [*of.command, *self._which(), NUMBER_OPTIONS[of.kind], str(files.number)]
        environment = dict(self._environment(), **{START_VARIABLE: str(start)})
        first += files.number * of.devices
        gpus = of.gpus // of.ranks if settings.device != "cpu" else 0
        world = _Processes(settings.grace)
        try:
            world.start(command, environment, of.ranks, first, files, gpus)
        except OSError:
            world.close()
            raise
        return world

    def _which(self) -> list[str]:
        return ["--run-dir", str(self._run.root), "--attempt", str(self._attempt.number)]

    def _environment(self) -> dict[str, str]:
        settings = self._settings
        environment = dict(os.environ)
        for ours in (WAITING_THREADS, KEPT_MEMORY if settings.device == "cpu" else {}):
            if not ours.keys() & environment.keys():  # the user has not chosen otherwise
                environment.update(ours)
        environment.update(
            {
                "OMP_NUM_THREADS": str(settings.threads),
                "MKL_NUM_THREADS": str(settings.threads),
                "GLOO_SOCKET_IFNAME": "lo",
                **HASH_SEED,
                "PYTHONUNBUFFERED": "1",
                PARENT_VARIABLE: str(os.getpid()),
                SILENCE_VARIABLE: str(settings.silence_limit),
            }
        )
        if settings.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment


def _gpus(first: int, count: int) -> str:
    """Value of CUDA_VISIBLE_DEVICES for `count` of the GPUs that this process sees, from number `first` on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(first + count)]
    return ",".join(names[first : first + count])


class _Processes(ReplicaRanks):
    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._children: list[Child] = []
        self._exits: dict[int, RankExit] = {}
        self._by_themselves: list[RankExit] = []  # exits before this object ended any rank
        self._terminated: float | None = None  # time.monotonic() of SIGTERM, SIGKILL, the first exit
        self._killed: float | None = None
        self._left_at: float | None = None

    def start(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        ranks: int,
        first: int,
        files: RankFiles,
        gpus: int = 0,
    ) -> None:
        """Start all ranks, from number `first` among all GPUs of the run: LOCAL_RANK, and so the GPU, counts from it.
        Raises OSError.

        gpus: number of GPUs that each rank sees alone; 0: it sees all and uses one.
        """
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(first + rank), "WORLD_SIZE": str(ranks)}
            if gpus:
                place["CUDA_VISIBLE_DEVICES"] = _gpus(first + rank * gpus, gpus)
            child = Child(list(command), dict(environment, **place), output=str(files.log(rank)))
            self._children.append(child)

    def exits(self) -> list[RankExit]:
        for rank, child in enumerate(self._children):
            code = child.exit_code()
            if code is not None and rank not in self._exits:
                self._exits[rank] = RankExit(rank, code)
        return list(self._exits.values())

    @property
    def code(self) -> int:
        return max([ended.code for ended in self._exits.values()] or [0], key=abs)

    def are_stuck(self, now: float) -> bool:
        return self._killed is not None and now >= self._killed + KILLED_S

    def observed(self, now: float) -> Observed | None:
        exits = self.exits()
        if self._terminated is None:
            self._by_themselves = exits
        if exits and self._left_at is None:
            self._left_at = now
        if len(exits) == len(self._children):
            return Observed(exits=self._by_themselves, code=self.code)
        if any(ended.bad for ended in exits) or (self._left_at is not None and now >= self._left_at + LEAVE_LIMIT_S):
            self.end(now, hurried=False)
        return None

    def signal(self, signum: int) -> None:
        for rank, child in enumerate(self._children):
            if rank not in self._exits:
                child.send(signum)

    def end(self, now: float, hurried: bool) -> None:
        if self._terminated is None:
            self._terminated = now
            self.signal(signal.SIGTERM)
        elif hurried or now >= self._terminated + self._grace:
            self.signal(signal.SIGKILL)
            self._killed = self._killed or now

    def close(self) -> None:
        for child in self._children:
            child.close()
