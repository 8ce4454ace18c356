"""Typed, frozen configuration of a run, put together from the sections of its rooms; each room has its keys, their
defaults and meaning in a `config.py` of its own.

The launcher validates recipes with these classes before anything starts and the ranks read the same classes from
`resolved.yaml`, so none of them imports torch or megatron-core.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.checkpoint.config import SaveConfig
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.metrics.config import LoggingConfig
from megatron_rl.model.config import ModelConfig, TokenizerConfig
from megatron_rl.rank.config import JobConfig, Offload, PlacementConfig, data_parallel_size
from megatron_rl.rollout.config import EvaluationConfig, ResumeConfig
from megatron_rl.section import Section
from megatron_rl.training.config import OptimizerConfig, TrainingConfig


class ImageConfig(Section):
    """The container image, where the cluster has containers."""

    reference: str | None = None
    """[REGISTRY#]IMAGE[:TAG] or the path of a squashfs file; default: the cluster profile's."""
    import_on: Literal["login", "compute"] = "compute"
    """Where it is imported, once, into the shared cache: where you type mrl-submit, or on the job's first node."""


class CodeConfig(Section):
    """What runs beside mrl itself: an environment of yours, for example."""

    include: list[str] | None = None
    """Directories whose snapshot the job imports from, relative ones from the recipe's file on; default: the git
    repository of the current directory, when the recipe lies in it."""


class RunConfig(Section):
    """A recipe with every default written out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dot, dash and underscore; part of run directory and job names."""
    cluster: str | None = None
    """Cluster profile this recipe is meant for; `local` runs on this machine."""
    job: JobConfig = JobConfig()
    placement: PlacementConfig = PlacementConfig()
    image: ImageConfig = ImageConfig()
    code: CodeConfig = CodeConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig
    environment: EnvironmentConfig
    sampling: Sampling
    inference: InferenceConfig = InferenceConfig()
    grpo: GrpoConfig = GrpoConfig()
    optimizer: OptimizerConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    save: SaveConfig = SaveConfig()
    resume: ResumeConfig = ResumeConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def sequence_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.training.sequence_length or self.model.max_position_embeddings

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the training world on the most nodes."""
        layout, apart = self.placement.training, self.placement.inference.nodes or 0
        nodes = self.job.most_nodes - (apart if self.placement.mode == "partitioned" else 0)
        return data_parallel_size(nodes * self.job.gpus_per_node, layout.tp, layout.pp, layout.cp)

    @property
    def offload(self) -> Offload:
        """What leaves the device's memory while nothing needs it."""
        return self.placement.offload or ("buffers" if self.job.device == "cuda" else "none")

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if self.placement.mode == "partitioned" and self.job.fewest_nodes < self.job.most_nodes:
            raise ValueError(
                f"job.nodes {self.job.nodes} is a range, and placement.mode partitioned needs one number: which nodes "
                "train and which generate is fixed"
            )
        if self.grpo.prompts_per_step < self.data_parallel_size:
            raise ValueError(
                f"grpo.prompts_per_step {self.grpo.prompts_per_step} is smaller than the {self.data_parallel_size} "
                "data-parallel replicas (job.nodes * job.gpus_per_node / (tp * pp * cp)): each needs a prompt"
            )
        if self.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"training.sequence_length {self.sequence_length} exceeds "
                f"model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        if self.sampling.max_new_tokens >= self.sequence_length:
            limit = "training.sequence_length" if self.training.sequence_length else "model.max_position_embeddings"
            raise ValueError(
                f"sampling.max_new_tokens {self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"{limit} {self.sequence_length}"
            )
        if self.grpo.overlong.buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"grpo.overlong.buffer {self.grpo.overlong.buffer} is larger than "
                f"sampling.max_new_tokens {self.sampling.max_new_tokens}: even an empty answer would be penalised"
            )
        return self
