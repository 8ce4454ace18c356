"""Recipe keys of the job and of who does what in it: nodes, ranks, time limits, how the model is cut."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_rl.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


def _minutes_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


TimeLimit = Annotated[
    str,
    Field(
        pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$",
        json_schema_extra={"words": "minutes or a time such as 1-12:00:00"},
    ),
    BeforeValidator(_minutes_as_text),
]
"""Slurm's --time. A bare number, which YAML reads as an integer, is minutes, as it is for Slurm."""


def _count_or_range(value: Any) -> int | str:
    if type(value) is int and value > 0:
        return value
    ends = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", value) if isinstance(value, str) else None
    if ends and int(ends[1]) <= int(ends[2]):
        return ends[0]
    raise PydanticCustomError("nodes", "neither a number nor a range")


Nodes = Annotated[
    int | str,
    PlainValidator(_count_or_range),
    WithJsonSchema({"type": ["integer", "string"], "words": "an integer > 0 or a range such as 4-8"}),
]
"""4, or `4-8` as Slurm's --nodes has it."""


class JobConfig(Section):
    nodes: Nodes = 1
    """Nodes that work; `spare_nodes` are allocated beside them. A range such as 4-8 takes, at each start, what Slurm
    gives: data parallelism follows, batches and prompts stay. A run on this machine takes the most."""
    gpus_per_node: PositiveInt = 8
    """Ranks per node: one per GPU, or plain processes where `device` is `cpu`."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes of the allocation, which stand in for those that fail the health check or die (Slurm)."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of one attempt, such as 4:00:00, 1-00:00:00 or minutes; default: the cluster profile's."""
    device: Literal["cpu", "cuda"] = "cuda"
    """What the ranks compute on."""
    threads_per_rank: PositiveInt = 1
    """Threads of OMP, MKL and torch in every rank. Part of what makes a run reproducible, so never derived
    from the machine."""
    memory_gib: PositiveFloat | None = None
    """Memory that all ranks of a run on this machine need together, where it was measured: with less it is not started.
    Default: what weights, gradients and Adam's state take on CPUs."""
    collective_timeout_s: PositiveInt = 3600
    """Longest wait for the other ranks in one collective, in seconds; on GPUs more than `silence_limit_s`."""
    backoff_s: PositiveFloat = 30.0
    """Seconds before a run that crashed starts again, doubled with every crash without a new checkpoint, up to 15
    minutes (Slurm). After three of those, or the same error at the same step twice, it waits for `mrl resume`."""
    silence_limit_s: PositiveInt = 1800
    """After this many seconds without a sign of life from a rank, or without any rank getting on, the run hangs: the
    attempt ends as a crash that names the rank that the others wait for."""

    @model_validator(mode="after")
    def _a_hang_is_seen_before_nccl_aborts(self) -> JobConfig:
        if self.device == "cuda" and self.collective_timeout_s <= self.silence_limit_s:
            raise ValueError(
                f"collective_timeout_s {self.collective_timeout_s} must be more than silence_limit_s "
                f"{self.silence_limit_s}: a collective of NCCL that times out ends its rank without a word, before it "
                "is known which rank the others waited for"
            )
        return self

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition("-")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition("-")[2])

    @property
    def world_size(self) -> int:
        """Ranks of the most nodes. How many there are is the ranks' own affair (rank.world)."""
        return self.most_nodes * self.gpus_per_node


class TrainingLayout(Section):
    """How the training world is cut. What is left over is data parallel."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    cp: PositiveInt = 1
    """Context parallel size: ranks that share out the tokens of each micro-batch, for answers whose activations one
    does not hold. They have all weights of their stage, and `training.tokens_per_microbatch` tokens each."""
    ep: PositiveInt = 1
    """Expert parallel size: ranks, taken from the data- and context-parallel ones, that share the experts of a
    layer."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions too (`tp` > 1)."""


class InferenceLayout(Section):
    """How the ranks that generate are cut into replicas."""

    nodes: PositiveInt | None = None
    """Nodes that only generate (`mode: partitioned`); they are the last ones."""
    tp: PositiveInt | None = None
    """Tensor parallel size of a replica; default: that of training."""
    transfer: Literal["whole", "changed"] = "whole"
    """What replicas are sent with each version (`mode: partitioned`). changed: the values that are others than before,
    of bf16 weights few where the learning rate is small; for slow networks: those that train keep a copy of what they
    sent in the host's memory, and compare."""


class HarvestConfig(Section):
    """Further inference replicas on nodes that nobody else uses: small jobs of another partition, which may wait, start
    and be preempted at any time. They take requests while they are there."""

    partition: Annotated[str, Field(min_length=1)]
    """Whose jobs give way to others, or fill gaps (backfill)."""
    max_replicas: PositiveInt
    """Jobs in the queue or running at once; each is one replica."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of each: short ones find more gaps; default: the partition's. One that ends is submitted again."""
    qos: str | None = None
    account: str | None = None
    sbatch: list[str] = []
    """Further options of sbatch, such as --mem-per-gpu=100G."""

    @field_validator("sbatch")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        if odd := [option for option in options if not option.startswith("--")]:
            raise ValueError(f"{odd[0]!r} is no option: write --name=value")
        return options


Offload = Literal["none", "buffers", "optimizer"]


class PlacementConfig(Section):
    """Which rank does what, and what of it stays in a GPU's memory."""

    mode: Literal["colocated", "partitioned"] = "colocated"
    """colocated: all ranks train, and generate in between. partitioned: the nodes are split between the two."""
    training: TrainingLayout = TrainingLayout()
    inference: InferenceLayout = InferenceLayout()
    offload: Offload | None = None
    """What leaves a GPU's memory while nothing needs it, which changes no bit of a run. none: nothing. buffers: what
    need not be kept: the gradients' memory but for forward and backward passes, the KV cache's but for generation.
    optimizer: Adam's state and fp32 weights too, into the host's memory but for the updates. Default: on GPUs buffers,
    or optimizer where by `mrl plan` one of the cluster's is too small else; on CPUs none."""
    tp_across_nodes: bool = False
    """Allow tensor-parallel groups that are larger than a node: slow without a fabric that spans nodes."""


def data_parallel_size(training_ranks: int, tp: int, pp: int, cp: int) -> int:
    """Replicas of the training world, rounded down where the sizes do not divide: the placement refuses those."""
    return training_ranks // (tp * pp * cp)
