"""The recipes in docs/your-own.md load as they are written there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.recipe.advice import warnings
from launcher.recipe.load import load_recipe

PAGE = Path(__file__).parents[4] / "docs" / "your-own.md"
RECIPES = re.findall(r"^    extends: .*\n(?:    .*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def test_the_page_has_a_recipe_for_a_cpu_and_one_for_gpus() -> None:
    assert len(RECIPES) == 2


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_of_the_page_loads_without_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "reward.py").write_text("def reward(response, **columns):\n    return 1.0\n")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text.replace("/shared/", "./"))
    config = load_recipe(str(recipe)).config
    assert config.name == "mine" and list(warnings(config)) == []
