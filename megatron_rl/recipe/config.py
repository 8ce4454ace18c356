"""Typed, frozen configuration of a run.

The launcher validates recipes with it before anything starts, and the ranks read it from `resolved.yaml`. It imports
neither torch nor megatron-core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import LOOK_S, PATIENCE_S, UnreadableRecord
from megatron_rl.recipe.contradictions import contradictions
from megatron_rl.recipe.engines import AUTO
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.grpo import USUAL_DUAL_CLIP
from megatron_rl.recipe.ratio_bounds import USUAL_UPPER, ImportanceConfig
from megatron_rl.recipe.removed import without_removed
from megatron_rl.recipe.sections import Sections


class RunConfig(Sections):
    """A recipe with every default written out, whose sections fit together."""

    @model_validator(mode="before")
    @classmethod
    def _tolerated(cls, values: Any) -> Any:
        """Drop removed keys that a run of an earlier version has recorded."""
        return without_removed(values) if isinstance(values, Mapping) else values

    @model_validator(mode="before")
    @classmethod
    def _without_answers(cls, values: Any) -> Any:
        """Fill in what a supervised recipe does not need: `grpo`, and `sampling` without an environment. Null removes
        the section of a recipe that is extended."""
        training = values.get("training") if isinstance(values, Mapping) else None
        if not isinstance(training, Mapping) or training.get("objective") != "supervised":
            return values
        changed = dict(values)
        if changed.get("grpo", {}) is None:
            del changed["grpo"]
        if not any(changed.get(key) for key in ("environment", "environments")):
            changed["sampling"] = changed.get("sampling") or {"max_new_tokens": 1}
        return changed

    @model_validator(mode="after")
    def _engine_is_named(self) -> RunConfig:
        """Choose the engine as far as the recipe alone can: vLLM where it says how to start it."""
        if self.inference.engine == AUTO:
            given = self.inference.vllm is not None and self.job.device == "cuda"
            named = self.inference.model_copy(update={"engine": "vllm" if given else "native"})
            object.__setattr__(self, "inference", named)  # sections are frozen
        return self

    @model_validator(mode="after")
    def _off_policy_tokens_are_bounded(self) -> RunConfig:
        """Fill in the defaults of `grpo.importance` and `grpo.dual_clip`, which depend on other sections."""
        if not self.supervised:
            object.__setattr__(self, "grpo", self.grpo.model_copy(update=self._bounds()))  # sections are frozen
        return self

    def _bounds(self) -> dict[str, Any]:
        grpo, lags = self.grpo, self.asynchronous.max_lag > 0
        found: dict[str, Any] = {}
        corrects = "importance" in grpo.model_fields_set or grpo.rejection is not None
        if not corrects and (lags or self.inference.engine == "vllm"):
            found["importance"] = ImportanceConfig(upper=USUAL_UPPER)
        chosen = "dual_clip" in grpo.model_fields_set or grpo.policy_loss != "clip"
        if not chosen and (lags or grpo.updates_per_step > 1):
            found["dual_clip"] = USUAL_DUAL_CLIP
        return found

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if reason := next(contradictions(self), None):
            raise ValueError(reason)
        return self

    @property
    def has_replicas(self) -> bool:
        """Whether replicas answer, each a separate world, instead of the training ranks."""
        return self.placement.mode == "partitioned" or self.inference.own_vllm is not None

    @property
    def shares_devices(self) -> bool:
        """Whether the replicas take turns with the training ranks on the same devices."""
        return self.has_replicas and self.placement.mode == "colocated"


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # both are safe; that of libyaml is five times as fast


def read_config(run_dir: RunDir) -> RunConfig:
    """Read the configuration that a run was submitted with.

    Raises ConfigurationError, and OSError if the file cannot be read, or holds no YAML: mrl-submit has written it
    whole, so that is a fault of the disk or the network, after which the run starts again.
    """
    try:
        return RunConfig.model_validate(_mapping_in(run_dir.resolved))
    except ValidationError as error:
        raise ConfigurationError(f"{run_dir.resolved}: {error}") from error


def _mapping_in(path: Path) -> dict[str, Any]:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = yaml.load(read_bytes(path).decode("utf-8"), _Loader)
            if isinstance(found, dict):
                return found
            why = "no mapping"
        except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # LookupError: !!int ""
            why = str(error)
        if time.monotonic() > give_up:
            raise UnreadableRecord(f"{path} is damaged: {why}")
        time.sleep(LOOK_S)
