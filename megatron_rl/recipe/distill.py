"""Recipe keys of on-policy distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from megatron_rl.recipe.section import LaterPath, NonNegativeFloat, PathMark, PositiveFloat, PositiveInt, Section
from megatron_rl.recipe.vllm import VllmConfig

ROWS = 8
"""Sequences that a replica of the teacher holds in its cache together."""

MOST_LIKELIEST = 20
"""Likeliest tokens that the project's own engine returns at each position, at most."""

POLICY = "policy"
"""Value of `distill.teacher`: the policy teaches itself."""

ServerUrl = Annotated[
    str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$", json_schema_extra={"words": "http://HOST:PORT/v1"})
]


def _one_or_several(given: object) -> object:
    """Return a list that may be given as a single value."""
    return (given,) if isinstance(given, str) else given


Teacher = Annotated[str, PathMark("hub", reserved=(POLICY,)), Field(min_length=1)]


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

    teacher: Teacher
    """Model that teaches: name on the hub, directory of Hugging Face weights, package:NAME, or checkpoint directory
    (`.../checkpoints/step-000040`) of a run. Its tokenizer must give every token of the policy the same number. Without
    `replicas` and `server`, the training ranks hold its weights, split and computed like the policy's, in model.dtype.
    policy: the policy itself, with its weights before the step, which reads another prompt than the one that it
    answered (environment.args.teacher_prompt). It costs no memory."""
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
    the advantages. A token then teaches the probabilities of all tokens at its place, not of the sampled one alone.
    Replicas and servers report the likeliest tokens only, so they need its top_k. null: the teacher judges the sampled
    tokens."""
    weight: PositiveFloat = 1.0
    """Weight of the teacher in the advantages, or of the divergence in the loss."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the advantages that rewards give, after their normalisation; 0: the teacher alone."""

    @property
    def is_served(self) -> bool:
        """Whether replicas or servers hold the teacher, instead of the training ranks."""
        return self.replicas is not None or self.server is not None

    @property
    def is_held(self) -> bool:
        """Whether the training ranks hold weights of the teacher, beside the policy's."""
        return not self.is_served and self.teacher != POLICY

    @property
    def judged_by(self) -> tuple[object, ...]:
        """Everything that decides how a text is judged. Teachings in which it is the same share a teacher."""
        return self.teacher, self.replicas is not None, self.server, self.divergence

    @model_validator(mode="after")
    def _is_in_one_place(self) -> Self:
        if self.replicas is not None and self.server is not None:
            raise ValueError("replicas and server are both given: keep the one that computes the teacher's log-probs")
        place = "replicas" if self.replicas is not None else "server"
        if self.teacher == POLICY and self.is_served:
            raise ValueError(f"teacher is policy, which the training ranks hold, and {place} is given: leave it out")
        if self.divergence is not None and self.is_served and self.divergence.top_k is None:
            raise ValueError(
                f"divergence and {place} are both given, and only training ranks compute whole distributions: give "
                f"divergence.top_k, or leave out {place}"
            )
        native = self.replicas is not None and self.replicas.engine == "native"
        if native and self.divergence is not None and (self.divergence.top_k or 0) > MOST_LIKELIEST:
            raise ValueError(
                f"divergence.top_k is {self.divergence.top_k}, and replicas.engine native returns at most "
                f"{MOST_LIKELIEST}: set replicas.engine to vllm, or a smaller top_k"
            )
        return self


class EnvironmentDistill(Section):
    """Keys of `distill` that differ for the answers to this environment's prompts. A key that is left out is that of
    `distill`, with one exception: where `teacher` is given, `server` and `parameters` belong to it and are not taken
    from there. Replicas hold the teacher of `distill` alone; another one is on the training ranks or on servers."""

    teacher: Teacher | None = None
    """Value of distill.teacher; default: that of `distill`."""
    server: TeacherServers | None = None
    """Value of distill.server."""
    parameters: PositiveInt | None = None
    """Value of distill.parameters."""
    divergence: DivergenceConfig | None = None
    """Value of distill.divergence; null: the teacher judges the sampled tokens."""
    weight: NonNegativeFloat | None = None
    """Value of distill.weight; 0: no teacher judges the answers of this environment."""
    reward_weight: NonNegativeFloat | None = None
    """Value of distill.reward_weight."""

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        for key in sorted(self.model_fields_set - {"divergence"}):
            if getattr(self, key) is None:
                raise ValueError(f"{key} is null: leave it out to take that of distill")
        if self.weight == 0 and (others := sorted(self.model_fields_set - {"weight"})):
            raise ValueError(f"weight is 0 and {others[0]} is given: without a teacher it has no effect; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _given(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys that were not given: null is a value of one of them."""
        return {key: value for key, value in dumped(self).items() if key in self.model_fields_set}

    def over(self, distill: DistillConfig | None) -> DistillConfig | None:
        """Return `distill` with these keys instead of the same ones there; None if nothing teaches. Raises
        ValidationError if the result contradicts itself or has no teacher."""
        if self.weight == 0:
            return None
        base = {} if distill is None else {key: getattr(distill, key) for key in distill.model_fields_set}
        if self.teacher is not None:
            base = {key: value for key, value in base.items() if key not in ("replicas", "server", "parameters")}
        if self.server is not None:
            base.pop("replicas", None)
        own = {key: getattr(self, key) for key in self.model_fields_set}
        return DistillConfig.model_validate({**base, **own})

    def against(self, distill: DistillConfig | None) -> str:
        """Return why these keys and those of `distill` contradict one another; empty if they do not."""
        try:
            self.over(distill)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "missing":
                return "teacher is missing, and there is no `distill` that has one: give teacher"
            return str(first.get("ctx", {}).get("error", first["msg"]))
        return ""


@dataclass(frozen=True, slots=True)
class Teachings:
    """Teachers of the environments that are trained on."""

    by_id: Mapping[str, DistillConfig | None]
    """Teaching of each environment, in the order of `RunConfig.environment_ids`, or of the only one under an empty id.
    None: no teacher."""

    @property
    def each(self) -> list[DistillConfig]:
        """Distinct ones, in the order of the environments."""
        found: list[DistillConfig] = []
        for one in self.by_id.values():
            if one is not None and one not in found:
                found.append(one)
        return found

    @property
    def indices(self) -> dict[str, int]:
        """Index in `each` of the teaching of each environment, by id; -1 for none."""
        each = self.each
        return {id: -1 if one is None else each.index(one) for id, one in self.by_id.items()}

    def key(self, id: str) -> str:
        """Return the key in `by_id` of an environment that a problem names. A single environment has one teaching,
        also if it is `multi-task`, whose problems name its members."""
        return id if id in self.by_id else ""

    def by(self, id: str) -> DistillConfig | None:
        return self.by_id[self.key(id)]

    @property
    def held(self) -> list[DistillConfig]:
        """Teachings whose teachers the training ranks hold, one for each teacher."""
        found = {one.teacher: one for one in self.each if one.is_held}
        return [*found.values()]

    @property
    def diverge(self) -> bool:
        """Whether one of them reads distributions."""
        return any(one.divergence is not None for one in self.each)
