"""Shape of published weights: recipes may leave it out, and may not contradict it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from launcher.recipe.published import ShapeUnknown
from megatron_rl.recipe.architectures.parts import written_scaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.5,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": True,
}


def weights(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return folder


def recipe(tmp_path: Path, **model: Any) -> str:
    values = yaml.safe_load(load_recipe("demo").text)
    values["model"] = {"init": "huggingface", **model}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_the_shape_is_that_of_config_json(tmp_path: Path) -> None:
    model = load_recipe(recipe(tmp_path, huggingface=str(weights(tmp_path / "w")))).config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (30, 576, 1536)
    assert (model.num_attention_heads, model.num_query_groups, model.head_size) == (9, 3, 64)
    assert (model.max_position_embeddings, model.vocab_size, model.tied_embeddings) == (8192, 49152, True)
    assert (model.rope_base, model.layernorm_epsilon, model.qkv_bias, model.qk_norm) == (1e5, 1e-5, False, False)
    assert model.rope_scaling is not None
    assert written_scaling(model.rope_scaling) == LLAMA["rope_scaling"]


def test_a_repeated_shape_must_agree_with_the_weights(tmp_path: Path) -> None:
    folder = weights(tmp_path / "w")
    assert load_recipe(recipe(tmp_path, huggingface=str(folder), num_layers=30, rope_base=1e5))
    asked = recipe(tmp_path, huggingface=str(folder), num_layers=28)
    with pytest.raises(BadInput) as refused:
        load_recipe(asked, ["model.layernorm_epsilon=1e-6"])
    lines = Path(asked).read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if "num_layers" in text)
    assert refused.value.problems == (
        f"{asked}:{line}: model.num_layers 28 contradicts 30 (num_hidden_layers) of {folder}/config.json",
        "override 'model.layernorm_epsilon=1e-6': model.layernorm_epsilon 1e-06 contradicts 1e-05 (rms_norm_eps) of "
        f"{folder}/config.json",
    )


def test_hub_weights_are_found_in_the_cache_of_prefetch(tmp_path: Path) -> None:
    repository = tmp_path / "home" / "hub" / "models--org--name"
    weights(repository / "snapshots" / "abc", num_hidden_layers=7)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    asked = recipe(tmp_path, huggingface="org/name")
    assert load_recipe(asked, caches=[tmp_path / "other", tmp_path / "home"]).config.model.num_layers == 7
    with pytest.raises(ShapeUnknown, match=r"my.yaml:\d+: model.num_layers, .*: missing, .*org/name.*mrl prefetch"):
        load_recipe(asked, caches=[tmp_path / "other"])


def test_a_missing_directory_of_weights_is_reported_before_a_missing_shape(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"my.yaml:\d+: model.huggingface: no directory \S*nothere is on this machine"
    ) as refused:
        load_recipe(recipe(tmp_path, huggingface="./nothere"))
    assert not isinstance(refused.value, ShapeUnknown), "prefetch cannot bring it"


def test_unsupported_weights_are_refused(tmp_path: Path) -> None:
    folder = weights(tmp_path / "w", architectures=["GPT2LMHeadModel"])
    with pytest.raises(BadInput, match=r"my.yaml:\d+: model.huggingface: .* GPT2LMHeadModel is not supported"):
        load_recipe(recipe(tmp_path, huggingface=str(folder)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_attention_heads": 7}, "hidden_size 576 is not divisible by num_attention_heads 7"),
        ({"hidden_size": "wide"}, "hidden_size: "),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rotary positions of type longrope are not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling has factor and no rope_type"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}, "rope_scaling": None},
            "rope_parameters has factor, low_freq_factor and no rope_type",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters and rope_scaling differ"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling has no low_freq_factor, high_freq"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"logit_scale": 0.5}, "logit_scale 0.5 is not known for LlamaForCausalLM, and may change the model"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ],
)
def test_an_unsupported_config_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load_recipe(recipe(tmp_path, huggingface=str(weights(tmp_path / "w", **values))))


def test_keys_that_leave_the_model_as_it_is_are_accepted(tmp_path: Path) -> None:
    """The folder that transformers makes of a GGUF file has them."""
    folder = weights(tmp_path / "w", _model_name_or_path="Smollm2 135M 8k", unk_token_id=0, attention_dropout=0.1)
    assert load_recipe(recipe(tmp_path, huggingface=str(folder))).config.model.num_layers == 30
