"""The whole policy for a job whose attempt has ended, one row a case.

A row reads: an attempt ended like this, asked to leave for that cause (`-`: nobody asked); before it there had been
these ends; the newest checkpoint is of this step -> what the ledger calls it, who starts it again, after how many
seconds, without which nodes, and the exit code of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.policy import HELD, LONGEST_BACKOFF_S, STARTS_AGAIN, Decision, Facts, decide
from launcher.host.judge.verdict import Verdict
from megatron_rl.contract.attempt_records import AttemptEnd, Drain

SAVED = Verdict("drained", 40, None, None)
EMPTY = Verdict("drained", None, None, None)
DONE = Verdict("finished", 300, None, None)
CONFIG = Verdict("misconfigured", 0, "no such file: data.json", 0)
LOST = Verdict("lost", None, "its batch script was killed", None)


def crash(step: int | None = 47, error: str = "RuntimeError: boom", node: str | None = "n3") -> Verdict:
    return Verdict("crashed", step, error, 3, node, "training")


def hang(step: int = 47, node: str = "n3") -> Verdict:
    return Verdict("crashed", step, "silent for 1800 s", 3, node, "generating", hung=True)


def ended(verdict: Verdict, checkpoint: int = 40, cause: str | None = None, then: str = "requeue") -> AttemptEnd:
    line = AttemptEnd(1, 0.0, verdict.outcome, step=verdict.step, error=verdict.error, node=verdict.node)
    line = line._replace(rank=verdict.rank, phase=verdict.phase)
    return line._replace(cause=cause, checkpoint=checkpoint, then=then)


OTHER = crash(44, "ValueError: another one", "n7")

# Earlier ends, all with the checkpoint of step 40
PREEMPTED = ended(SAVED, cause="preempted")
EMPTY_OUT = ended(EMPTY, cause="preempted")
UNKNOWN = ended(EMPTY, cause="signal")
TOO_SHORT = ended(EMPTY, cause="time limit")
TOO_LATE = [ended(EMPTY, checkpoint, cause="time limit") for checkpoint in (20, 40)]  # saved, and then did not leave
ANOTHER = ended(OTHER)
SINCE_LOST = ended(OTHER, 60)  # its checkpoint turned out to be damaged
THE_SAME = ended(crash())
WITHOUT_N3 = ended(crash())._replace(excluded=["n3"])
NEVER_BEGAN = Verdict("crashed", None, "it could not be started: execve(): python3: No such file", 3, "n3")
NO_ROOM_ON_NODE = NEVER_BEGAN._replace(error="it could not be started: Write failed because No space left on device")
NOT_UNPACKED = NO_ROOM_ON_NODE._replace(error="the image could not be unpacked: No space left on device", rank=None)
UNUSABLE_IMAGE = Verdict("crashed", error="the image could not be unpacked: FATAL ERROR: Bad inode number")  # nowhere
NO_ROOM_IN_TMP = crash(error="on its node's own disk: OSError: [Errno 28] No space left on device: '/tmp/x'")
NO_ROOM = crash(error="OSError: [Errno 28] No space left on device: 'metrics.jsonl'")
READ_ONLY = crash(error="Read-only file system: '/runs/r/attempts/003'; it left with exit code 1 without a report")
MISNAMED = ended(crash(error="Other"))
HUNG = ended(hang())
LATER = ended(crash(None, str(NEVER_BEGAN.error)))
UNSEEN = ended(LOST)

# fmt: off
TABLE: list[tuple[Verdict, str, list[AttemptEnd], int, str, str, float, str, int]] = [
    # ended          cause           before                          ckpt  outcome          then     delay  without exit
    (DONE,           "-",            [],                              300, "finished",      "over",      0, "",    0),
    (DONE,           "preempted",    [],                              300, "finished",      "over",      0, "",    0),
    (DONE,           "cancelled",    [],                              300, "finished",      "over",      0, "",    0),
    # Somebody wants the nodes back: it comes back, as often as it takes.
    (SAVED,          "preempted",    [],                               40, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "preempted",    [],                                0, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "preempted",    [EMPTY_OUT] * 9,                   0, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "preempted",    [EMPTY_OUT] * 10,                  0, "drained",       "requeue",  30, "",   75),
    (EMPTY,          "preempted",    [EMPTY_OUT] * 99,                  0, "drained",       "requeue", 900, "",   75),
    (SAVED,          "requeue",      [],                               40, "drained",       "requeue",   0, "",   75),
    (SAVED,          "signal",       [UNKNOWN] * 9,                    40, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "signal",       [UNKNOWN] * 3,                    40, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "signal",       [UNKNOWN] * 4,                    40, "crashed",       "held",      0, "",    1),
    (crash(),        "signal",       [],                               40, "crashed",       "requeue",  30, "",    1),
    (LOST,           "preempted",    [],                               40, "lost",          "requeue",   0, "",   75),
    # The user wants it to stop: it stays away, whatever else happens.
    (SAVED,          "cancelled",    [],                               40, "stopped",       "over",      0, "",    0),
    (EMPTY,          "cancelled",    [],                                0, "stopped",       "over",      0, "",    0),
    (LOST,           "cancelled",    [],                               40, "stopped",       "over",      0, "",    0),
    (crash(),        "cancelled",    [],                               40, "crashed",       "over",      0, "",    1),
    # The time limit: as long as something comes of it.
    (SAVED,          "time limit",   [TOO_SHORT] * 99,                 40, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "time limit",   [TOO_SHORT],                      40, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "time limit",   [TOO_SHORT] * 2,                  40, "crashed",       "held",      0, "",    1),
    (EMPTY,          "time limit",   [TOO_SHORT] * 2,                  60, "drained",       "requeue",   0, "",   75),
    (EMPTY,          "time limit",   TOO_LATE,                         40, "drained",       "requeue",   0, "",   75),
    # A crash: again after a while, and elsewhere once a node is suspect.
    (crash(),        "-",            [],                                0, "crashed",       "requeue",  30, "",    1),
    (crash(),        "-",            [ANOTHER],                        46, "crashed",       "requeue",  30, "",    1),
    (crash(),        "-",            [ANOTHER],                        40, "crashed",       "requeue",  60, "",    1),
    (crash(),        "-",            [ANOTHER, PREEMPTED],             40, "crashed",       "requeue",  60, "",    1),
    (crash(),        "-",            [SINCE_LOST],                     40, "crashed",       "requeue",  60, "",    1),
    (crash(),        "-",            [ANOTHER] * 2,                    40, "crashed",       "held",    120, "",    1),
    (crash(),        "-",            [ANOTHER] * 2,                    46, "crashed",       "requeue",  30, "",    1),
    (crash(),        "-",            [ANOTHER] * 2 + [PREEMPTED] * 9,  40, "crashed",       "held",    120, "",    1),
    (crash(),        "-",            [THE_SAME],                       40, "crashed",       "requeue",  60, "n3",  1),
    (crash(),        "-",            [THE_SAME],                       46, "crashed",       "requeue",  30, "n3",  1),
    (crash(),        "-",            [WITHOUT_N3],                     46, "crashed",       "held",     30, "n3",  1),
    (crash(node="4"), "-",           [THE_SAME],                       46, "crashed",       "held",     30, "",    1),
    (crash(node=None), "-",          [THE_SAME],                       46, "crashed",       "held",     30, "",    1),
    (crash(48),      "-",            [THE_SAME],                       46, "crashed",       "requeue",  30, "n3",  1),
    (crash(),        "-",            [MISNAMED],                       46, "crashed",       "requeue",  30, "n3",  1),
    (crash(None),    "-",            [ended(crash(None))],             40, "crashed",       "requeue",  60, "n3",  1),
    (crash(),        "preempted",    [],                               40, "crashed",       "requeue",  30, "",    1),
    (crash(),        "time limit",   [ANOTHER] * 2,                    40, "crashed",       "held",    120, "",    1),
    # Somebody had a look and resumed it: all tries again.
    (crash(),        "-",            [ended(crash(), then="held")],    40, "crashed",       "requeue",  30, "",    1),
    # A hang is a crash.
    (hang(),         "-",            [],                               40, "crashed",       "requeue",  30, "",    1),
    (hang(48),       "-",            [HUNG],                           46, "crashed",       "requeue",  30, "n3",  1),
    (hang(48, "n4"), "-",            [HUNG],                           46, "crashed",       "requeue",  30, "",    1),
    (hang(),         "-",            [HUNG],                           46, "crashed",       "requeue",  30, "n3",  1),
    (hang(node="4"), "-",            [HUNG],                           46, "crashed",       "held",     30, "",    1),
    # A full disk is nobody's fault and may take a while.
    (NO_ROOM,        "-",            [ended(NO_ROOM)] * 9,             40, "crashed",       "requeue", 900, "",    1),
    (READ_ONLY,      "-",            [ended(READ_ONLY)] * 9,           40, "crashed",       "requeue", 900, "",    1),
    (crash(),        "-",            [ended(NO_ROOM)] * 9,             40, "crashed",       "requeue",  30, "",    1),
    # A node's own disk is that node's fault, and nobody makes room there.
    (NO_ROOM_ON_NODE, "-",           [],                               40, "crashed",       "requeue",  30, "n3",  1),
    (NOT_UNPACKED,   "-",            [],                               40, "crashed",       "requeue",  30, "n3",  1),
    (UNUSABLE_IMAGE, "-",            [],                               40, "crashed",       "requeue",  30, "",    1),
    (UNUSABLE_IMAGE, "-",            [ended(UNUSABLE_IMAGE)],          40, "crashed",       "held",     60, "",    1),
    (UNUSABLE_IMAGE, "-",            [ended(NOT_UNPACKED)],            40, "crashed",       "requeue",  60, "",    1),
    (NO_ROOM_IN_TMP, "-",            [],                               40, "crashed",       "requeue",  30, "n3",  1),
    (NO_ROOM_ON_NODE, "-",           [ANOTHER] * 2,                    40, "crashed",       "held",    120, "n3",  1),
    # Ranks that never began: the same on two nodes is nobody's but ours.
    (NEVER_BEGAN,    "-",            [],                               40, "crashed",       "requeue",  30, "",    1),
    (NEVER_BEGAN,    "-",            [ended(NEVER_BEGAN)],             40, "crashed",       "requeue",  60, "n3",  1),
    (NEVER_BEGAN._replace(node="4"), "-",  [ended(NEVER_BEGAN)],       40, "crashed",       "held",     60, "",    1),
    (NEVER_BEGAN._replace(node=None), "-", [ended(NEVER_BEGAN)],       40, "crashed",       "held",     60, "",    1),
    (NEVER_BEGAN._replace(node="4"), "-",  [ended(NO_ROOM_ON_NODE)],   40, "crashed",       "requeue",  60, "",    1),
    (NEVER_BEGAN._replace(node="4"), "-",  [LATER],                    40, "crashed",       "requeue",  60, "",    1),
    # The batch script was killed and nobody knows why: as a crash without a word.
    (LOST,           "-",            [],                               40, "lost",          "requeue",  30, "",    1),
    (LOST,           "-",            [UNSEEN],                         40, "lost",          "requeue",  60, "",    1),
    (LOST,           "-",            [UNSEEN, ANOTHER],                40, "lost",          "held",    120, "",    1),
    (LOST,           "node failure", [ANOTHER] * 2,                    40, "lost",          "requeue",   0, "",   75),
    # Wrong for good.
    (CONFIG,         "-",            [],                               40, "misconfigured", "held",      0, "",   78),
    (CONFIG,         "preempted",    [],                               40, "misconfigured", "held",      0, "",   78),
]
# fmt: on


def test_what_becomes_of_the_job():
    for row in TABLE:
        verdict, cause, before, checkpoint, outcome, then, delay_s, without, code = row
        decision = decide(before, verdict, asked(cause), Facts(checkpoint))
        told = (decision.outcome, decision.then, decision.delay_s, ",".join(decision.exclude), decision.exit_code)
        assert told == (outcome, then, delay_s, without, code), row
        assert decision.message or then != "held", "a job that waits for the user says why"


def asked(cause: str | None) -> Drain | None:
    return None if cause in ("-", None) else Drain(cause, "somebody", 0.0)


BAD = ended(EMPTY, 40, "bad nodes")
STAYS = ended(LOST, 40, "node failure", then="stays")

# fmt: off
NODES: list[tuple[Verdict, str, list[AttemptEnd], Facts, str, str | None, str, str]] = [
    # ended    cause        before     nodes                    outcome     cause           then       without
    (EMPTY,   "bad nodes", [],        Facts(40, bad=["n2"]),   "drained", "bad nodes",    "requeue", "n2"),
    (EMPTY,   "bad nodes", [BAD] * 3, Facts(40, bad=["n2"]),   "drained", "bad nodes",    "requeue", "n2"),
    (EMPTY,   "bad nodes", [BAD] * 4, Facts(40, bad=["n2"]),   "crashed", "bad nodes",    "held",    "n2"),
    (crash(), "-",         [],        Facts(40, dead=["n9"]),  "lost",    "node failure", "requeue", "n9"),
    (crash(), "-",         [ended(crash())] * 9, Facts(40, dead=["n9"]), "lost", "node failure", "requeue", "n9"),
    (EMPTY,   "requeue",   [],        Facts(40, dead=["n9"], returning=True), "drained", "node failure", "slurm", "n9"),
    (SAVED,   "preempted", [],        Facts(40, dead=["n9"], bad=["n2"]), "drained", "preempted", "requeue", "n2,n9"),
    (SAVED,   "cancelled", [],        Facts(40, dead=["n9"]),  "stopped", "cancelled",    "over",    ""),
    (hang(),  "-",         [],        Facts(40, dead=["n9"]),  "crashed", None,           "requeue", "n9"),
    (hang(48, "n9"), "-",  [],        Facts(40, dead=["n9"]),  "lost",    "node failure", "requeue", "n9"),
    # Where the other nodes of the allocation suffice, they go on at once; but not for ever, and not against a wish.
    (crash(), "-",         [],        Facts(40, dead=["n9"], suffice=True), "lost", "node failure", "stays", "n9"),
    (LOST,    "-",         [STAYS] * 4, Facts(40, dead=["n9"], suffice=True), "lost", "node failure", "stays", "n9"),
    (crash(), "-",         [STAYS] * 5, Facts(40, dead=["n9"], suffice=True), "lost", "node failure", "requeue", "n9"),
    (crash(), "-",         [],        Facts(40, suffice=True), "crashed", None,           "requeue", ""),
    (EMPTY,   "requeue",   [],        Facts(40, dead=["n9"], suffice=True), "drained", "node failure", "requeue", "n9"),
    (LOST,    "-",  [], Facts(40, dead=["n9"], suffice=True, returning=True), "lost", "node failure", "slurm", "n9"),
]
# fmt: on


def test_nodes_that_are_bad_or_dead_are_left_behind():
    for row in NODES:
        verdict, cause, before, facts, outcome, said, then, without = row
        decision = decide(before, verdict, asked(cause), facts)
        told = (decision.outcome, decision.cause, decision.then, ",".join(decision.exclude))
        assert told == (outcome, said, then, without), row


@pytest.mark.parametrize(
    ("cause", "facts", "then"),
    [
        ("preempted", Facts(), "requeue"),
        ("time limit", Facts(), "requeue"),
        ("requeue", Facts(returning=True), "slurm"),
        ("time limit", Facts(requeueable=False), "successor"),
        ("preempted", Facts(requeueable=False), "successor"),
        ("time limit", Facts(can_return=False, requeueable=False), "over"),
    ],
)
def test_who_starts_it_again(cause, facts, then):
    assert decide([], SAVED, asked(cause), facts).then == then


def test_in_somebodys_own_allocation_a_crash_is_told_and_left_to_them():
    decision = decide([], crash(), None, Facts(can_return=False, requeueable=False))
    assert (decision.outcome, decision.then, decision.exit_code) == ("crashed", "over", 1)
    full = decide([], NO_ROOM, None, Facts(can_return=False, requeueable=False))
    assert (full.then, full.message) == ("over", "make room there; the run resumes from its newest checkpoint")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("RuntimeError: [10.0.0.3:41231] closed", "RuntimeError: [10.0.0.4:33001] closed", True),
        ("KeyError: <Thing at 0x7f3a>", "KeyError: <Thing at 0x55ff>", True),
        ("KeyError: 'loss'", "KeyError: 'reward'", False),
    ],
)
def test_the_same_error_need_not_have_the_same_numbers(one, other, same):
    decision = decide([ended(crash(error=one), 40)], crash(error=other, node="n4"), None, Facts(46))
    assert (decision.then == HELD) is same


def test_the_pause_doubles_up_to_a_quarter_of_an_hour():
    assert decide([], crash(), None, Facts(backoff_s=2.0)).delay_s == 2.0
    assert decide([ended(OTHER, 0)], crash(), None, Facts(backoff_s=2.0)).delay_s == 4.0
    assert decide([ended(OTHER, 0)], crash(), None, Facts(backoff_s=600.0)).delay_s == LONGEST_BACKOFF_S


ENDS = st.sampled_from(
    [(crash(), None), (OTHER, None), (LOST, None), (SAVED, "preempted"), (EMPTY, "preempted"), (LOST, "node failure")]
)


@given(ends=st.lists(ENDS, max_size=30), checkpoints=st.lists(st.booleans(), min_size=30, max_size=30))
def test_a_run_is_held_only_for_its_own_faults_and_soon_when_it_has_any(ends, checkpoints):
    """Whatever the order of preemptions, lost nodes, crashes and checkpoints."""
    history: list[AttemptEnd] = []
    newest, without = 0, 0
    for (verdict, cause), saves in zip(ends, checkpoints, strict=False):
        if saves:
            newest, without = newest + 1, 0
        decision = decide(history, verdict, asked(cause), Facts(newest))
        own_fault = cause is None
        without += own_fault
        assert own_fault or decision.then in STARTS_AGAIN
        assert decision.then == HELD if without >= 3 else True
        history.append(line_of(decision, verdict, newest))
        if decision.then == HELD:
            without = 0


def line_of(decision: Decision, verdict: Verdict, checkpoint: int) -> AttemptEnd:
    return ended(verdict, checkpoint, decision.cause, decision.then)._replace(outcome=decision.outcome)


def decided_in_turn(ends: Sequence[tuple[Verdict, str | None]]) -> list[Decision]:
    """Decisions after each of these ends of one run, which saves nothing after step 40."""
    history: list[AttemptEnd] = []
    decisions = []
    for verdict, cause in ends:
        decisions.append(decide(history, verdict, asked(cause), Facts(40)))
        history.append(line_of(decisions[-1], verdict, 40))
    return decisions


DIED_OF_IT = crash(error="it left with exit code 1 without an error report; its log ends: " + str(NO_ROOM.error))
NOT_SAVED = crash(error="CheckpointError: step 60 was not saved: rank 1: Disk quota exceeded: /runs/r")


@pytest.mark.parametrize("error", [NO_ROOM, DIED_OF_IT, NOT_SAVED], ids=["reported", "in the log", "of a save"])
def test_a_full_disk_never_holds_a_run_and_leaves_time_to_make_room(error):
    decisions = decided_in_turn([(error, None)] * 50)
    assert {(decision.then, decision.delay_s) for decision in decisions} == {("requeue", 900.0)}


@pytest.mark.parametrize(
    "causes",
    [["preempted"], ["requeue"], ["node failure"], ["preempted", "requeue"], ["preempted", "node failure", "requeue"]],
)
def test_drains_with_nothing_saved_come_back_later_and_later_whatever_their_causes(causes):
    ends = [(LOST if cause == "node failure" else EMPTY, cause) for cause in islice(cycle(causes), 200)]
    decisions = decided_in_turn(ends)
    assert {decision.then for decision in decisions} == {"requeue"}
    delays = [decision.delay_s for decision in decisions]
    assert delays[:16] == [0.0] * 10 + [30.0, 60.0, 120.0, 240.0, 480.0, 900.0]
    assert set(delays[16:]) == {900.0}


def test_a_mount_that_the_profile_asks_for_is_no_fault_of_a_node():
    """A crash twice on one node has it avoided; a directory that is missing is missing on the next one too."""
    wrong = crash(None, "it left with exit code 1; its log ends: enroot-mount: failed to mount: /d at /d: No such file")
    boom = crash(None)
    assert decide([ended(boom)], boom, None, Facts()).exclude == ("n3",)
    assert decide([ended(wrong)], wrong, None, Facts()).exclude == ()


def test_the_reason_to_hold_a_run_whose_ranks_never_began_says_where_it_failed():
    before = ended(NOT_UNPACKED)._replace(excluded=["n3"])
    elsewhere, again = (decide([before], NOT_UNPACKED._replace(node=node), None, Facts()) for node in ("n4", "n3"))
    assert elsewhere.message == "the same error before the ranks had started, on two nodes"
    assert again.message == "the same error before the ranks had started, twice on n3, beside which no other was left"
    everywhere = decide([ended(UNUSABLE_IMAGE)], UNUSABLE_IMAGE, None, Facts())
    assert everywhere.message == "the same error before the ranks had started, on all nodes"
