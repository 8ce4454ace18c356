"""Recipe keys of on-policy distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_rl.inference.config import ServerUrl, one_or_several
from megatron_rl.recipe.section import HubPath, LaterPath, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class TeacherServers(Section):
    """Servers that compute the teacher's log-probs, started independently of the run."""

    kind: Literal["vllm", "sglang", "mrl"] = "vllm"
    """vllm: `vllm serve TEACHER`. sglang: a server of SGLang. mrl: `mrl serve TEACHER`. The longest sequence of each
    must be at least training.sequence_length + 1 tokens."""
    urls: Annotated[tuple[ServerUrl, ...], BeforeValidator(one_or_several), Field(min_length=1, strict=False)]
    """URLs of the servers, or a single one, each with the version of the API: http://HOST:PORT/v1. All ranks must reach
    them. A sequence goes to the one with the fewest outstanding tokens."""
    model: Annotated[str, Field(min_length=1)]
    """Name of the model on the servers."""
    token_file: LaterPath | None = None
    """File with the servers' token, on the nodes of the ranks."""
    token_variable: str | None = None
    """Environment variable with the servers' token, one of the `secrets` of the cluster profile; instead of
    token_file."""
    answer_limit_s: PositiveFloat = 600.0
    """Longest wait for the log-probs of one sequence, in seconds. Servers that are away are waited for until
    job.silence_limit_s."""

    @model_validator(mode="after")
    def _has_one_token(self) -> TeacherServers:
        if self.token_file is not None and self.token_variable is not None:
            raise ValueError("token_file and token_variable are both given: keep the one that holds the server's token")
        if self.kind == "mrl" and self.token_file is None and self.token_variable is None:
            raise ValueError("mrl serve refuses requests without its token: give token_file or token_variable")
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
    `server`, the training ranks hold its weights, split and computed like the policy's, in model.dtype."""
    server: TeacherServers | None = None
    """Servers that compute the teacher's log-probs, for a teacher too large for the training ranks; default: the ranks
    do."""
    parameters: PositiveInt | None = None
    """Parameters of the teacher, from which `mrl plan` estimates its memory on the training ranks; default: counted in
    its config.json where that is on this machine, else not estimated."""
    weight: PositiveFloat = 1.0
    """Weight of the teacher in the advantages."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the advantages that rewards give, after their normalisation; 0: the teacher alone."""
