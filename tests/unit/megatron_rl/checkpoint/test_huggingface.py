"""Tiny random weights of transformers' own models, as the ranks read them; and directories that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import full_forward
from hf_helpers import EXPERTS, PUBLISHED, SENTENCE, SIZES, VOCAB, model_of, publish
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.hf.folder import INDEX, WeightsFolder
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.recipe.architectures.row import NULL, REQUIRED, Architecture
from megatron_rl.recipe.architectures.rows import ARCHITECTURES
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import read_hf_config


def loaded(folder: Path, platform: Any, **fields: Any) -> Policy:
    model = model_of(folder, **fields)
    policy = build_policy(model, VOCAB, platform)
    load_pretrained(policy, model, folder)
    return policy


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_logits_equal_those_of_transformers(tmp_path: Path, platform: Any, groups: Any, config: Any) -> None:
    theirs = publish(tmp_path, config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    policy = loaded(tmp_path, platform)
    with torch.no_grad():
        expected = theirs(torch.tensor([SENTENCE])).logits[0]
    assert expected.std() > 0.3  # otherwise any two would be close
    torch.testing.assert_close(full_forward(policy, SENTENCE), expected, rtol=1e-4, atol=3e-4)


def test_weights_are_converted_to_the_dtype_of_the_policy(tmp_path: Path, platform: Any, groups: Any) -> None:
    publish(tmp_path, PUBLISHED["Qwen2"], torch.bfloat16, shard="1GB")
    wide, narrow = loaded(tmp_path, platform), loaded(tmp_path, platform, dtype="bf16")
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(wide.decoder.final_layernorm.weight, stored.float())
    assert torch.equal(narrow.decoder.final_layernorm.weight, stored)


def test_rows_that_pad_the_embedding_are_zero(tmp_path: Path, platform: Any, groups: Any) -> None:
    publish(tmp_path, PUBLISHED["Qwen2"])
    table = loaded(tmp_path, platform).embedding.word_embeddings.weight
    assert table.shape[0] == 64
    assert table[:VOCAB].abs().min() > 0 and not table[VOCAB:].any()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder, PUBLISHED["Qwen2"])
    return folder


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def in_config(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: changed(folder / "config.json", lambda document: document.update(values))


def in_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], Any]:
    return lambda folder: changed(folder / INDEX, lambda document: change(document["weight_map"]))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def with_extra_tensor(folder: Path) -> None:
    tensors = load_file(shards(folder)[0])
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.zeros(4)}, shards(folder)[0])
    changed(
        folder / INDEX,
        lambda document: document["weight_map"].update({"model.layers.0.self_attn.sinks": shards(folder)[0].name}),
    )


HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "another architecture": (
        in_config(architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel is not supported: Qwen2ForCausalLM, .*Olmo3ForCausalLM are",
    ),
    "a config without a key": (
        lambda folder: changed(folder / "config.json", lambda document: document.pop("hidden_size")),
        "config.json: hidden_size: missing",
    ),
    "another kind of rotation": (
        in_config(rope_parameters={"rope_type": "longrope", "factor": 4.0}),
        "rotary positions of type longrope are not supported",
    ),
    "a rotation without a base": (
        in_config(rope_parameters={"rope_type": "default", "rope_theta": None}),
        "config.json: rope_theta null is not a number",
    ),
    "a config of another size": (
        in_config(intermediate_size=64),
        r"mlp.gate_proj.weight is \[48, 32\], and by config.json it would be \[64, 32\]",
    ),
    "a config with more layers": (in_config(num_hidden_layers=3), "holds no tensor model.layers.2"),
    "a config with fewer layers": (in_config(num_hidden_layers=1), "which no model of the shape in config.json has"),
    "a tensor of another model": (with_extra_tensor, "holds model.layers.0.self_attn.sinks, which no model"),
    "a missing shard": (lambda folder: shards(folder)[1].unlink(), "incomplete: model-00002-of-.* is missing"),
    "a truncated shard": (lambda folder: cut(shards(folder)[1]), "model-00002-of-.* is cut short or damaged"),
    "an empty shard": (lambda folder: shards(folder)[1].write_bytes(b""), "is cut short or damaged"),
    "an index that is none": (lambda folder: (folder / INDEX).write_text("[]"), "is not an index of safetensors"),
    "an index that invents a tensor": (
        in_index(lambda files: files.update({"model.more": shards_name(files)})),
        "says that .* holds model.more, which it does not",
    ),
    "an index that confuses shards": (
        in_index(lambda files: files.update({"model.embed_tokens.weight": max(files.values())})),
        "holds model.embed_tokens.weight, but .* puts it into",
    ),
    "an index that forgets a tensor": (in_index(lambda files: files.pop("model.norm.weight")), "does not know it"),
    "a whole file beside an older index": (
        lambda folder: shutil.copy(shards(folder)[0], folder / "model.safetensors"),
        r"holds two sets of weights: the \d+ files that .*, and model.safetensors; remove",
    ),
    "a shard of another save": (
        lambda folder: shutil.copy(shards(folder)[0], folder / "model-00009-of-00009.safetensors"),
        r"two sets of weights: .* and model-00009-of-00009.safetensors; remove",
    ),
    "shards beside a whole file": (
        lambda folder: [shutil.copy(shards(folder)[0], folder / "model.safetensors"), (folder / INDEX).unlink()],
        r"two sets of weights: model.safetensors, and model-00001-of-.* more; remove",
    ),
    "nothing": (lambda folder: [path.unlink() for path in [*shards(folder), folder / INDEX]], "holds no weights"),
}


def shards_name(files: dict[str, str]) -> str:
    return next(iter(files.values()))


@pytest.mark.parametrize(("harm", "said"), HARM.values(), ids=HARM)
def test_an_incomplete_directory_is_refused(
    tmp_path: Path, whole: Path, harm: Callable[[Path], Any], said: str
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    harm(folder)
    with pytest.raises(ConfigurationError, match=said):
        files = WeightsFolder(folder)
        from megatron_rl.model.hf_mapping import sources
        from megatron_rl.model.hf_weights import weights

        files.check(sources(weights(model_of(folder))).values(), tied=False)


def test_a_recipe_of_another_model_is_refused(whole: Path, platform: Any, groups: Any) -> None:
    model = model_of(whole, layernorm_epsilon=1e-3)
    with pytest.raises(ConfigurationError, match=r"model.layernorm_epsilon 0.001 contradicts 1e-05 \(rms_norm_eps\)"):
        load_pretrained(build_policy(model, VOCAB, platform), model, whole)


def test_a_single_expert_with_a_normalised_weight_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    fields = {"num_experts_per_tok": 1, "norm_topk_prob": True, "architectures": ["Qwen3MoeForCausalLM"]}
    AutoConfig.for_model(**EXPERTS, **fields).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="norm_topk_prob true is not supported"):
        read_hf_config(tmp_path)


def test_a_window_limits_the_positions(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=16, architectures=["MistralForCausalLM"])
    config.save_pretrained(tmp_path)
    assert read_hf_config(tmp_path).shape["max_position_embeddings"] == 16


@pytest.mark.parametrize("row", [row for row in ARCHITECTURES if row.inside is None], ids=lambda row: row.model_type)
def test_a_missing_key_means_what_it_means_to_transformers(row: Architecture) -> None:
    """Except a window without use_sliding_window, and prediction layers, of which transformers has none."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(row.model_type)
    ours = {key: default for part in row.parts for key, default in part.keys.items()}
    usual = {key for key, default in ours.items() if default not in (None, REQUIRED, NULL) and hasattr(theirs, key)}
    differing = {key for key in usual if getattr(theirs, key) != ours[key]}
    assert differing <= {"sliding_window", "num_nextn_predict_layers"}
    rotation = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours["rope_theta"] == rotation["rope_theta"]
