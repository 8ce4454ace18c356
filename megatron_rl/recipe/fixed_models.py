"""Models beside the policy that a run serves on replicas with separate nodes. Their weights never change."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contract.paths import FIXED, INFER, REWARD, TEACHER
from megatron_rl.recipe.distill import DistillConfig
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.reward_section import RewardConfig

VLLM_SECTIONS = {INFER: "inference.vllm", TEACHER: "distill.replicas.vllm", REWARD: "reward.replicas.vllm"}
"""Kind of replicas -> section of the recipe that says how to start its vLLM."""


@dataclass(frozen=True, slots=True)
class FixedModel:
    kind: str
    """Kind of its replicas, of `contract.paths.FIXED`."""
    key: str
    """Section of the recipe with its nodes and tp."""
    model: str
    engine: str
    nodes: int
    """Nodes that only hold this model."""
    tp: int

    @property
    def name(self) -> str:
        return FIXED[self.kind]

    @property
    def starts_workers(self) -> bool:
        """Whether a replica is one process, which starts the workers on its GPUs itself."""
        return capabilities_of(self.engine).starts_workers

    @property
    def processes(self) -> int:
        return 1 if self.starts_workers else self.tp

    def replicas(self, gpus_per_node: int) -> int:
        return self.nodes * gpus_per_node // self.tp


def fixed_models(distill: DistillConfig | None, reward: RewardConfig | None) -> tuple[FixedModel, ...]:
    """Return the models of a recipe with separate nodes, in the order of those."""
    found = []
    if distill is not None and (teacher := distill.replicas) is not None:
        layout = teacher.nodes, teacher.tp
        found.append(FixedModel(TEACHER, "distill.replicas", distill.teacher, teacher.engine, *layout))
    if reward is not None:
        layout = reward.replicas.nodes, reward.replicas.tp
        found.append(FixedModel(REWARD, "reward.replicas", reward.model, "vllm", *layout))
    return tuple(found)
