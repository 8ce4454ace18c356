"""Evidence about the end of an attempt. It is read once (launcher.host.record.evidence), then judged."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.contract.attempt_records import Drain, Hang, Heartbeat, Outcome, RankError
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED


class RankExit(NamedTuple):
    rank: int
    code: int  # negative: the signal that ended it
    host: str | None = None  # None: unknown

    @property
    def bad(self) -> bool:
        return self.code not in (EXIT_FINISHED, EXIT_DRAINED)


class AttemptEvidence(NamedTuple):
    # Written by the ranks
    errors: list[RankError] = []  # oldest first; later ones are usually its consequences
    unreadable_errors: dict[int, str] = {}  # rank -> why its error file cannot be read
    outcome: Outcome | None = None
    unreadable_outcome: str | None = None  # why the outcome, which rank 0 wrote, cannot be read
    heartbeats: list[Heartbeat] = []  # the last of each rank
    stacks: dict[int, str] = {}  # rank -> path of its stack dump, for the user
    last_lines: dict[int, str] = {}  # failed rank -> last line of its log
    not_started: dict[int, str] = {}  # failed rank -> why its program never began
    timed_out: dict[int, str] = {}  # rank -> its collective that timed out, by NCCL's watchdog

    trained: int | None = None  # newest step in rank 0's timeline of this attempt; None: it has none

    # Written or seen by the host side
    unwritable: str | None = None  # why the run directory cannot be written, where ranks failed without an error file
    drain: Drain | None = None
    hang: Hang | None = None
    exits: list[RankExit] = []  # in their order, without those that the host side caused
    code: int | None = None  # exit code of the training step; negative: a signal; None: it never began
    last_words: str = ""  # last line of srun about the step
    unready: str | None = None  # why it never began
    unready_host: str | None = None  # the node to blame for that, where only one was tried
    late: str | None = None  # reason of the deadline at which ranks were ended before they had saved
    in_container: bool = False
    unseen: str | None = None  # error to report where nobody saw the end; None: the host side saw it
