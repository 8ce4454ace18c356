"""Parallel sizes, and the reasons why some are impossible. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.fixed_models import FixedModel
from megatron_rl.recipe.job import JobConfig, PlacementConfig, StageEnds, data_parallel_size
from megatron_rl.recipe.layer_sizes import stage_layers
from megatron_rl.recipe.model import ModelConfig


class LayoutError(Exception):
    """The layout is impossible. Each of `problems` names the recipe key that is to blame and gives the arithmetic; the
    last one ends with the nearest valid layouts."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of `job`, `placement`, `distill.replicas` and `reward.replicas`, for a given number of nodes."""

    nodes: int
    gpus_per_node: int
    partitioned: bool
    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    inference_nodes: int
    """Nodes that only generate; 0: co-located."""
    asked_inference_tp: int | None
    tp_across_nodes: bool
    starts_workers: bool
    """Whether an inference replica is one process on each of its nodes, which starts the workers on its GPUs itself.
    Co-located, such a replica is there beside the ranks; otherwise they generate themselves."""
    inference_pp: int = 1
    inference_dp: int = 1
    inference_ep: int = 1
    stage_ends: StageEnds = (None, None)
    nodes_per_replica: int | None = None
    """Nodes that an inference replica must have; None: those that it needs."""
    fixed: tuple[FixedModel, ...] = ()
    """Other models with nodes to themselves, the last ones, in the order of the nodes."""

    @classmethod
    def of(
        cls,
        job: JobConfig,
        placement: PlacementConfig,
        nodes: int,
        engine: str = "native",
        fixed: tuple[FixedModel, ...] = (),
    ) -> Sizes:
        """Return the sizes of a recipe on `nodes` nodes.

        Args:
            engine: inference.engine of the recipe.
            fixed: models of the recipe that have separate nodes.
        """
        training, inference = placement.training, placement.inference
        return cls(
            nodes=nodes,
            gpus_per_node=job.gpus_per_node,
            partitioned=placement.mode == "partitioned",
            tp=training.tp,
            pp=training.pp,
            cp=training.cp,
            ep=training.ep,
            sequence_parallel=training.sequence_parallel,
            inference_nodes=inference.nodes or 0,
            asked_inference_tp=inference.tp,
            tp_across_nodes=placement.tp_across_nodes,
            starts_workers=capabilities_of(engine).starts_workers,
            inference_pp=inference.pp,
            inference_dp=inference.dp,
            inference_ep=inference.ep,
            stage_ends=training.stage_ends,
            nodes_per_replica=inference.nodes_per_replica,
            fixed=fixed,
        )

    @property
    def inference_tp(self) -> int:
        """Tensor parallel size of one inference replica; default: the training's `tp`."""
        return self.asked_inference_tp or self.tp

    @property
    def has_replicas(self) -> bool:
        """Whether replicas answer, each a separate step, instead of the training ranks."""
        return self.partitioned or self.starts_workers

    @property
    def shares_devices(self) -> bool:
        """Whether replicas take turns with the training ranks on the same devices."""
        return self.has_replicas and not self.partitioned

    @property
    def replica_gpus(self) -> int:
        """GPUs of one inference replica; on CPUs processes."""
        return self.inference_tp * self.inference_pp * self.inference_dp

    @property
    def replica_nodes(self) -> int:
        return -(-self.replica_gpus // self.gpus_per_node)

    @property
    def replica_processes(self) -> int:
        """Processes of one inference replica: one for each node if that starts the workers, else one for each GPU."""
        return self.replica_nodes if self.starts_workers else self.replica_gpus

    @property
    def fixed_nodes(self) -> int:
        return sum(one.nodes for one in self.fixed)

    @property
    def nodes_of_fixed(self) -> dict[str, range]:
        """Nodes of each other model, by the kind of its replicas."""
        ends = [*accumulate((one.nodes for one in self.fixed), initial=self.nodes - self.fixed_nodes)]
        return {one.kind: range(*of) for one, of in zip(self.fixed, pairwise(ends), strict=True)}

    @property
    def training_nodes(self) -> int:
        return self.nodes - self.inference_nodes - self.fixed_nodes

    @property
    def training_world(self) -> int:
        return self.training_nodes * self.gpus_per_node

    @property
    def generating(self) -> int:
        return (self.inference_nodes or self.training_nodes) * self.gpus_per_node

    @property
    def model_size(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return data_parallel_size(self.training_world, self.tp, self.pp, self.cp)

    @property
    def cp_crosses_nodes(self) -> bool:
        """Whether a context-parallel group spans nodes. Its ranks are `tp` apart, so it covers tp x cp adjacent
        ranks."""
        return self.cp > 1 and self.gpus_per_node % (self.tp * self.cp) > 0

    def stages(self, model: ModelConfig) -> list[range]:
        """Layers of each stage of training, from 0."""
        return stage_layers(model.num_layers, self.pp, *self.stage_ends)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.training_world // (self.tp * self.ep * self.pp)

    @property
    def replicas(self) -> int:
        return self.generating // self.replica_gpus


def check(sizes: Sizes, node_gpus: int | None, model: ModelConfig | None) -> tuple[str, ...]:
    """Return the reasons why the layout is impossible; empty if it is possible. Later rules presuppose the earlier
    ones."""
    for rules in (_node(sizes, node_gpus), _split(sizes), _training(sizes), _generating(sizes), _fits(sizes, model)):
        problems = tuple(rules)
        if problems:
            return problems
    return ()


def _node(s: Sizes, node_gpus: int | None) -> Iterator[str]:
    if node_gpus is not None and s.gpus_per_node > node_gpus:
        ranks = s.nodes * s.gpus_per_node
        yield (
            f"job.gpus_per_node {s.gpus_per_node} is more than the {node_gpus} GPUs that a node of this cluster has; "
            f"{s.nodes} x {s.gpus_per_node} = {ranks} ranks need {-(-ranks // node_gpus)} such nodes"
        )


def _split(s: Sizes) -> Iterator[str]:
    if not s.partitioned and s.inference_nodes:
        yield (
            f"placement.inference.nodes {s.inference_nodes} belongs to placement.mode partitioned: "
            "in mode colocated all nodes train and generate"
        )
    elif s.partitioned and not s.inference_nodes:
        yield f"placement.mode partitioned needs placement.inference.nodes, the nodes of {s.nodes} that only generate"
    elif s.training_nodes < 1:
        apart = {"placement.inference.nodes": s.inference_nodes} if s.inference_nodes else {}
        apart |= {f"{one.key}.nodes": one.nodes for one in s.fixed}
        names = " and ".join(f"{key} {nodes}" for key, nodes in apart.items())
        counts = " - ".join(map(str, (s.nodes, *apart.values())))
        verb = "leave" if len(apart) > 1 else "leaves"
        yield f"{names} of job.nodes {s.nodes} {verb} {counts} = {s.training_nodes} nodes to train"
    for one in s.fixed if s.training_nodes > 0 else ():
        if s.gpus_per_node % one.tp:
            yield (
                f"{one.key}.tp {one.tp} does not divide job.gpus_per_node {s.gpus_per_node} "
                f"({_remainder(s.gpus_per_node, one.tp)}): a replica of the {one.name} stays on one node"
            )


def _training(s: Sizes) -> Iterator[str]:
    key, world = "placement.training", s.training_world
    if world % s.model_size:
        yield (
            f"{key}.tp {s.tp} x pp {s.pp} x cp {s.cp} = {s.model_size} does not divide the "
            f"{s.training_nodes} x {s.gpus_per_node} = {world} ranks that train ({_remainder(world, s.model_size)})"
        )
    elif s.cp * s.dp % s.ep:
        yield (
            f"{key}.ep {s.ep} does not divide cp x dp = {s.cp} x {s.dp} = {s.cp * s.dp}, the ranks that share experts "
            f"({_remainder(s.cp * s.dp, s.ep)})"
        )
    if s.training_nodes > 1:
        yield from _across_nodes(f"{key}.tp", s.tp, s)
    if s.sequence_parallel and s.tp == 1:
        yield f"{key}.sequence_parallel splits activations between tensor-parallel ranks, and {key}.tp is 1"


def _generating(s: Sizes) -> Iterator[str]:
    key, gpus, each = "placement.inference", s.replica_gpus, s.gpus_per_node
    name = f"{key}.tp {s.inference_tp}"
    if gpus != s.inference_tp:
        name += f" x pp {s.inference_pp} x dp {s.inference_dp} = {gpus}"
    if s.generating % gpus:
        nodes = s.inference_nodes or s.training_nodes
        yield (
            f"{name} does not divide the {nodes} x {each} = {s.generating} ranks that generate "
            f"({_remainder(s.generating, gpus)})"
        )
    elif s.shares_devices and each % gpus:
        yield (
            f"{name} does not divide job.gpus_per_node {each} ({_remainder(each, gpus)}): a vLLM is on the GPUs of one "
            "node's training ranks"
        )
        return
    elif s.partitioned and each % gpus and gpus % each:
        yield (
            f"{name} is neither a number of whole nodes nor an equal share of a node with {each} GPUs "
            f"({_remainder(max(gpus, each), min(gpus, each))})"
        )
    elif s.inference_dp > 1 and (part := gpus // s.inference_dp) % each and each % part:
        yield (
            f"{key}.tp {s.inference_tp} x pp {s.inference_pp} = {part}, each of the {s.inference_dp} parts of a "
            f"replica, is neither a number of whole nodes nor an equal share of a node with {each} GPUs "
            f"({_remainder(max(part, each), min(part, each))})"
        )
    if s.nodes_per_replica not in (None, s.replica_nodes):
        yield (
            f"{key}.nodes_per_replica is {s.nodes_per_replica}, but the {gpus} GPUs of a replica are on "
            f"{s.replica_nodes} node{'s' * (s.replica_nodes > 1)} with job.gpus_per_node {each}"
        )
    if s.inference_ep not in (1, whole := s.inference_tp * s.inference_dp):
        yield (
            f"{key}.ep {s.inference_ep} is neither 1 nor tp x dp = {s.inference_tp} x {s.inference_dp} = {whole}: "
            "the GPUs of a stage share its experts all together or not whole"
        )
    yield from _across_nodes(f"{key}.tp", s.inference_tp, s)


def _across_nodes(key: str, tp: int, s: Sizes) -> Iterator[str]:
    if s.gpus_per_node % tp and not s.tp_across_nodes:
        yield (
            f"{key} {tp} does not divide job.gpus_per_node {s.gpus_per_node} "
            f"({_remainder(s.gpus_per_node, tp)}): tensor-parallel groups would cross nodes"
        )


def _fits(s: Sizes, model: ModelConfig | None) -> Iterator[str]:
    if model is None:
        return
    training, inference = "placement.training", "placement.inference"
    yield from (f"{training}.{problem}" for problem in model.undivided(s.tp, s.pp, s.ep, stage_ends=s.stage_ends))
    if s.inference_tp != s.tp:  # otherwise the line above reports it
        # An engine that starts its workers gets whole weights, and shares a key/value head in any layout.
        training_tp = None if s.starts_workers else s.tp
        yield from (f"{inference}.{problem}" for problem in model.undivided(s.inference_tp, training_tp=training_tp))
    if s.inference_pp > model.num_layers:
        yield f"{inference}.pp {s.inference_pp} is more than model.num_layers {model.num_layers}"
    if s.inference_ep > 1 and (experts := model.num_experts or 0) % s.inference_ep:
        yield (
            f"{inference}.ep {s.inference_ep} does not divide model.num_experts {experts} "
            f"({_remainder(experts, s.inference_ep)})"
        )
    if model.num_experts is None and (key := "ep" if s.inference_ep > 1 else "dp" if s.inference_dp > 1 else None):
        yield (
            f"{inference}.{key} needs model.num_experts: without experts to share, smaller replicas do the same: leave "
            "it out"
        )
    if model.num_experts and s.tp > 1 and not s.sequence_parallel:
        yield (
            f"{training}.tp {s.tp} with model.num_experts {model.num_experts} needs {training}.sequence_parallel; "
            "without it every tensor-parallel rank would send all tokens to the experts"
        )


def _remainder(value: int, size: int) -> str:
    return f"{value} = {value // size} x {size} + {value % size}"
