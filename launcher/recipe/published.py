"""The shape of a published model, from the config.json of its weights: a recipe need not repeat it.

Only of weights that are on this machine; where they are elsewhere the recipe has to say the shape, and the ranks see
whether it is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import BadInput
from launcher.recipe.problems import Locate, where_named
from megatron_rl.model.config import ModelConfig, exported_folder, is_hub_name, is_prefetched, package_of
from megatron_rl.model.hf_config import (
    CONFIG_FILE,
    KEYS,
    HuggingFaceConfig,
    UnusableWeights,
    contradictions,
    read_hf_config,
    shape,
)


class ShapeUnknown(BadInput):
    """The recipe leaves out what only a config.json says that is not here."""

    def __init__(self, problem: str, model: str, cluster: str | None) -> None:
        super().__init__(problem)
        self.model = model
        """Its name on the hub, or package:NAME."""
        self.cluster = cluster
        """The recipe's."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Weights that `model.huggingface` names and that are on this machine."""

    path: Path
    """Of their config.json."""
    config: HuggingFaceConfig

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a recipe with what they leave out of the model's shape."""
        model = values["model"]
        missing = {key: value for key, value in shape(self.config).items() if model.get(key) is None}
        return {**values, "model": {**model, **missing}}

    def check(self, model: ModelConfig, locate: Locate) -> None:
        """Raises BadInput where a recipe says otherwise than config.json, with file and line of each key."""
        if wrong := contradictions(model, self.config, self.path):
            raise BadInput(f"{where_named(problem, locate)}: {problem}" for problem in wrong)


def find_published(values: Mapping[str, Any], caches: Sequence[Path], locate: Locate) -> PublishedModel | None:
    """The published model that a recipe starts from; None where it does not, or says the shape itself and the weights
    are not on this machine.

    Args:
        values: of the recipe, not validated yet.
        caches: of the Hugging Face libraries (HF_HOME).

    Raises:
        ShapeUnknown: the recipe leaves out what the weights would say, and they are not here.
        BadInput: they are here and cannot be used.
    """
    model = values.get("model")
    if not isinstance(model, Mapping) or model.get("init") != "huggingface":
        return None
    asked = model.get("huggingface")
    if not isinstance(asked, str):
        return None  # as the validation will say
    where, _ = locate(("model", "huggingface"))
    folder = _folder(asked, caches)
    if folder is not None:
        try:
            return PublishedModel(folder / CONFIG_FILE, read_hf_config(folder))
        except UnusableWeights as error:
            raise BadInput(f"{where}: model.huggingface: {error}") from error
    required = [key for key in KEYS if ModelConfig.model_fields[key].is_required() and model.get(key) is None]
    if not required:
        return None
    if not is_prefetched(asked):
        raise BadInput(
            f"{where}: model.huggingface: there is no directory {asked} here, whose {CONFIG_FILE} would say what the "
            f"model is; check the path, or, where only the nodes see it, give model.{', model.'.join(required)}"
        )
    looked = f", nor in {' or '.join(map(str, caches))}" if caches else ""
    cluster = values.get("cluster")
    raise ShapeUnknown(
        f"{where}: model.{', model.'.join(required)}: missing, and the {CONFIG_FILE} of {asked}, which would say, "
        f"is not here{looked}; `mrl prefetch RECIPE` fetches it, or give them in the recipe",
        asked,
        cluster if isinstance(cluster, str) else None,
    )


def _folder(asked: str, caches: Sequence[Path]) -> Path | None:
    """Where the weights are, as far as this machine can see."""
    try:
        if Path(asked).is_dir():
            return Path(asked)
    except (OSError, ValueError):  # a name that no file can have; or one that cannot be looked at
        return None
    if package := package_of(asked):
        exported = (exported_folder(package, cache) for cache in caches)
        return next((folder for folder in exported if (folder / CONFIG_FILE).is_file()), None)
    if not is_hub_name(asked):
        return None
    for cache in caches:
        repository = cache / "hub" / f"models--{asked.replace('/', '--')}"
        try:
            snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
            if (snapshot / CONFIG_FILE).is_file():
                return snapshot
        except (OSError, ValueError):
            continue
    return None
