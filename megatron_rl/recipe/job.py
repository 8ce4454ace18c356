"""Recipe keys of the job and its layout: nodes, ranks, time limits, parallelism."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_rl.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

TimeLimit = Annotated[
    str,
    Field(
        pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{2}){0,2}$",
        json_schema_extra={"words": "minutes or a time such as 1-12:00:00"},
    ),
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
]
"""Slurm's --time. A bare number, which YAML reads as an integer, is minutes, as for Slurm."""


def _count_or_range(value: Any) -> int | str:
    if type(value) is int and value > 0:
        return value
    ends = re.fullmatch(r"([1-9]\d*)-([1-9]\d*)", value) if isinstance(value, str) else None
    if ends and int(ends[1]) <= int(ends[2]):
        return ends[0]
    raise PydanticCustomError("nodes", "neither a number nor a range")


StageEnds = tuple[int | None, int | None]
"""Layers of the first and of the last pipeline stage; None: as many as the others."""

Nodes = Annotated[
    int | str,
    PlainValidator(_count_or_range),
    WithJsonSchema({"type": ["integer", "string"], "words": "an integer > 0 or a range such as 4-8"}),
]
"""A number such as 4, or a range such as `4-8` (Slurm's --nodes)."""


class JobConfig(Section):
    """Nodes, ranks and limits of the job."""

    nodes: Nodes = 1
    """Nodes that work; `spare_nodes` come on top. With a range such as 4-8, each start takes the number that Slurm
    gives: data parallelism follows, batches and prompts stay. A run on this machine takes the upper end."""
    gpus_per_node: PositiveInt = 8
    """Ranks per node: one per GPU, or plain processes with `device: cpu`."""
    spare_nodes: NonNegativeInt = 0
    """Additional nodes of the allocation that replace nodes which fail the health check or die (Slurm)."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of one attempt, such as 4:00:00, 1-00:00:00 or minutes; default: that of the cluster profile."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Kind of device that the ranks compute on."""
    threads_per_rank: PositiveInt = 1
    """Threads of OMP, MKL and torch in each rank. They affect rounding, so they are never derived from the machine."""
    memory_gib: PositiveFloat | None = None
    """Host memory, in GiB, that all ranks of a run on this machine need together; with less the run does not start.
    Default: an estimate of weights, gradients and Adam's state on CPUs."""
    collective_timeout_s: PositiveInt = 3600
    """Timeout of a collective, in seconds; on GPUs it must exceed `silence_limit_s`."""
    backoff_s: PositiveFloat = 30.0
    """Seconds before a crashed run restarts, doubled after each crash without a new checkpoint, up to 15 minutes
    (Slurm). After three such crashes, or the same error at the same step twice, the run is held until `mrl resume`."""
    silence_limit_s: PositiveInt = 1800
    """Seconds without a sign of life from a rank, or without progress of any rank, after which the run counts as hung.
    The attempt then ends as a crash that names the rank that the others wait for."""

    @model_validator(mode="after")
    def _a_hang_is_seen_before_nccl_aborts(self) -> JobConfig:
        if self.device == "cuda" and self.collective_timeout_s <= self.silence_limit_s:
            raise ValueError(
                f"collective_timeout_s {self.collective_timeout_s} must be more than silence_limit_s "
                f"{self.silence_limit_s}: a NCCL collective that times out kills its rank before it is known which "
                "rank the others waited for"
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
        """Ranks on the most nodes. The actual number is known to the ranks (rank.world)."""
        return self.most_nodes * self.gpus_per_node


class TrainingLayout(Section):
    """Parallelism of training; the remaining factor is data parallel."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline parallel size: stages."""
    first_stage_layers: PositiveInt | None = None
    """Layers of the first stage, which also has the embedding, where `pp` does not divide the layers; the stages whose
    number is not given have equal shares of the rest. Default: such a share."""
    last_stage_layers: PositiveInt | None = None
    """Layers of the last stage, which also has the output layer."""
    cp: PositiveInt = 1
    """Context parallel size: ranks that share the tokens of a micro-batch, for answers whose activations do not fit on
    one rank. Each holds all weights of its stage and processes `training.tokens_per_microbatch` tokens."""
    ep: PositiveInt = 1
    """Expert parallel size: data- and context-parallel ranks that share the experts of a layer."""
    sequence_parallel: bool = False
    """Also split the activations between tensor-parallel regions (with `tp` > 1)."""

    @property
    def stage_ends(self) -> StageEnds:
        return self.first_stage_layers, self.last_stage_layers


class InferenceLayout(Section):
    """Parallelism of generation: how ranks form replicas."""

    nodes: PositiveInt | None = None
    """Nodes that only generate, the last ones of the job (`mode: partitioned`)."""
    tp: PositiveInt | None = None
    """Tensor parallel size of a replica; default: that of training."""
    pp: PositiveInt = 1
    """Pipeline stages of a replica (`inference.engine: vllm`). A replica has tp x pp x dp GPUs: an equal share of a
    node, or whole nodes."""
    dp: PositiveInt = 1
    """Parts of a replica that each compute the attention of other answers, and the experts together: for models whose
    experts need more GPUs than their attention (`inference.engine: vllm`)."""
    ep: PositiveInt = 1
    """GPUs of a stage that share the experts of a layer whole: 1, which splits each expert among all tp x dp GPUs, or
    tp x dp (`inference.engine: vllm`)."""
    nodes_per_replica: PositiveInt | None = None
    """Nodes of a replica. They follow from its GPUs; a number here is only compared, so that a recipe that was made for
    other nodes is refused."""


class HarvestConfig(Section):
    """Additional inference replicas on idle nodes: small jobs in another partition that may wait, start and be
    preempted at any time. They serve requests while they run."""

    partition: Annotated[str, Field(min_length=1)]
    """Partition whose jobs yield to others or fill gaps (backfill)."""
    max_replicas: PositiveInt
    """Largest number of jobs queued or running at once; each is one replica."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of each job; short ones fit more gaps. Default: that of the partition. A job that ends is
    submitted again."""
    qos: str | None = None
    """Slurm's --qos."""
    account: str | None = None
    """Slurm's --account."""
    sbatch: list[str] = []
    """Further options of sbatch, such as --mem-per-gpu=100G."""

    @field_validator("sbatch")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        if odd := [option for option in options if not option.startswith("--")]:
            raise ValueError(f"{odd[0]!r} is not an option: write --name=value")
        return options


LONGEST_PROFILE = 10  # steps of a profile: a step of a large model has a million events, some hundred MB
PLANS = 64
"""Plans of an engine in a trace of generation, each a prefill or one token of every answer. Decode steps are alike."""


class ProfileConfig(Section):
    """Profiles of a few steps, for people who look for slow operations. They change no number of the run."""

    steps: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    """First and last step to profile, such as [10, 12]; at most 10 steps. Not the first ones, in which kernels are
    compiled and caches filled. Traces are in attempts/NNN/profile, as train.RANK.step-STEP.json.gz, for
    https://ui.perfetto.dev or chrome://tracing, and on GPUs train.RANK.step-STEP.memory.pickle for
    https://pytorch.org/memory_viz."""
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = [0]
    """Training ranks to profile; null: all."""
    generation: bool = False
    """Also profile generation with the weights before these steps: its first 64 prefills and decode steps, of the same
    ranks as generate.RANK.step-STEP.json.gz. In a partitioned run infer-REPLICA.RANK.step-STEP.json.gz, of the first
    rank of the first replica, or with `ranks: null` of all; from vLLM, which profiles its workers itself, its own names
    after infer-REPLICA.step-STEP (before 0.32 all after the first STEP of a start)."""

    def steps_of(self, rank: int) -> range:
        """Steps that a training rank profiles."""
        chosen = self.ranks is None or rank in self.ranks
        return range(self.steps[0], self.steps[1] + 1) if chosen else range(0)

    def steps_of_replica(self, number: int, rank: int) -> range:
        """Steps whose generation a rank of a replica profiles."""
        chosen = self.generation and (self.ranks is None or number == rank == 0)
        return range(self.steps[0], self.steps[1] + 1) if chosen else range(0)

    @field_validator("steps")
    @classmethod
    def _are_a_few(cls, steps: list[int]) -> list[int]:
        first, last = steps
        if last < first:
            raise ValueError(f"[{first}, {last}] ends before it begins: write the first step, then the last one")
        if last - first >= LONGEST_PROFILE:
            raise ValueError(f"[{first}, {last}] are {last - first + 1} steps: profile at most {LONGEST_PROFILE}")
        return steps


Offload = Literal["none", "buffers", "optimizer"]


class PlacementConfig(Section):
    """Roles of the ranks, and what stays in GPU memory."""

    mode: Literal["colocated", "partitioned"] = "colocated"
    """colocated: all nodes train and generate, in turns. partitioned: some nodes train and the others generate."""
    training: TrainingLayout = TrainingLayout()
    inference: InferenceLayout = InferenceLayout()
    offload: Offload | None = None
    """Data that leaves GPU memory while it is unused; results are the same bit for bit. none: nothing. buffers:
    gradient memory except during forward and backward passes, and KV cache memory, with a co-located vLLM its weights
    too, except during generation. optimizer: also Adam's state and fp32 weights, which move to host memory except
    during updates, and with a co-located vLLM the ranks' weights except during training. Default: on GPUs buffers, or
    optimizer where the estimate of `mrl plan` does not fit otherwise; on CPUs none."""
    tp_across_nodes: bool = False
    """Allow tensor-parallel groups larger than a node; slow without a fast fabric between nodes."""

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of an inference replica; on CPUs processes."""
        asked = self.inference
        return (asked.tp or self.training.tp) * asked.pp * asked.dp


def data_parallel_size(training_ranks: int, tp: int, pp: int, cp: int) -> int:
    """Data-parallel replicas of the training ranks, rounded down; the placement refuses sizes that do not divide."""
    return training_ranks // (tp * pp * cp)
