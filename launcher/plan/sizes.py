"""Parallel sizes, and the reasons why some are impossible. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.recipe.distill import TeacherReplicas
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.job import JobConfig, PlacementConfig, data_parallel_size
from megatron_rl.recipe.model import ModelConfig


class LayoutError(Exception):
    """The layout is impossible. Each of `problems` names the recipe key that is to blame and gives the arithmetic; the
    last one ends with the nearest valid layouts."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of `job`, `placement` and `distill.replicas`, for a given number of nodes."""

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
    """Whether an inference replica is one process that starts the workers on its GPUs itself. Co-located, such a
    replica is there beside the ranks; otherwise they generate themselves."""
    teacher_nodes: int = 0
    """Nodes that only hold the teacher, the last ones; 0: none."""
    teacher_tp: int = 1
    teacher_starts_workers: bool = False

    @classmethod
    def of(
        cls,
        job: JobConfig,
        placement: PlacementConfig,
        nodes: int,
        engine: str = "native",
        teacher: TeacherReplicas | None = None,
    ) -> Sizes:
        """Return the sizes of a recipe on `nodes` nodes.

        Args:
            engine: inference.engine of the recipe.
            teacher: distill.replicas of the recipe.
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
            teacher_nodes=teacher.nodes if teacher else 0,
            teacher_tp=teacher.tp if teacher else 1,
            teacher_starts_workers=teacher is not None and capabilities_of(teacher.engine).starts_workers,
        )

    @property
    def inference_tp(self) -> int:
        """Ranks of one inference replica; default: the training's `tp`."""
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
    def replica_processes(self) -> int:
        return 1 if self.starts_workers else self.inference_tp

    @property
    def teacher_processes(self) -> int:
        return 1 if self.teacher_starts_workers else self.teacher_tp

    @property
    def teacher_replicas(self) -> int:
        return self.teacher_nodes * self.gpus_per_node // self.teacher_tp

    @property
    def training_nodes(self) -> int:
        return self.nodes - self.inference_nodes - self.teacher_nodes

    @property
    def first_inference_node(self) -> int:
        return self.training_nodes if self.partitioned else 0

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

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.training_world // (self.tp * self.ep * self.pp)

    @property
    def replicas(self) -> int:
        return self.generating // self.inference_tp


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
        apart = {"placement.inference.nodes": s.inference_nodes, "distill.replicas.nodes": s.teacher_nodes}
        names = " and ".join(f"{key} {nodes}" for key, nodes in apart.items() if nodes)
        counts = " - ".join(str(nodes) for nodes in (s.nodes, *apart.values()) if nodes)
        verb = "leave" if all(apart.values()) else "leaves"
        yield f"{names} of job.nodes {s.nodes} {verb} {counts} = {s.training_nodes} nodes to train"
    elif s.teacher_nodes and s.gpus_per_node % s.teacher_tp:
        yield (
            f"distill.replicas.tp {s.teacher_tp} does not divide job.gpus_per_node {s.gpus_per_node} "
            f"({_remainder(s.gpus_per_node, s.teacher_tp)}): a replica of the teacher stays on one node"
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
    key, tp = "placement.inference.tp", s.inference_tp
    if s.generating % tp:
        nodes = s.inference_nodes or s.training_nodes
        yield (
            f"{key} {tp} does not divide the {nodes} x {s.gpus_per_node} = {s.generating} ranks that generate "
            f"({_remainder(s.generating, tp)})"
        )
    elif s.shares_devices and s.gpus_per_node % tp:
        yield (
            f"{key} {tp} does not divide job.gpus_per_node {s.gpus_per_node} ({_remainder(s.gpus_per_node, tp)}): a "
            "vLLM is on the GPUs of one node's training ranks"
        )
        return
    elif s.partitioned and s.gpus_per_node % tp and tp % s.gpus_per_node:
        yield (
            f"{key} {tp} is neither a number of whole nodes nor an equal share of a node with {s.gpus_per_node} GPUs "
            f"({_remainder(max(tp, s.gpus_per_node), min(tp, s.gpus_per_node))})"
        )
    yield from _across_nodes(key, tp, s)


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
    yield from (f"{training}.{problem}" for problem in model.undivided(s.tp, s.pp, s.ep))
    if s.inference_tp != s.tp:  # otherwise the line above reports it
        # An engine that starts its workers gets whole weights, and shares a key/value head in any layout.
        training_tp = None if s.starts_workers else s.tp
        yield from (f"{inference}.{problem}" for problem in model.undivided(s.inference_tp, training_tp=training_tp))
    if model.num_experts and s.tp > 1 and not s.sequence_parallel:
        yield (
            f"{training}.tp {s.tp} with model.num_experts {model.num_experts} needs {training}.sequence_parallel; "
            "without it every tensor-parallel rank would send all tokens to the experts"
        )


def _remainder(value: int, size: int) -> str:
    return f"{value} = {value // size} x {size} + {value % size}"
