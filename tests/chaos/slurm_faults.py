"""Faults of Slurm: its nodes, its queue and its daemons."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator

from fault import Fault, Target, Undo, nothing_to_undo
from lab import LabError, wait_until
from records import preempt

NO_SIGNAL = {"SlurmctldParameters=preempt_send_user_signal\n": ""}
NO_GRACE = {"GraceTime=20": "GraceTime=0"}
LIMIT_S = 300.0

_whole_cluster = threading.Lock()
"""Held during a fault of the whole cluster, since two at once could not be undone one by one."""


def nodes_of(target: Target) -> list[str]:
    """Nodes of the attempt in progress."""
    lines = target.run.ledger()
    return list(lines[-1]["nodes"]) if lines and lines[-1]["event"] == "start" else []


def _obeyed(target: Target, *command: str) -> bool:
    """Whether Slurm accepted an order; it may be down for another fault."""
    try:
        target.lab.run(*command)
    except LabError:
        return False
    return True


def _insist(target: Target, *command: str) -> None:
    wait_until(" ".join(command), lambda: _obeyed(target, *command), LIMIT_S)


def lose_a_node(target: Target, chance: random.Random) -> Undo | None:
    nodes = nodes_of(target)
    if not nodes:
        return None
    node = chance.choice(nodes)
    try:
        target.lab.kill_node(node)
    except LabError:  # another fault has switched it off
        return None
    return lambda: _switch_on(target, node)


def _switch_on(target: Target, node: str) -> None:
    try:
        target.lab.restart_node(node)
    except LabError:  # on a busy machine, or while another fault has stopped the controller
        target.lab.wait_until_up(node, limit=LIMIT_S)


def drain_a_node(target: Target, chance: random.Random) -> Undo | None:
    nodes = nodes_of(target)
    node = chance.choice(nodes) if nodes else ""
    if not node or not _obeyed(target, "scontrol", "update", f"nodename={node}", "state=drain", "reason=chaos"):
        return None
    return lambda: wait_until(f"{node} is not drained", lambda: _undrained(target, node), LIMIT_S)


def _undrained(target: Target, node: str) -> bool:
    """Whether jobs may start on a node again, after an order to let them."""
    _obeyed(target, "scontrol", "update", f"nodename={node}", "state=resume")
    with contextlib.suppress(LabError):
        return "DRAIN" not in target.lab.run("scontrol", "show", "node", node, "--oneliner")
    return False


def requeue(target: Target, chance: random.Random) -> Undo | None:
    return nothing_to_undo if _obeyed(target, "scontrol", "requeue", target.run.job) else None


def ask_to_requeue(target: Target, chance: random.Random) -> Undo | None:
    with contextlib.suppress(AssertionError):  # it cannot be asked now, and says why
        target.login.call("mrl", "requeue", target.run_dir)
        return nothing_to_undo
    return None


def cancel_with_a_save(target: Target, chance: random.Random) -> Undo | None:
    with contextlib.suppress(AssertionError):
        target.login.call("mrl", "cancel", "--drain", target.run_dir)
        return nothing_to_undo
    return None


def take_the_nodes(target: Target, chance: random.Random) -> Undo | None:
    try:
        urgent = preempt(target.login, target.run)
    except LabError:
        return None
    return lambda: _insist(target, "scancel", urgent)


def _configured(changes: dict[str, str]) -> Callable[[Target, random.Random], Undo | None]:
    def hit(target: Target, chance: random.Random) -> Undo | None:
        if not nodes_of(target) or not _whole_cluster.acquire(blocking=False):
            return None
        stack = contextlib.ExitStack()
        stack.callback(_whole_cluster.release)
        try:
            stack.enter_context(target.lab.configured(changes))
            undo = take_the_nodes(target, chance)
        except LabError:
            undo = None
        if undo is None:
            _close(stack)
            return None
        stack.callback(undo)
        return lambda: _close(stack)

    return hit


def _close(stack: contextlib.ExitStack) -> None:
    with contextlib.suppress(LabError):
        stack.close()


def _stopped(daemon: str, signum: signal.Signals) -> Callable[[Target, random.Random], Undo | None]:
    def hit(target: Target, chance: random.Random) -> Undo | None:
        if daemon == "slurmdbd" and not target.lab.accounting:
            return None
        if not _whole_cluster.acquire(blocking=False):
            return None
        target.lab.stop_daemon(daemon, signum)

        def undo() -> None:
            try:
                target.lab.continue_daemon(daemon)
                wait_until("the controller answers", lambda: _obeyed(target, "squeue"), LIMIT_S)
            finally:
                _whole_cluster.release()

        return undo

    return hit


def _faults() -> Iterator[Fault]:
    yield Fault("node lost", lose_a_node)
    yield Fault("node drained", drain_a_node)
    yield Fault("requeued with scontrol", requeue)
    yield Fault("asked to requeue", ask_to_requeue)
    yield Fault("cancelled with a save", cancel_with_a_save)
    yield Fault("preempted with a signal", take_the_nodes)
    yield Fault("preempted without a signal", _configured(NO_SIGNAL))
    yield Fault("preempted without grace", _configured(NO_GRACE))
    yield Fault("slurmctld stopped", _stopped("slurmctld", signal.SIGTERM))
    yield Fault("slurmctld killed", _stopped("slurmctld", signal.SIGKILL))
    yield Fault("slurmdbd stopped", _stopped("slurmdbd", signal.SIGTERM))


FAULTS = tuple(_faults())
