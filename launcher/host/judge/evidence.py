"""What an attempt left behind. Read once (launcher.host.record.evidence), then judged."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rl.contract.attempt_records import Drain, Hang, Heartbeat, Outcome, RankError
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED


class RankExit(NamedTuple):
    """How a rank of the training step ended by itself."""

    rank: int
    code: int  # negative: the signal that ended it
    host: str | None = None  # None: not said

    @property
    def bad(self) -> bool:
        """Whether it says that something went wrong: a rank that leaves in order does so with one of the others."""
        return self.code not in (EXIT_FINISHED, EXIT_DRAINED)


class AttemptEvidence(NamedTuple):
    """All that is known of how an attempt ended."""

    # Written by the ranks
    errors: list[RankError] = []  # oldest first: the later ones are usually its consequences
    unreadable_errors: dict[int, str] = {}  # rank -> what is wrong with its error file
    outcome: Outcome | None = None
    unreadable_outcome: str | None = None  # what is wrong with it: rank 0 did write one
    heartbeats: list[Heartbeat] = []  # the last one of each rank
    stacks: dict[int, str] = {}  # rank -> where its stacks are, for the user
    last_lines: dict[int, str] = {}  # rank that ended badly -> last line of its log
    not_started: dict[int, str] = {}  # rank that ended badly -> why its program never began
    timed_out: dict[int, str] = {}  # rank -> its collective that timed out, by NCCL's watchdog

    trained: int | None = None  # newest step that rank 0 accounted for in this attempt; None: it has for none

    # Written or seen by the host side
    unwritable: str | None = None  # why the run directory takes nothing any more, where no rank left a word
    drain: Drain | None = None
    hang: Hang | None = None
    exits: list[RankExit] = []  # in their order, without those that the host side brought about
    code: int | None = None  # what the training step ended with; negative: a signal; None: it never began
    last_words: str = ""  # of srun about the step
    unready: str | None = None  # why it never began
    unready_host: str | None = None  # the only node that was tried, where it may be to blame for that
    late: str | None = None  # why ranks had to be ended that should have saved; None: that explains nothing
    in_container: bool = False
    unseen: str | None = None  # what is said where nobody saw the end, and the ranks left no word; None: it was seen
