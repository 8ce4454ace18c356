"""Models beside the policy that a run serves on replicas with separate nodes. Their weights never change."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contract.paths import INFER, REWARD, SERVED, TEACHER
from megatron_rl.recipe.engines import capabilities_of

VLLM_SECTIONS = {INFER: "inference.vllm", TEACHER: "distill.replicas.vllm", REWARD: "reward.replicas.vllm"}
"""Kind of replicas -> section of the recipe that says how to start its vLLM."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    kind: str
    """Kind of its replicas, of `contract.paths.SERVED`."""
    key: str
    """Section of the recipe with its nodes and tp."""
    model: str
    engine: str
    nodes: int
    """Nodes that only hold this model."""
    tp: int

    @property
    def name(self) -> str:
        return SERVED[self.kind]

    @property
    def starts_workers(self) -> bool:
        """Whether a replica is one process, which starts the workers on its GPUs itself."""
        return capabilities_of(self.engine).starts_workers

    @property
    def processes(self) -> int:
        return 1 if self.starts_workers else self.tp

    def replicas(self, gpus_per_node: int) -> int:
        return self.nodes * gpus_per_node // self.tp
