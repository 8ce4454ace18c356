"""A prediction layer that a run trains: read from published files, saved, and exported as it was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_helpers import checkpointer, outcome
from hf_helpers import PUBLISHED, VOCAB, model_of, saved_run
from published_ahead import OF_QWEN, of_deepseek, publish_ahead
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.checkpoint.initial_weights import read_initial_weights
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import ModelConfig

TRAINED = {"dtype": "bf16", "prediction_loss_coefficient": 0.1}
FAMILIES = {"DeepSeek-V3": of_deepseek(PUBLISHED["DeepSeek-V3"]["num_hidden_layers"]), "Qwen3.5 MoE": OF_QWEN}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trained_layer_and_the_copies_of_the_models_tables_are_exported(
    tmp_path: Path, platform: Any, groups: Any, family: str
) -> None:
    tensors = publish_ahead(tmp_path / "hf", PUBLISHED[family], FAMILIES[family], torch.bfloat16)
    checkpoint = saved_run(tmp_path / "hf", tmp_path / "run", platform, **TRAINED)
    to_hugging_face(checkpoint, tmp_path / "back", platform)
    assert same(load_file(tmp_path / "back" / "model.safetensors"), tensors)

    model = model_of(tmp_path / "hf", **TRAINED)
    policy = build_policy(model, VOCAB, platform)
    read_initial_weights(policy, model, groups)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 1
    saving = checkpointer(tmp_path / "run")
    saving.save(2, {"model": policy.sharded_state_dict()}, {})
    outcome(saving)
    to_hugging_face(RunDir(tmp_path / "run").checkpoint(2), tmp_path / "back", platform, replace=True)
    back = load_file(tmp_path / "back" / "model.safetensors")
    raised = {name: (each.float() if name.endswith("A_log") else each) + 1 for name, each in tensors.items()}
    assert same(back, raised)
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert described[FAMILIES[family].key] == 1


def test_a_checkpoint_without_the_layer_takes_it_from_the_published_files(
    tmp_path: Path, platform: Any, groups: Any
) -> None:
    """Both a conversion, which keeps it beside its weights, and a run that did not train it."""
    tensors = publish_ahead(tmp_path / "hf", PUBLISHED["DeepSeek-V3"], FAMILIES["DeepSeek-V3"], torch.bfloat16)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", platform)
    run = saved_run(tmp_path / "hf", tmp_path / "run", platform, dtype="bf16")
    for checkpoint in (tmp_path / "megatron", run):
        policy = started_from(checkpoint, tmp_path / "hf", platform, groups)
        assert torch.equal(
            policy.get_parameter("mtp.layers.0.eh_proj.weight"), tensors["model.layers.2.eh_proj.weight"]
        )
        assert torch.equal(policy.get_parameter("decoder.final_layernorm.weight"), tensors["model.norm.weight"])

    recipe = yaml.safe_load(RunDir(tmp_path / "run").resolved.read_text())
    recipe["model"] |= {"init": "from-scratch", "huggingface": None}
    RunDir(tmp_path / "run").resolved.write_text(yaml.safe_dump(recipe))
    with pytest.raises(ConfigurationError, match="holds no prediction layer"):
        started_from(run, tmp_path / "hf", platform, groups)


def started_from(checkpoint: Path, published: Path, platform: Any, groups: Any) -> Any:
    model: ModelConfig = model_of(published, **TRAINED, init="checkpoint", checkpoint=str(checkpoint))
    policy = build_policy(model, VOCAB, platform)
    read_initial_weights(policy, model, groups)
    return policy


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(each, expected[name]) for name, each in found.items())
