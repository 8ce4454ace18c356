"""Typed, frozen configuration of a run: every recipe key, its default and its meaning.

The launcher validates recipes with these classes before anything starts and the ranks read the same
classes from `resolved.yaml`, so this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Recompute = Literal["none", "selective", "full"]
Probability = Annotated[float, Field(gt=0, le=1)]


def _minutes_as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


TimeLimit = Annotated[
    str,
    Field(
        pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$",
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


def _steps_or_auto(value: Any) -> int | Literal["auto"]:
    if value == "auto" or (type(value) is int and value >= 0):
        return value
    raise PydanticCustomError("save_every", "neither a number nor auto")


SaveEvery = Annotated[
    int | Literal["auto"],
    PlainValidator(_steps_or_auto),
    WithJsonSchema({"type": ["integer", "string"], "words": "an integer >= 0 or auto"}),
]
"""Steps, or `auto`."""


class Section(BaseModel):
    """A group of recipe keys. Unknown keys are refused, values are never coerced, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


def is_hub_name(path: str) -> bool:
    """Whether a recipe's path names something on the Hugging Face hub: those of a machine begin with / . or ~."""
    return not path.startswith(("/", ".", "~"))


class Job(Section):
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
    collective_timeout_s: PositiveInt = 600
    """Longest wait for the other ranks in one collective, in seconds."""
    backoff_s: PositiveFloat = 30.0
    """Seconds before a run that crashed starts again, doubled with every crash without a new checkpoint, up to 15
    minutes (Slurm). After three of those, or the same error at the same step twice, it waits for `mrl resume`."""
    silence_limit_s: PositiveInt = 1800
    """After this many seconds without a sign of life from a rank, or without any rank getting on, the run hangs: the
    attempt ends as a crash that names the rank that the others wait for."""

    @property
    def fewest_nodes(self) -> int:
        return int(str(self.nodes).partition("-")[0])

    @property
    def most_nodes(self) -> int:
        return int(str(self.nodes).rpartition("-")[2])

    @property
    def world_size(self) -> int:
        """Ranks of the most nodes. How many there are is the ranks' own affair (training.world)."""
        return self.most_nodes * self.gpus_per_node


class TrainingLayout(Section):
    """How the training world is cut. What is left over is data parallel."""

    tp: PositiveInt = 1
    """Tensor parallel size."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    cp: PositiveInt = 1
    """Context parallel size."""
    ep: PositiveInt = 1
    """Expert parallel size: ranks, taken from the data-parallel ones, that share the experts of a layer."""
    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel regions too (`tp` > 1)."""


class InferenceLayout(Section):
    """How the ranks that generate are cut into replicas."""

    nodes: PositiveInt | None = None
    """Nodes that only generate (`mode: partitioned`); they are the last ones."""
    tp: PositiveInt | None = None
    """Tensor parallel size of a replica; default: that of training."""
    pp: PositiveInt = 1
    """Pipeline stages of a replica."""


class Placement(Section):
    """Which rank does what."""

    mode: Literal["colocated", "partitioned"] = "colocated"
    """colocated: all ranks train, and generate in between. partitioned: the nodes are split between the two."""
    training: TrainingLayout = TrainingLayout()
    inference: InferenceLayout = InferenceLayout()
    tp_across_nodes: bool = False
    """Allow tensor-parallel groups that are larger than a node: slow without a fabric that spans nodes."""


class Image(Section):
    """The container image, where the cluster has containers."""

    reference: str | None = None
    """[REGISTRY#]IMAGE[:TAG] or the path of a squashfs file; default: the cluster profile's."""
    import_on: Literal["login", "compute"] = "compute"
    """Where it is imported, once, into the shared cache: where you type mrl-submit, or on the job's first node."""


class Code(Section):
    """What runs beside mrl itself: an environment of yours, for example."""

    include: list[str] | None = None
    """Directories whose snapshot the job imports from, relative ones from the recipe's file on; default: the git
    repository of the current directory, when the recipe lies in it."""


class Supervised(Section):
    """Fixed-length teaching of the answer format, before RL, on the environment's own worked examples."""

    steps: PositiveInt = 60
    """Optimizer steps."""
    batch_size: PositiveInt = 32
    """Examples per step."""
    learning_rate: PositiveFloat = 1e-3
    """Constant learning rate of AdamW(0.9, 0.95), no weight decay."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights and of the example order; independent of `training.seed`."""


class Model(Section):
    """A GPT as Qwen2.5, Qwen3 and Llama 3 are: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    """Key/value heads; must divide `num_attention_heads`."""
    head_dim: PositiveInt | None = None
    """Size of one attention head; default: hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt
    """Positions that the model knows, in tokens."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding before padding; default: as many as the tokenizer has tokens, which may be fewer."""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this many rows."""
    rope_base: PositiveFloat = 1e6
    rope_scaling: Annotated[float, Field(gt=1)] | None = None
    """Factor by which Llama 3.1 stretches the slow rotary positions (wavelengths over 2048 of 8192 positions)."""
    layernorm_epsilon: PositiveFloat = 1e-5
    qkv_bias: bool = True
    qk_norm: bool = False
    """RMSNorm over every query and key head before they are turned (Qwen3)."""
    tied_embeddings: bool = False
    """Share the input embedding with the output layer."""
    num_experts: PositiveInt | None = None
    """Experts of every layer, in place of its one feed-forward network; default: none."""
    experts_per_token: PositiveInt | None = None
    """Experts that see a token (`num_experts`)."""
    expert_ffn_hidden_size: PositiveInt | None = None
    """Width of one expert (`num_experts`)."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    init: Literal["from-scratch", "checkpoint", "huggingface", "supervised"] = "checkpoint"
    """Where the first weights come from."""
    init_seed: NonNegativeInt = 1
    """Seed of random weights (`init: from-scratch`)."""
    checkpoint: str | None = None
    """Checkpoint directory (`.../checkpoints/step-000040`) whose weights start the run (`init: checkpoint`)."""
    huggingface: str | None = None
    """Name on the hub, such as Qwen/Qwen2.5-32B, or directory of the weights that start it (`init: huggingface`)."""
    supervised: Supervised = Supervised()
    """Used with `init: supervised`."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Model:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_query_groups {self.num_query_groups}"
            )
        if self.head_size % 2:
            origin = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            raise ValueError(f"head size {self.head_size} ({origin}) must be even: rotary positions turn pairs")
        self._experts_fit()
        if self.init == "checkpoint" and self.checkpoint is None:
            raise ValueError("init: checkpoint needs model.checkpoint, the checkpoint directory to start from")
        if self.init == "huggingface" and self.huggingface is None:
            raise ValueError("init: huggingface needs model.huggingface, the weights' name on the hub or directory")
        return self

    def _experts_fit(self) -> None:
        sizes = {"experts_per_token": self.experts_per_token, "expert_ffn_hidden_size": self.expert_ffn_hidden_size}
        for name, size in sizes.items():
            if (size is None) != (self.num_experts is None):
                raise ValueError(f"num_experts and {name} belong together: give both or neither")
        if self.experts_per_token and self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Tokenizer(Section):
    type: Literal["characters", "huggingface"] = "huggingface"
    alphabet: str = ""
    """The characters that are tokens (`type: characters`); end-of-text and padding are added."""
    path: str | None = None
    """Name on the hub, such as Qwen/Qwen2.5-32B, or directory of a Hugging Face tokenizer (`type: huggingface`)."""

    @model_validator(mode="after")
    def _complete(self) -> Tokenizer:
        if self.type == "characters" and (not self.alphabet or len(set(self.alphabet)) != len(self.alphabet)):
            raise ValueError("type: characters needs alphabet, a string of distinct characters")
        if self.type == "huggingface" and self.path is None:
            raise ValueError("type: huggingface needs path, the tokenizer's name on the hub or directory")
        return self


class Environment(Section):
    name: str
    """Registered name: see `mrl environments`."""
    args: dict[str, Any] = {}
    """Arguments of that environment, checked by its own Config class."""


class Sampling(Section):
    """How training answers are sampled. Log-probs are always those of softmax(logits / temperature), before
    top_k, top_p and min_p."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0
    """0 keeps the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    max_new_tokens: PositiveInt
    """Longest answer, the end token included."""


class Inference(Section):
    """The in-process engine."""

    max_batch: PositiveInt = 256
    """Sequences decoded together on one replica; the rest wait for a free row of the cache."""
    prefill_tokens: PositiveInt = 16384
    """Prompt tokens after which one prefill takes no further prompt."""


class Overlong(Section):
    """What happens to answers that hit `sampling.max_new_tokens`."""

    mode: Literal["none", "mask", "penalty"] = "none"
    """none: as scored. mask: their tokens carry no loss. penalty: DAPO's soft punishment (arXiv 2503.14476 eq. 13)."""
    buffer: NonNegativeInt = 0
    """Tokens before the limit over which the penalty grows linearly (`mode: penalty`)."""
    penalty: NonNegativeFloat = 1.0
    """Reward taken away at the limit (`mode: penalty`)."""

    @model_validator(mode="after")
    def _has_buffer(self) -> Overlong:
        if self.mode == "penalty" and self.buffer == 0:
            raise ValueError("mode: penalty needs buffer, the tokens over which the penalty grows")
        return self


class DynamicSampling(Section):
    """Draw further prompts in place of groups whose rewards are all equal (DAPO)."""

    enabled: bool = False
    max_rounds: PositiveInt = 8
    """Rounds of generation per step at most; then the step trains with the groups without signal it has."""


class Grpo(Section):
    prompts_per_step: PositiveInt = 32
    group_size: Annotated[int, Field(ge=2)] = 16
    """Answers per prompt; their rewards are each other's baseline."""
    global_batch: PositiveInt | None = None
    """Answers per optimizer step; default prompts_per_step * group_size. A multiple of group_size."""
    iterations: PositiveInt = 1
    """Passes over each batch of rollouts."""
    eps_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Importance ratios are clipped to [1 - eps_low, 1 + eps_high]."""
    eps_high: NonNegativeFloat = 0.2
    advantage_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr. GRPO (arXiv 2503.20783)."""
    reduction: Literal["token", "sequence"] = "token"
    """token: mean over all answer tokens of the global batch. sequence: mean over answers of their token means."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the initial weights; at 0 the reference model is neither kept nor run."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """http://joschu.net/blog/kl-approx.html"""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Bonus on -p log p of the sampled tokens."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling against the engine's log-probs: weight min(exp(old - inference), cap)."""
    overlong: Overlong = Overlong()
    dynamic_sampling: DynamicSampling = DynamicSampling()

    @model_validator(mode="after")
    def _batches_divide(self) -> Grpo:
        rollouts = self.prompts_per_step * self.group_size
        if self.samples_per_update % self.group_size:
            raise ValueError(f"global_batch {self.global_batch} is not a multiple of group_size {self.group_size}")
        if rollouts % self.samples_per_update:
            raise ValueError(
                f"prompts_per_step * group_size = {rollouts} is not divisible by global_batch {self.global_batch}"
            )
        return self

    @property
    def samples_per_update(self) -> int:
        return self.global_batch or self.prompts_per_step * self.group_size

    @property
    def updates_per_pass(self) -> int:
        return self.prompts_per_step * self.group_size // self.samples_per_update


class Optimizer(Section):
    """Adam through megatron-core."""

    learning_rate: NonNegativeFloat
    min_learning_rate: NonNegativeFloat = 0.0
    """End of the decay; ignored where `decay` is constant."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: NonNegativeFloat = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 does not clip."""
    distributed: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients in fp32, whatever `model.dtype` is."""
    max_nonfinite_updates: PositiveInt = 3
    """Updates with a non-finite gradient are skipped and counted; this many in a row stop the run."""


class Training(Section):
    steps: PositiveInt
    """GRPO steps of the whole run."""
    seed: NonNegativeInt = 0
    """Seed of prompts, sampling and shuffling."""
    tokens_per_microbatch: PositiveInt = 16384
    """Tokens packed into one forward and backward on a rank; an answer that alone has more makes its own."""
    sequence_length: PositiveInt | None = None
    """Longest prompt plus answer, in tokens; default: model.max_position_embeddings."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: nothing, attention, or whole layers."""


class Evaluation(Section):
    every: NonNegativeInt = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    prompts: PositiveInt | None = None
    """Problems of each evaluation set at most, the first ones; default: all."""


class Save(Section):
    every: SaveEvery = "auto"
    """Steps between checkpoints; 0 saves only at the end and when interrupted. auto: as often as loses least time, by
    what a save has cost and how often the run has failed so far (Daly 2006)."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this are made in any case and stay for good; 0: none."""
    timeout_s: PositiveInt = 600
    """Longest time a save may take, in seconds."""

    def stays(self, step: int) -> bool:
        """Whether the checkpoint of `step` is never deleted to make room."""
        return self.keep_every > 0 and step % self.keep_every == 0

    def most_kept(self, steps: int) -> int:
        """Checkpoints on disk at most, in a run of `steps`; one being written comes on top."""
        return self.keep + (steps // self.keep_every if self.keep_every else 0)


class Resume(Section):
    """What becomes of generated work when a run is interrupted."""

    partial: Literal["keep", "regenerate"] = "keep"
    """keep: answers go on from the tokens they have, nothing is paid for twice. regenerate: what is not whole is
    generated again from its own random numbers: bit for bit the same, on the same layout."""
    newer: Literal["discard", "reuse"] = "discard"
    """Scored groups that were sampled by weights newer than the checkpoint: generate again, or train on them as they
    are. With `reuse` set grpo.importance_cap: they are off-policy."""
    flush_s: PositiveFloat = 60.0
    """Seconds between writes of what is being generated."""
    bank_gib: PositiveFloat = 64.0
    """Size on disk, of all ranks together; beyond it the answers under way that are oldest are not kept."""


class Wandb(Section):
    """The record, shown by Weights & Biases: one W&B run for a run, however often it starts. Needs `pip install
    'mrl[wandb]'` where the ranks run, and WANDB_API_KEY there (the cluster profile's `secrets`)."""

    project: str
    entity: str | None = None
    """Team or account that has the project; default: that of the key."""
    group: str | None = None
    """Runs of a project that are shown together."""
    tags: list[str] = []
    mode: Literal["online", "offline"] = "online"
    """offline: only written, to the run directory's `wandb`, for nodes without internet; `wandb sync` sends it."""


class Logging(Section):
    samples_every: NonNegativeInt = 10
    """Steps between sample rollouts written as text; 0 writes none."""
    samples: PositiveInt = 4
    """Rollouts written each time."""
    histograms_every: NonNegativeInt = 50
    """Steps between TensorBoard histograms; 0 writes none."""
    wandb: Wandb | None = None
    """Default: no Weights & Biases."""


class RunConfig(Section):
    """A recipe with every default written out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Letters, digits, dot, dash and underscore; part of run directory and job names."""
    cluster: str | None = None
    """Cluster profile this recipe is meant for; `local` runs on this machine."""
    job: Job = Job()
    placement: Placement = Placement()
    image: Image = Image()
    code: Code = Code()
    model: Model
    tokenizer: Tokenizer
    environment: Environment
    sampling: Sampling
    inference: Inference = Inference()
    grpo: Grpo = Grpo()
    optimizer: Optimizer
    training: Training
    evaluation: Evaluation = Evaluation()
    save: Save = Save()
    resume: Resume = Resume()
    logging: Logging = Logging()

    @property
    def sequence_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.training.sequence_length or self.model.max_position_embeddings

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the training world on the most nodes, rounded down where the sizes do not divide: the placement
        refuses those."""
        layout, apart = self.placement.training, self.placement.inference.nodes or 0
        nodes = self.job.most_nodes - (apart if self.placement.mode == "partitioned" else 0)
        return nodes * self.job.gpus_per_node // (layout.tp * layout.pp * layout.cp)

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
