"""Weights arrive bit for bit from a training world in replicas with their own worlds, for any layouts on both sides.
A death in a transfer ends no other process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import Ranks
from core_helpers import VOCAB, tiny_model, tiny_run
from layout_helpers import Layout, fill, of_whole_tensor, shards_of, version_of, wrong_weights
from transfer_helpers import ROUND_BYTES, host_memory

from megatron_rl.generate.refit import liveness
from megatron_rl.generate.refit.epoch import Epoch, Member, ReplicaLost, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.plan import Box, ModelShare
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.transfer import Receiver, Sender
from megatron_rl.generate.refit.transfer_group import TransferGroup
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.rank.engine_ranks import EngineRanks

pytestmark = pytest.mark.slow

LIMIT = timedelta(seconds=300)
"""Timeout of a transfer: longer than a test may take, so that no transfer reaches it."""
OF_TEST_S = 120.0

WITH_EXPERTS = Layout(tp=2, ep=2, dp=2, sequence_parallel=True)
LAYOUTS = (Layout(tp=2, pp=2), WITH_EXPERTS, WITH_EXPERTS._replace(adapters=True))
"""Layouts of four training ranks."""
ALONE = (Layout(dp=4),)
"""The layouts above have copies beside other ways to split a model."""


def model(layout: Layout) -> Any:
    more = {"lora": {"rank": 1}} if layout.adapters else UNLIKE
    return tiny_model(num_layers=4, **EXPERTS | more if layout.ep > 1 else {})


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
UNLIKE = {
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 24,
    "dtype": "bf16",
    "router": {"score": "sigmoid", "correction_bias": True},
}
"""Layers that differ, with a weight of another dtype."""


def build(layout: Layout, of: Layout, *, trains: bool) -> tuple[Policy, Any]:
    """Build a model split over the ranks of this world. of: layout of training, which determines the model."""
    groups = layout.groups()
    config = tiny_run(model=model(of).model_dump())
    platform = select(config.job)
    if trains:
        policy = build_policy(config.model, VOCAB, platform, sequence_parallel=layout.sequence_parallel)
    else:
        ranks = EngineRanks.form(groups, layout.tp, LIMIT)
        policy = build_policy(config.model, VOCAB, platform, groups=ranks.model_groups(), initialize=False)
        policy.requires_grad_(False).eval()
    return policy, groups


# A rank of a replica


def replicate(rank: int, world: int, number: int, shares: bool, of_ranks: Sequence[Connection]) -> list[str]:
    """Serve the requests of this rank's connection. Each is answered at once, and again with its result."""
    connection = of_ranks[rank]
    connection.send(os.getpid())
    replica, results = ReplicaRank(number, rank, world, shares), []
    while (request := connection.recv()) is not None:
        what, argument = request
        connection.send("begun")
        try:
            results.append(str(getattr(replica, what)(argument)))
        except TransferFailed as error:
            results.append(f"failed: {error}")
        connection.send(results[-1])
    return results


class ReplicaRank:
    def __init__(self, number: int, rank: int, tp: int, shares: bool) -> None:
        """shares: whether its ranks ask for shares of the model, as an engine with its own layout does."""
        self.number, self.rank, self.tp, self.shares = number, rank, tp, shares
        self.group: TransferGroup | None = None

    def build(self, of: Layout) -> None:
        self.policy, _ = build(Layout(tp=self.tp), of, trains=False)
        needed = ModelShare(self.rank, self.tp) if self.shares else weights_by_box(self.policy)
        self.receiver = Receiver(needed, host_memory, ROUND_BYTES)

    def receive(self, asked: tuple[int, Epoch | None]) -> None:
        version, epoch = asked
        if epoch is not None:
            if self.group is not None:
                self.group.close()
            self.group = TransferGroup.join(epoch, epoch.member_rank(self.number, 0, self.rank), LIMIT)
            self.receiver.connect(self.group)
        assert self.group is not None
        exchange, self.exchanges = self.group.exchange, 0

        def counted(*messages: Any) -> None:
            self.exchanges += 1
            exchange(*messages)

        self.group.exchange = counted  # type: ignore[method-assign]
        self.receiver.receive(version)
        self.group.exchange = exchange  # type: ignore[method-assign]

    def swap(self, version: int) -> int:
        return version if self.shares else self.receiver.swap()

    def wrong(self, version: int) -> list[str]:
        if not self.shares:
            return wrong_weights(self.policy, version)
        shapes = {shard.key: shard.global_shape for shard in shards_of(self.policy)}
        whole = [Box(key, torch.float32, (0,) * len(shape), shape) for key, shape in shapes.items()]
        adapters = self.policy.adapters is not None
        versions = {each.key: version_of(each.key, version, adapters=adapters) for each in whole}
        tensors = {each.key: (each, of_whole_tensor(each.key, each.shape, versions[each.key])) for each in whole}
        staged = self.receiver.staged()
        covered = torch.tensor(sum(box.elements for box in staged))
        dist.all_reduce(covered)
        assert covered == sum(each.elements for each in whole)
        return [
            box.key
            for box, tensor in staged.items()
            if not torch.equal(tensor, tensors[box.key][1][box.within(tensors[box.key][0])].to(tensor.dtype))
        ]

    def end_in_transfer(self, how: tuple[float, int]) -> None:
        """how: share of the exchanges of a version after which to end, and the signal."""
        assert self.group is not None
        share, signum = how
        end_in_exchange(self.group, int(share * self.exchanges), signum)


def end_in_exchange(group: TransferGroup, number: int, signum: int = signal.SIGKILL) -> None:
    """Kill or stop this process after `number` exchanges."""
    exchange, left = group.exchange, iter(range(number))

    def last(*messages: Any) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signum)
        exchange(*messages)

    group.exchange = last  # type: ignore[method-assign]


# Rank 0 of training


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


class ConnectedReplicas:
    """Stands in for `PoolControl` over a connection to each rank."""

    def __init__(self, connections: Sequence[Sequence[Connection]]) -> None:
        self.connections = connections
        self.processes = [[psutil.Process(each.recv()) for each in of_ranks] for of_ranks in connections]
        self.answered = [True] * len(connections)
        self.of_epoch: list[int] = []
        self.pending: set[int] = set()

    def live(self) -> list[Member]:
        return [
            Member(number, 0, len(processes))
            for number, processes in enumerate(self.processes)
            if self.answered[number] and all(map(is_there, processes))
        ]

    def receive(self, version: int, epoch: Epoch | None) -> None:
        if epoch is not None:
            self.of_epoch = [member.replica for member in epoch.replicas]
        self._begin("receive", (version, epoch))

    def swap(self, version: int, probe: Probe | None) -> Collection[ReplicaStart]:
        received = [number for number in self.of_epoch if self._end(number) == {"None"}]
        self._begin("swap", version, received)
        return {(number, 0) for number in received if self._end(number) == {str(version)}}

    def ask(self, what: str, argument: Any) -> list[set[str]]:
        """Send a request to the replicas of the last epoch, or to all before the first epoch. Returns the results."""
        asked = self.of_epoch or [*range(len(self.connections))]
        self._begin(what, argument, asked)
        return [self._end(number) for number in asked]

    def end(self) -> list[set[str]]:
        """Wait for the pending requests of the epoch's replicas. Returns the results."""
        return [self._end(number) for number in self.of_epoch]

    def kill(self, number: int) -> None:
        for process in self.processes[number]:
            process.kill()

    def have_end(self, number: int, share: float, signum: int = signal.SIGKILL) -> None:
        """Make a replica end by a signal, after a share of the exchanges of the next transfer."""
        self._begin("end_in_transfer", (share, signum), [number])
        self._end(number)

    def go_on(self, number: int) -> None:
        for process in self.processes[number]:
            process.resume()

    def leave(self) -> None:
        for of_ranks in self.connections:
            for connection in of_ranks:
                with suppress(OSError):
                    connection.send(None)

    def _begin(self, what: str, argument: Any, numbers: Sequence[int] | None = None) -> None:
        asked = self.of_epoch if numbers is None else numbers
        for number in asked:
            self._end(number)  # a pending request ends with its epoch
        self.pending |= {*asked}
        for number in asked:
            for connection in self.connections[number]:
                with suppress(OSError):  # a lost rank is noticed below
                    connection.send((what, argument))
        for number in asked:
            if self._heard(number) != {"begun"}:
                self.answered[number] = False
        if dead := {(number, 0) for number in asked if not self.answered[number]}:
            raise ReplicaLost(dead)

    def _end(self, number: int) -> set[str]:
        if number not in self.pending:
            return set()
        self.pending.remove(number)
        return self._heard(number)

    def _heard(self, number: int) -> set[str]:
        """Answers of a replica's ranks; "gone" for a lost rank."""
        return {self._listen(*each) for each in zip(self.connections[number], self.processes[number], strict=True)}

    def _listen(self, connection: Connection, process: psutil.Process) -> str:
        try:
            while not connection.poll(0.05):
                if not is_there(process):
                    return "gone"
            return str(connection.recv())
        except (EOFError, OSError):
            return "gone"


def train(rank: int, _world: int, connections: Sequence[Sequence[Connection]], work: Callable[..., Any]) -> Any:
    replicas = ConnectedReplicas(connections) if rank == 0 else None
    try:
        return work(rank, replicas)
    finally:
        if replicas is not None:
            replicas.leave()


def refit_of(layout: Layout, replicas: ConnectedReplicas | None) -> tuple[Policy, TransferRefit]:
    policy, groups = build(layout, layout, trains=True)
    if replicas is not None:
        replicas.ask("build", layout)
    sender = Sender(weights_by_box(policy), ROUND_BYTES)
    return policy, TransferRefit(sender, groups.control, "gloo", replicas, lambda: False, LIMIT, LIMIT)


def worlds(
    folder: Path,
    training_ranks: int,
    replicas: Sequence[int],
    work: Callable[..., Any],
    sharing: Collection[int] = (),
) -> list[Ranks]:
    """Start the training world, and a world for each replica with its number of ranks.

    sharing: numbers of the replicas whose ranks ask for shares.
    """
    ends = [[multiprocessing.Pipe() for _ in range(ranks)] for ranks in replicas]
    ours, theirs = ([[pair[side] for pair in of_ranks] for of_ranks in ends] for side in (0, 1))
    return [
        Ranks(folder / "training", training_ranks, train, ours, work),
        *(
            Ranks(folder / f"replica-{number}", ranks, replicate, number, number in sharing, theirs[number])
            for number, ranks in enumerate(replicas)
        ),
    ]


def publish_in_layouts(
    layouts: Sequence[Layout], _rank: int, replicas: ConnectedReplicas | None
) -> list[tuple[int, list[set[str]]]]:
    """Publish twice in each layout. Returns the bytes of a publication, and what is wrong on the replicas then."""
    seen = []
    for layout in layouts:
        policy, refit = refit_of(layout, replicas)
        for version in (1, 2):
            fill(policy, version)
            refit.publish(version)
        seen.append((refit.moved_bytes, replicas.ask("wrong", 2) if replicas is not None else []))
        refit.close()
    return seen


Published = Callable[[Sequence[Layout]], dict[Layout, tuple[int, list[set[str]]]]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Publications in several layouts, all by the same worlds."""

    @functools.cache
    def published(layouts: Sequence[Layout]) -> dict[Layout, tuple[int, list[set[str]]]]:
        work = functools.partial(publish_in_layouts, layouts)
        training, *replicas = worlds(tmp_path_factory.mktemp("worlds"), 4, [2, 1, 2], work, [2])
        results = training.results(OF_TEST_S)
        for each in replicas:
            each.results(OF_TEST_S)
        assert {moved for moved, _ in results[0]} == {moved for moved, _ in results[3]}
        return dict(zip(layouts, results[0], strict=True))

    return published


@pytest.mark.parametrize(
    ("layouts", "layout"),
    [pytest.param(LAYOUTS, layout, id=str(layout)) for layout in LAYOUTS]
    + [pytest.param(ALONE, layout, id=str(layout), marks=pytest.mark.slow) for layout in ALONE],
)
def test_replicas_in_any_layout_and_by_shares_have_the_trainers_weights(
    layouts: Sequence[Layout], layout: Layout, published: Published
) -> None:
    moved, wrong = published(layouts)[layout]
    assert wrong == [{"[]"}] * 3
    assert moved > 0


def test_later_versions_of_adapters_are_sent_without_their_base(published: Published) -> None:
    whole, _ = published(LAYOUTS)[WITH_EXPERTS]
    adapters, _ = published(LAYOUTS)[WITH_EXPERTS._replace(adapters=True)]
    assert adapters < whole / 3


# Five replicas pass the weights of two training ranks on.
DEATHS = {
    "in the middle of a chain": (3, 0.5),
    "at the end of a chain, when it has all": (4, 0.95),
    "before a transfer": (1, None),
    "at the head of a chain": (0, 0.2),
}
"""Replica that ends, and the share of the exchanges after which it does."""


def publish_among_deaths(rank: int, replicas: ConnectedReplicas | None) -> dict[str, Any]:
    policy, refit = refit_of(Layout(pp=2), replicas)
    seen: dict[str, Any] = {}

    def publish(version: int, what: str) -> None:
        fill(policy, version)
        refit.publish(version)
        if replicas is not None:
            seen[what] = [*replicas.of_epoch], replicas.ask("wrong", version)

    publish(1, "all")
    for version, (when, (number, share)) in enumerate(DEATHS.items(), 2):
        if replicas is not None:
            replicas.kill(number) if share is None else replicas.have_end(number, share)
        publish(version, when)
    if rank == 1:
        assert refit._group is not None
        end_in_exchange(refit._group, 2)
    try:
        publish(6, "never")
    except RuntimeError as error:
        seen["of a trainer"] = str(error)
    refit.close()
    if replicas is not None:
        seen["of the replica"] = replicas.end()
        seen["its weights"] = replicas.ask("wrong", 5)
    return seen


def test_death_ends_a_transfer_for_all_and_the_next_epoch_excludes_the_dead(tmp_path: Path) -> None:
    training, *replicas = worlds(tmp_path, 2, [1] * 5, publish_among_deaths)
    assert training.join(OF_TEST_S) == [0, -signal.SIGKILL]
    ends = [each.join(OF_TEST_S) for each in replicas]
    assert ends == [[0] if number == 2 else [-signal.SIGKILL] for number in range(5)]
    seen = pickle.loads((training.folder / "result.0").read_bytes())
    left = [*range(5)]
    assert seen["all"] == (left, [{"[]"}] * 5)
    for when, (number, _) in DEATHS.items():
        left.remove(number)
        assert seen[when] == (left, [{"[]"}] * len(left))
    assert "never" not in seen
    (failed,) = seen["of the replica"]
    assert "is over" in failed.pop()
    assert seen["its weights"] == [{"[]"}], "it has not kept the version before"


def publish_to_one_that_stops(_rank: int, replicas: ConnectedReplicas | None) -> list[Any]:
    assert replicas is not None, "one rank trains"
    liveness.SILENCE_S = 5.0
    policy, refit = refit_of(Layout(), replicas)
    seen = []
    for version in (1, 2, 3):
        if version == 2:
            replicas.have_end(0, 0.5, signal.SIGSTOP)
        fill(policy, version)
        refit.publish(version)
        if version == 2:
            replicas.go_on(0)
        seen.append(([*replicas.of_epoch], replicas.ask("wrong", version)))
    refit.close()
    return seen


def test_replica_that_stops_in_a_transfer_is_left_out_and_rejoins_when_it_resumes(tmp_path: Path) -> None:
    training, *replicas = worlds(tmp_path, 1, [1, 1], publish_to_one_that_stops)
    (seen,) = training.results(OF_TEST_S)
    for each in replicas:
        each.results(OF_TEST_S)
    assert seen == [([0, 1], [{"[]"}] * 2), ([1], [{"[]"}]), ([0, 1], [{"[]"}] * 2)]
