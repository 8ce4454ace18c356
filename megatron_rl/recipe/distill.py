"""Recipe keys of on-policy distillation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from megatron_rl.recipe.section import HubPath, LaterPath, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from megatron_rl.recipe.vllm import VllmConfig

ROWS = 8
"""Sequences that a replica of the teacher holds in its cache together."""

ServerUrl = Annotated[
    str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$", json_schema_extra={"words": "http://HOST:PORT/v1"})
]


def _one_or_several(given: object) -> object:
    """Return a list that may be given as a single value."""
    return (given,) if isinstance(given, str) else given


class TeacherServers(Section):
    """Servers that compute the teacher's log-probs, started independently of the run: `vllm serve TEACHER` or
    `mrl serve TEACHER`. The longest sequence of each must be at least training.sequence_length + 1 tokens."""

    urls: Annotated[tuple[ServerUrl, ...], BeforeValidator(_one_or_several), Field(min_length=1, strict=False)]
    """URLs of the servers, or a single one, each with the version of the API: http://HOST:PORT/v1. All ranks must reach
    them. A request goes to the one with the fewest outstanding tokens."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model on the servers: --served-model-name of vLLM, --name of `mrl serve`."""
    token_file: LaterPath | None = None
    """File with the servers' token, on the nodes of the ranks."""
    token_variable: str | None = None
    """Environment variable with the servers' token, one of the `secrets` of the cluster profile; instead of
    token_file."""
    answer_limit_s: PositiveFloat = 600.0
    """Longest wait for the log-probs of one sequence, in seconds. Servers that are away are waited for until
    job.silence_limit_s."""

    @model_validator(mode="after")
    def _are_reached(self) -> Self:
        if self.token_file is not None and self.token_variable is not None:
            raise ValueError("token_file and token_variable are both given: keep the one that holds the server's token")
        if len({*self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice: give each once")
        return self


class TeacherReplicas(Section):
    """Replicas that hold the teacher on separate nodes. The run starts, watches, restarts and ends them like
    inference replicas, and they never get other weights."""

    nodes: PositiveInt
    """Nodes of the job that only hold the teacher, the last ones. All others train and generate as `placement` says."""
    tp: PositiveInt = 1
    """GPUs of one replica, which must divide job.gpus_per_node. A node holds job.gpus_per_node / tp replicas, and a
    sequence goes to the one with the fewest outstanding tokens."""
    engine: Literal["native", "vllm"] = "native"
    """native: the engine of this project. vllm: a `vllm serve` per replica, for a teacher of Hugging Face weights; its
    log-probs are normalised over all rows of the embedding, also those without a token."""
    vllm: VllmConfig | None = None
    """How to start vLLM with `engine: vllm`; default: image and Python of `inference.vllm`. A run has one image with
    vLLM."""
    answer_limit_s: PositiveFloat = 600.0
    """Longest wait for the log-probs of one sequence, in seconds; then another replica is asked. Replicas that are away
    are waited for until job.silence_limit_s."""

    @model_validator(mode="after")
    def _gives_vllm_its_settings_alone(self) -> Self:
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(f"vllm is given, and engine is {self.engine}: set vllm, or leave the section out")
        return self


class DivergenceConfig(Section):
    """Divergence between the distributions of policy and teacher at each trained token, over the whole vocabulary: the
    generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649), as in `GKDTrainer` of TRL."""

    kind: Literal["forward", "reverse", "js"]
    """forward: KL(teacher || policy), which teaches all that the teacher might say (TRL: beta 0). reverse:
    KL(policy || teacher), which keeps to what the teacher says often (TRL: beta 1). js: beta * KL(teacher || m) +
    (1 - beta) * KL(policy || m), with m = beta * teacher + (1 - beta) * policy."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the teacher in m, with `kind: js`."""
    top_k: PositiveInt | None = None
    """The teacher's likeliest tokens at each position that are classes; all others together are one more. Saves memory
    and time. null: each token of the vocabulary is one."""
    temperature: PositiveFloat | None = None
    """Temperature of both distributions; null: sampling.temperature. The divergence is not multiplied by its square."""

    @model_validator(mode="after")
    def _reads_beta(self) -> Self:
        if self.kind != "js" and "beta" in self.model_fields_set and self.beta != 0.5:
            raise ValueError(f"beta is given, and kind is {self.kind}: only js has a beta; set js, or leave beta out")
        return self


class DistillConfig(Section):
    """Distillation on policy (arXiv 2306.13649, arXiv 2306.08543): a teacher judges each token that the policy samples,
    and weight * (log p of the teacher - log p of the policy) is added to the token's advantage. The expected gradient
    is that of -weight times the reverse KL divergence KL(policy || teacher) of each token, so every loss, mask,
    importance weight and lag of GRPO applies to it. Every answer then goes through the model, also those whose rewards
    teach nothing."""

    teacher: HubPath
    """Model that teaches: name on the hub, directory of Hugging Face weights, package:NAME, or checkpoint directory
    (`.../checkpoints/step-000040`) of a run. Its tokenizer must give every token of the policy the same number. Without
    `replicas` and `server`, the training ranks hold its weights, split and computed like the policy's, in
    model.dtype."""
    replicas: TeacherReplicas | None = None
    """Replicas of the run that compute the teacher's log-probs, for a teacher too large for the training ranks;
    default: the ranks do."""
    server: TeacherServers | None = None
    """Servers that compute the teacher's log-probs, started independently of the run; default: none."""
    parameters: PositiveInt | None = None
    """Parameters of the teacher, from which `mrl plan` estimates its memory on the ranks that hold it; default: counted
    in its config.json where that is on this machine, else not estimated."""
    divergence: DivergenceConfig | None = None
    """Divergence of whole distributions that is added to the loss, times `weight`, in place of the teacher's part of
    the advantages. A token then teaches the probabilities of all tokens at its place, not of the sampled one alone. The
    teacher must be on the training ranks. null: the teacher judges the sampled tokens."""
    weight: PositiveFloat = 1.0
    """Weight of the teacher in the advantages, or of the divergence in the loss."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the advantages that rewards give, after their normalisation; 0: the teacher alone."""

    @property
    def is_served(self) -> bool:
        """Whether replicas or servers hold the teacher, instead of the training ranks."""
        return self.replicas is not None or self.server is not None

    @model_validator(mode="after")
    def _is_in_one_place(self) -> Self:
        if self.replicas is not None and self.server is not None:
            raise ValueError("replicas and server are both given: keep the one that computes the teacher's log-probs")
        if self.divergence is not None and self.is_served:
            place = "replicas" if self.replicas is not None else "server"
            raise ValueError(
                f"divergence and {place} are both given, and only training ranks compute whole distributions: leave "
                f"out divergence, or {place}"
            )
        return self
