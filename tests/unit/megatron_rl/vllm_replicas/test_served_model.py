"""Folder on which vLLM starts: the model that is trained, as transformers describes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_helpers import PUBLISHED, TOKENS

from launcher.recipe.load import load_recipe
from megatron_rl.generate.vllm.replica import write_served_model
from megatron_rl.recipe.hf_config import differences, published_config, read_hf_config


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_folder_describes_the_model_that_is_trained_with_the_vocabulary_of_its_tokenizer(
    name: str, tmp_path: Path
) -> None:
    model = published_config(PUBLISHED[name]).model()
    folder = write_served_model(model, TOKENS, tmp_path / "new" / "model")
    found = read_hf_config(folder)
    trained = model.model_copy(update={"vocab_size": TOKENS})
    assert differences(trained, found.model(), folder, str) == []
    assert [file.name for file in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_the_folder_has_the_precision_of_the_recipe(dtype: str, name: str, tmp_path: Path) -> None:
    model = load_recipe("demo", [f"model.dtype={dtype}"]).config.model
    folder = write_served_model(model, 15, tmp_path)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == name
