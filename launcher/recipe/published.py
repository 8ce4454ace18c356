"""Shape of a published model, which a recipe need not repeat: it is read from the config.json of the weights where they
are on this machine, else from models.yaml. The ranks compare it with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import BadInput
from launcher.recipe.located_yaml import read
from launcher.recipe.problems import Locate, where_named
from megatron_rl.recipe.hf_config import (
    CONFIG_FILE,
    SHAPE_KEYS,
    PublishedConfig,
    UnusableWeights,
    contradictions,
    published_config,
    read_hf_config,
)
from megatron_rl.recipe.hub import exported_folder, is_hub_name, is_prefetched, package_of
from megatron_rl.recipe.model import ModelConfig

MODELS = Path(__file__).with_name("models.yaml")


class ShapeUnknown(BadInput):
    """The recipe leaves out the shape of a model whose config.json is not here."""

    def __init__(self, problem: str, model: str, cluster: str | None) -> None:
        super().__init__(problem)
        self.model = model
        self.cluster = cluster


@dataclass(frozen=True, slots=True)
class PublishedModel:
    config: PublishedConfig
    path: Path | None
    """Their config.json; None: they are not on this machine, and the configuration is that of models.yaml."""

    @property
    def source(self) -> str:
        return MODELS.name if self.path is None else str(self.path)

    def missing(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of the shape that the model section of a recipe leaves out, with their values."""
        return {key: value for key, value in self.config.shape.items() if model.get(key) is None}

    def check(self, model: ModelConfig, locate: Locate) -> None:
        """Check that a recipe that starts from the weights agrees with their config.json. Raises BadInput with the
        place of each key that does not. models.yaml is not checked: fewer layers are a way to plan or rehearse without
        the weights."""
        if self.path is None or model.init != "huggingface":
            return
        if wrong := contradictions(model, self.config, self.path):
            raise BadInput(f"{where_named(problem, locate)}: {problem}" for problem in wrong)


def find_published(values: Mapping[str, Any], caches: Sequence[Path], locate: Locate) -> PublishedModel | None:
    """Find the published model that a recipe names; None if it names none, or gives the shape itself and the weights
    are not on this machine.

    Args:
        values: values of the recipe, not validated yet.
        caches: directories of the Hugging Face libraries (HF_HOME).

    Raises:
        ShapeUnknown: the recipe leaves out the shape, and the weights are not here.
        BadInput: the weights are here and cannot be used.
    """
    model = values.get("model")
    asked = model.get("huggingface") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(asked, str):
        return None  # the validation complains if need be
    required = [key for key in SHAPE_KEYS if ModelConfig.model_fields[key].is_required() and model.get(key) is None]
    if model.get("init") != "huggingface" and not required:
        return None  # only the shape would be taken from it
    where, _ = locate(("model", "huggingface"))
    folder = find_folder(asked, caches)
    if folder is not None:
        try:
            return PublishedModel(read_hf_config(folder), folder / CONFIG_FILE)
        except UnusableWeights as error:
            raise BadInput(f"{where}: model.huggingface: {error}") from error
    if known := _models().get(asked):
        return PublishedModel(published_config(known), None)
    if not required:
        return None
    if not is_prefetched(asked):
        raise BadInput(
            f"{where}: model.huggingface: no directory {asked} is on this machine, whose {CONFIG_FILE} would give the "
            f"model's shape; check the path, or, where only the nodes see it, give model.{', model.'.join(required)}"
        )
    looked = f", nor in {' or '.join(map(str, caches))}" if caches else ""
    cluster = values.get("cluster")
    raise ShapeUnknown(
        f"{where}: model.{', model.'.join(required)}: missing, and the {CONFIG_FILE} of {asked}, which would "
        f"give them, is not here{looked}; `mrl prefetch RECIPE` fetches it, or give them in the recipe",
        asked,
        cluster if isinstance(cluster, str) else None,
    )


@cache
def _models() -> dict[str, Any]:
    found: dict[str, Any] = read(MODELS.read_text(encoding="utf-8")).value
    return found


def find_folder(asked: str, caches: Sequence[Path]) -> Path | None:
    try:
        if Path(asked).is_dir():
            return Path(asked)
    except (OSError, ValueError):  # a name that no file can have, or that cannot be looked at
        return None
    if package := package_of(asked):
        exported = (exported_folder(package, home) for home in caches)
        return next((folder for folder in exported if (folder / CONFIG_FILE).is_file()), None)
    if not is_hub_name(asked):
        return None
    for home in caches:
        repository = home / "hub" / f"models--{asked.replace('/', '--')}"
        try:
            snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
            if (snapshot / CONFIG_FILE).is_file():
                return snapshot
        except (OSError, ValueError):
            continue
    return None
