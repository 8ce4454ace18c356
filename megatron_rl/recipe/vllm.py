"""Recipe keys of the vLLM that a run starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, PlainValidator, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_rl.recipe.section import PathMark, Section
from megatron_rl.recipe.vllm_drafts import draft_faults, draft_of
from megatron_rl.recipe.vllm_options import GPU_SHARE, GPU_SHARE_OPTION, option_name, owned
from megatron_rl.recipe.vllm_precision import Precision, precision_of


def _plain_value(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float | str):
        return value
    raise PydanticCustomError("plain", "neither text nor a number, true or false")


VllmValue = Annotated[
    bool | int | float | str,
    PlainValidator(_plain_value),
    WithJsonSchema({"type": ["boolean", "number", "string"], "words": "text, a number, true or false (JSON as text)"}),
]


def _free_option(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        raise ValueError("not an option of vLLM: write its long name without dashes in front")
    if why := owned(name):
        raise ValueError(why)
    return name


VllmOption = Annotated[str, AfterValidator(_free_option)]
"""Name of an option. Each name is checked, so that all refusals are reported at once."""


class VllmConfig(Section):
    """vLLM that the run starts: one `vllm serve` per replica."""

    image: Annotated[str, PathMark("image")] | None = None
    """Container image with vLLM, on clusters with containers; default: the run's image."""
    python: Annotated[str, PathMark("program", read=False)] | None = None
    """Python that has vLLM, as a path in the image or on this machine; default: the Python of the ranks."""
    newer: bool = False
    """Use a vLLM newer than the releases that were tried (docs/partitioned.md), like the newest of them. The check of
    each version of the weights shows whether it computes the same."""
    forms: bool = False
    """Whether programs may force the form of an answer (`tool_choice: required`, `response_format`; docs/endpoint.md).
    vLLM then loads the tokenizer too, which must be Hugging Face's, and its guided decoding. Without it, such a call is
    refused with 400."""
    args: Mapping[VllmOption, VllmValue] = {}
    """Further options of `vllm serve`, by their long names without dashes in front, such as `gpu-memory-utilization:
    0.85`. true gives the option alone, false its opposite (--no-...). Options that the run sets itself, such as `model`
    or `port`, are refused."""

    @field_validator("args")
    @classmethod
    def _can_be_given(cls, args: Mapping[str, VllmValue]) -> Mapping[str, VllmValue]:
        seen: set[str] = set()
        for name in args:
            if option_name(name) in seen:
                raise ValueError(f"{name}: given twice, with dashes and with underscores")
            seen.add(option_name(name))
        if faults := draft_faults(args):
            raise ValueError("; ".join(faults))
        return args

    @model_validator(mode="after")
    def _forms_or_drafts(self) -> VllmConfig:
        if self.forms and self.draft:
            raise ValueError("forms: was not tried together with speculative decoding (args.speculative-config)")
        return self

    def gives(self, option: str) -> bool:
        """Whether `args` has an option, however its key is written."""
        return any(option_name(name) == option for name in self.args)

    @property
    def gpu_share(self) -> float:
        given = [value for name, value in self.args.items() if option_name(name) == GPU_SHARE_OPTION]
        return float(given[0]) if given else GPU_SHARE

    @property
    def precision(self) -> Precision:
        return precision_of(self.args)

    @property
    def draft(self) -> dict[str, Any]:
        """Settings of speculative decoding, empty without it."""
        return draft_of(self.args)

    @model_validator(mode="after")
    def _shares_a_gpu(self) -> VllmConfig:
        try:
            valid = 0 < self.gpu_share <= 1
        except ValueError:
            valid = False
        if not valid:
            raise ValueError("args: gpu-memory-utilization must be a share of a GPU's memory, above 0 and at most 1")
        return self


def as_policy(own: VllmConfig | None) -> VllmConfig:
    """Return the settings of a vLLM with another model than the policy: image and Python of the policy's. own: that
    one."""
    return own.model_copy(update={"args": {}}) if own else VllmConfig()
