"""Recipe keys of environments that speak in a chat template, or are programs that ask the policy endpoint."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from megatron_rl.recipe.section import PositiveFloat, PositiveInt, Section

_VARIABLE = re.compile(r"[A-Za-z_]\w*")


class ChatConfig(Section):
    """Arguments of every environment that can speak in the model's chat template."""

    chat_template: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false`; default: the template's own."""


class EndpointConfig(ChatConfig):
    """Arguments of every environment whose rollouts are programs that call OpenAI's API."""

    sampling: Literal["run", "program"] = "run"
    """run: the run's sampling applies to every call. A request's own temperature, top_p, penalties and seed have no
    effect; its max_tokens and stop only shorten answers. program: values that a request gives replace the run's. The
    trainer still computes log-probs at the run's temperature, so a program that chooses another one trains off policy.
    """
    listen: Literal["loopback", "job"] = "loopback"
    """Interface on which the endpoint listens. loopback: only programs on the driver's own node reach it. job: programs
    on other nodes of the job reach it as well, through the interface between the nodes."""
    max_calls: PositiveInt = 64
    """Calls of one rollout, at most. A rollout that exceeds this or one of the next two limits is lost."""
    max_branches: PositiveInt = 16
    """Sequences of one rollout, at most. A call whose conversation does not extend a known one begins another one, and
    so does each further answer of a call with n above 1."""
    max_tokens: PositiveInt | None = None
    """Tokens of all prompts and answers of one rollout together, at most. Of a prompt that continues a known sequence,
    only what it adds counts. Default: no limit."""
    concurrency: PositiveInt = 256
    """Rollouts at a time, for each driver; further ones wait."""
    timeout_s: PositiveFloat = 900.0
    """Longest time of one rollout in seconds, waits for the model included. Its program is then ended and the rollout
    lost. It must be below job.silence_limit_s, because a program that works for long without a call looks like a hang.
    environment.rollout_limit_s, if set, bounds it as well."""
    variables: dict[str, str | None] = {}
    """Environment variables of the programs, besides PATH, HOME and a few like them. null: the value in the run's own
    environment, for a secret that does not belong into a recipe."""

    @field_validator("variables")
    @classmethod
    def _have_names(cls, variables: dict[str, str | None]) -> dict[str, str | None]:
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        return variables
