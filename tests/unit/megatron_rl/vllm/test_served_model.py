"""Folder on which vLLM starts: the model that is trained, as transformers describes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_helpers import PUBLISHED, TOKENS, publish
from optional import needs

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import KEYS, differences, read_hf_config, shape
from megatron_rl.vllm.served_model import write_served_model

PARTITIONED = (
    *("inference.engine=vllm", "placement.mode=partitioned", "placement.inference.nodes=1", "job.nodes=2"),
    *("resume.partial=keep", "model.vocab_multiple=16"),
)

RECIPE = """
extends: demo
name: mine
model:
  init: huggingface
  huggingface: {published}
  qkv_bias: false
  qk_norm: true
  head_dim: 12
  hidden_size: 32
  ffn_hidden_size: 48
  max_position_embeddings: 64
  vocab_size: 61
  rope_base: 10000.0
tokenizer: {{type: huggingface, path: {published}}}
"""


def test_a_model_that_was_never_published_gets_a_configuration_of_its_own(tmp_path: Path) -> None:
    config = load_recipe("demo", PARTITIONED).config
    folder = write_served_model(config, tmp_path / "model")
    found = ModelConfig(**shape(read_hf_config(folder)), init="from-scratch")
    vocabulary = len(config.tokenizer.alphabet) + 2
    trained = config.model.model_copy(update={"vocab_size": vocabulary})
    assert differences(trained, found, folder, KEYS) == []
    assert [file.name for file in folder.iterdir()] == ["config.json"], "characters are no tokenizer of transformers"


@needs("transformers")
def test_the_vocabulary_is_the_tokenizers_and_the_settings_of_generation_stay_behind(tmp_path: Path) -> None:
    published = tmp_path / "published"
    publish(published, PUBLISHED["Qwen3, wider heads"])
    (published / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE.format(published=published))
    config = load_recipe(str(recipe), PARTITIONED).config
    folder = write_served_model(config, tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    assert (described["architectures"], described["torch_dtype"]) == (["Qwen3ForCausalLM"], "float32")
    assert described["vocab_size"] == TOKENS
    assert (folder / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    assert not (folder / "generation_config.json").exists()
    assert not list(folder.glob("*.safetensors"))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    config = load_recipe("demo", [*PARTITIONED, "tokenizer={type: huggingface, path: /nowhere/model}"]).config
    with pytest.raises(ConfigurationError, match=r"tokenizer\.path /nowhere/model: no such directory"):
        write_served_model(config, tmp_path / "model")


def test_a_model_that_vllm_does_not_know_is_refused_when_the_recipe_is_read() -> None:
    load_recipe("demo", ["model.qk_norm=true"])
    with pytest.raises(BadInput, match="vLLM has no model with qkv_bias true, qk_norm true and num_experts null"):
        load_recipe("demo", [*PARTITIONED, "model.qk_norm=true"])


def test_stop_strings_without_a_tokenizer_of_transformers_are_refused_when_the_recipe_is_read() -> None:
    load_recipe("demo", ["sampling.stop=['=']"])
    with pytest.raises(BadInput, match=r"sampling\.stop is given, and vLLM has no tokenizer of type characters"):
        load_recipe("demo", [*PARTITIONED, "sampling.stop=['=']"])
