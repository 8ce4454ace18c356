"""Hugging Face weights to checkpoints and back: every tensor, name, dtype and bit is kept, and nothing is half done."""

from __future__ import annotations

import json
import os
import resource
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_helpers import checkpointer, outcome
from core_helpers import full_forward, tiny_model, tiny_policy, tiny_run
from family_shapes import DEEPSEEK
from hf_helpers import (
    PUBLISHED,
    SENTENCE,
    SHARD,
    TOKENS,
    VOCAB,
    model_of,
    publish,
    saved_run,
    tokenizer,
    usual_mode,
)
from safetensors.torch import load_file, save_file
from supervised_helpers import supervised_recipe

from megatron_rl.checkpoint.hf.origin import contradictions, origin_of
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.checkpoint.initial_weights import load_pretrained, read_initial_weights
from megatron_rl.checkpoint.source import find_source
from megatron_rl.contract.manifest import CheckpointError, read_manifest
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.errors import ConfigurationError


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def logits_of(folder: Path, sentence: Sequence[int] = SENTENCE) -> torch.Tensor:
    """Logits that transformers computes from a directory."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([sentence])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Qwen2", torch.float32),
        ("Qwen2, tied", torch.bfloat16),
        ("Qwen3, wider heads", torch.bfloat16),
        ("Llama 3.1", torch.float32),
        ("Llama, one key for all", torch.float32),
        ("Mistral", torch.float16),
        ("Qwen3 MoE", torch.bfloat16),
        ("DeepSeek-V3", torch.bfloat16),
        ("gpt-oss", torch.bfloat16),
        ("GLM-4.5", torch.bfloat16),
        ("Qwen3-Next", torch.bfloat16),
        ("Qwen3.5", torch.float32),
        ("Qwen3.5 MoE", torch.bfloat16),
        ("Gemma 3", torch.bfloat16),
    ],
)
def test_a_round_trip_changes_no_bit(tmp_path: Path, platform: Any, groups: Any, name: str, dtype: torch.dtype) -> None:
    publish(tmp_path / "hf", PUBLISHED[name], dtype)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", platform, shard_bytes=SHARD)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", platform, shard_bytes=SHARD)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert same_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "back").iterdir()}
    assert {*modes.values()} == {usual_mode(tmp_path)}, f"another user's server reads them: {modes}"
    files = "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
    for file in files:
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron", "back"}


def with_output_layer(folder: Path, change: float) -> Path:
    """Tied weights that are published twice, as in some models."""
    publish(folder, PUBLISHED["Qwen2, tied"], shard="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_tied_weights_published_twice_stay_so(tmp_path: Path, platform: Any, groups: Any) -> None:
    source = with_output_layer(tmp_path / "hf", 0.0)
    to_megatron(source, tmp_path / "m", platform, shard_bytes=SHARD)
    to_hugging_face(tmp_path / "m", tmp_path / "back", platform, shard_bytes=SHARD)
    assert same_bits(tensors_of(source), tensors_of(tmp_path / "back"))


def test_tied_weights_that_differ_are_refused(tmp_path: Path, platform: Any, groups: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        to_megatron(with_output_layer(tmp_path / "hf", 0.1), tmp_path / "m", platform, shard_bytes=SHARD)
    model = model_of(tmp_path / "hf")
    with pytest.raises(ConfigurationError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        load_pretrained(build_policy(model, VOCAB, platform), model, tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("self_attn.k_proj.weight", "have different types, but decoder.layers.1.self_attention.linear_qkv.weight comb"),
        ("input_layernorm.weight", r"layers.1.input_layernorm.weight is torch.float16 and in other layers torch.float"),
    ],
)
def test_weights_that_one_tensor_cannot_hold_are_refused(
    tmp_path: Path, platform: Any, groups: Any, name: str, said: str
) -> None:
    publish(tmp_path / "hf", PUBLISHED["Qwen2"], shard="1GB")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    half = {f"model.layers.1.{name}": tensors[f"model.layers.1.{name}"].half()}
    save_file(tensors | half, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ConfigurationError, CheckpointError), match=said):
        to_megatron(tmp_path / "hf", tmp_path / "m", platform, shard_bytes=SHARD)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_run_starts_from_a_conversion(published: Path, converted: Path, platform: Any, groups: Any) -> None:
    start = {"init": "checkpoint", "huggingface": None, "checkpoint": str(converted)}
    model = model_of(published, vocab_multiple=32, **start)  # 64 rows; the checkpoint has 128
    policy = build_policy(model, VOCAB, platform)
    assert read_initial_weights(policy, model, groups) == read_manifest(converted).digest
    torch.testing.assert_close(full_forward(policy, SENTENCE), logits_of(published), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match=r"epsilon 1e-06 contradicts 1e-05 \(rms_norm_eps\) of "):
        read_initial_weights(policy, model.model_copy(update={"layernorm_epsilon": 1e-6}), groups)


def test_a_recipe_must_not_contradict_the_checkpoint_that_it_starts_from(published: Path, saved: Path) -> None:
    model = model_of(published)
    assert contradictions(model, saved) == []
    (wrong,) = contradictions(model.model_copy(update={"layernorm_epsilon": 1e-6}), saved)
    assert wrong.startswith("model.layernorm_epsilon 1e-06 contradicts 1e-05 (model.layernorm_epsilon) of ")


EXPERTS = {"num_experts": 4, "experts_per_token": 1, "expert_ffn_hidden_size": 16}
RUNS = {
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True, "tied_embeddings": False, "head_dim": 12},
    "LlamaForCausalLM": {"qkv_bias": False, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 16}},
    "Qwen3MoeForCausalLM": EXPERTS | {"qkv_bias": False, "qk_norm": True},
    "Glm4MoeForCausalLM": EXPERTS
    | {
        "experts_per_token": 2,
        "qk_norm": True,
        "partial_rotary_factor": 0.5,
        "tied_embeddings": False,
        "dense_layers": 1,
        "shared_expert_ffn_hidden_size": 32,
        "router": {"score": "sigmoid", "correction_bias": True, "scale": 2.5},
    },
    "DeepseekV3ForCausalLM": DEEPSEEK,
}


@pytest.mark.parametrize(("architecture", "shape"), RUNS.items(), ids=RUNS)
def test_a_checkpoint_of_a_run_from_scratch_loads_in_transformers(
    tmp_path: Path, platform: Any, groups: Any, architecture: str, shape: dict[str, Any]
) -> None:
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model)
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(tiny_run(model=model.model_dump()).model_dump()))
    saving = checkpointer(tmp_path)
    saving.save(40, {"model": policy.sharded_state_dict()}, {})
    outcome(saving)
    to_hugging_face(tmp_path / "checkpoints" / "step-000040", tmp_path / "hf", platform, shard_bytes=SHARD)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == ([architecture], "float32")
    sentence = [token % 15 for token in SENTENCE]
    theirs = logits_of(tmp_path / "hf", sentence)
    torch.testing.assert_close(theirs, full_forward(policy, sentence), rtol=1e-4, atol=1e-4)


def test_config_json_names_the_dtype_of_the_weights(tmp_path: Path, platform: Any, groups: Any) -> None:
    """The run is in fp32 and started from bf16 weights."""
    publish(tmp_path / "hf", PUBLISHED["Qwen2"], torch.bfloat16)
    checkpoint = saved_run(tmp_path / "hf", tmp_path / "run", platform)
    to_hugging_face(checkpoint, tmp_path / "back", platform, shard_bytes=10**9)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert after == before | {"dtype": "float32"}
    assert [path.name for path in (tmp_path / "back").glob("*.safetensors*")] == ["model.safetensors"]
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "back").values()} == {torch.float32}


@pytest.mark.parametrize(("published", "exported"), [(None, [0]), (0, 0), ([5, 0], [5, 0]), ([5], [5, 0])])
def test_generation_from_an_export_ends_where_the_model_was_trained_to_end(
    tmp_path: Path, platform: Any, groups: Any, published: Any, exported: Any
) -> None:
    """The tokenizer's end token is 0. What else generation_config.json says stays."""
    publish(tmp_path / "hf", PUBLISHED["Qwen2"])
    ends = {} if published is None else {"eos_token_id": published}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"top_k": 20, **ends}))
    checkpoint = saved_run(tmp_path / "hf", tmp_path / "run", platform)
    to_hugging_face(checkpoint, tmp_path / "back", platform, shard_bytes=10**9)
    found = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert found == {"top_k": 20, "eos_token_id": exported}


@pytest.mark.parametrize(
    ("recipe", "further"),
    [
        (tiny_run().model_dump(), set()),
        (tiny_run().model_dump() | {"end_tokens": ["<|im_end|>"]}, {TOKENS}),
        (supervised_recipe(data={"path": "rows.jsonl"}), {TOKENS}),
        (supervised_recipe(data={"path": "rows.jsonl", "chat": "never"}), set()),
    ],
    ids=["sampled", "sampled, with the key", "supervised", "supervised, without the template"],
)
def test_the_end_of_a_chat_template_counts_if_it_was_sampled_or_learned(
    tmp_path: Path, recipe: dict[str, Any], further: set[int]
) -> None:
    """A base model, whose tokenizer ends texts by 0, with the template of its instructed sister."""
    chat = tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    chat.chat_template = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    chat.save_pretrained(tmp_path / "base")
    values = dict(recipe)
    ends = values.pop("end_tokens", [])
    values["tokenizer"] = {"type": "huggingface", "path": str(tmp_path / "base"), "end_tokens": ends}
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    assert origin_of(tmp_path / "checkpoints" / "step-000001").ends == {0} | further


def copied(source: Path, target: Path) -> Path:
    for file in source.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return target


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "is incomplete: it holds no tokenizer"),
    "a tokenizer of a larger model": (
        lambda folder: tokenizer(VOCAB + 1).save_pretrained(folder),
        rf"the tokenizer has \d+ tokens, but the embedding {VOCAB} rows",
    ),
    "a tokenizer that is none": (lambda folder: (folder / "tokenizer.json").write_text("{"), "holds no tokenizer that"),
}


@pytest.mark.parametrize(("harm", "said"), REFUSED.values(), ids=REFUSED)
def test_weights_that_would_not_work_later_are_refused(
    tmp_path: Path, published: Path, platform: Any, harm: Callable[[Path], Any], said: str
) -> None:
    folder = copied(published, tmp_path / "hf")
    harm(folder)
    with pytest.raises(ConfigurationError, match=said):
        find_source(str(folder))
    with pytest.raises(ConfigurationError, match=said):
        to_megatron(folder, tmp_path / "m", platform)


def test_an_existing_target_is_replaced_only_on_demand(
    tmp_path: Path, published: Path, saved: Path, platform: Any, groups: Any
) -> None:
    target = tmp_path / "back"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(ConfigurationError, match="exists: give another path, or --force"):
        to_hugging_face(saved, target, platform, shard_bytes=SHARD)
    assert [path.name for path in target.iterdir()] == ["mine"]
    to_hugging_face(saved, target, platform, shard_bytes=SHARD, replace=True)
    assert not (target / "mine").exists()
    assert same_bits(tensors_of(published), tensors_of(target))
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def run_of(saved: Path, folder: Path) -> Path:
    """Copy the run of a checkpoint, to damage it. Returns the checkpoint."""
    return copied(saved.parent.parent, folder) / "checkpoints" / saved.name


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, saved: Path, platform: Any, groups: Any) -> None:
    checkpoint = run_of(saved, tmp_path / "run")
    content = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(content)
    with pytest.raises((CheckpointError, ConfigurationError), match=r"__0_0.distcp is not what was written"):
        to_hugging_face(checkpoint, tmp_path / "back", platform, shard_bytes=SHARD)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, platform: Any, groups: Any) -> None:
    with pytest.raises(ConfigurationError, match="is neither a checkpoint in the directory of its run"):
        to_hugging_face(tmp_path, tmp_path / "back", platform, shard_bytes=SHARD)
    with pytest.raises(ConfigurationError, match="no such directory"):
        to_hugging_face(tmp_path / "none", tmp_path / "back", platform, shard_bytes=SHARD)


@pytest.mark.parametrize("convert", [to_megatron, to_hugging_face])
def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, published: Path, saved: Path, platform: Any, groups: Any, convert: Callable[..., Any]
) -> None:
    """Files are limited to the size of those beside the weights, as if the disk filled up while writing weights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError):
            convert(published if convert is to_megatron else saved, tmp_path / "to", platform, shard_bytes=SHARD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_too_small_a_disk_is_noticed_in_advance(saved: Path, platform: Any, groups: Any, monkeypatch: Any) -> None:
    target = saved.parent / "back"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigurationError, match=r"needs 0.0 GB, and .* has 0.0 GB left"):
        to_hugging_face(saved, target, platform, shard_bytes=SHARD)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b"[" * 5000, None])
def test_a_damaged_manifest_is_named(
    tmp_path: Path, saved: Path, platform: Any, groups: Any, content: bytes | None
) -> None:
    checkpoint = run_of(saved, tmp_path / "run")
    (checkpoint / "manifest.json").unlink()
    if content is None:
        os.mkfifo(checkpoint / "manifest.json")  # opening it would block
    else:
        (checkpoint / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        to_hugging_face(checkpoint, tmp_path / "hf", platform, shard_bytes=SHARD)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def predict(folder: Path, layers: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": layers}))


def with_prediction_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Add a layer that predicts further tokens to published weights, as DeepSeek-V3 has it. Returns its tensors."""
    publish(folder, PUBLISHED["DeepSeek-V3"], torch.bfloat16, shard="1GB")
    added = {
        f"model.layers.2.{name}": torch.randn(shape).bfloat16()
        for name, shape in (
            ("eh_proj.weight", (32, 64)),
            ("enorm.weight", (32,)),
            ("self_attn.o_proj.weight", (32, 20)),
        )
    }
    path = folder / "model.safetensors"
    save_file(load_file(path) | added, path, {"format": "pt"})
    predict(folder, 1)
    return added


def test_layers_that_predict_further_tokens_stay_as_published(tmp_path: Path, platform: Any, groups: Any) -> None:
    """Both from the run that started from them, and from a conversion, which keeps them beside its weights."""
    added = with_prediction_layer(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    checkpoint = saved_run(tmp_path / "hf", tmp_path / "run", platform, dtype="bf16")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", platform, shard_bytes=SHARD)
    for origin in (checkpoint, tmp_path / "megatron"):
        to_hugging_face(origin, tmp_path / "back", platform, shard_bytes=SHARD, replace=True)
        back = tensors_of(tmp_path / "back")
        assert same_bits(tensors_of(tmp_path / "hf"), back) and added.keys() < back.keys()
        assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    (tmp_path / "hf" / "model.safetensors").unlink()
    to_hugging_face(checkpoint, tmp_path / "back", platform, replace=True)
    assert not added.keys() & tensors_of(tmp_path / "back").keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_model_that_sees_keeps_the_parts_that_are_not_trained(tmp_path: Path, platform: Any, groups: Any) -> None:
    """Its experts are stacked, as Qwen3.5 was published; an export has them one by one, as transformers writes them."""
    publish(tmp_path / "text", PUBLISHED["Qwen3.5 MoE"], torch.bfloat16, shard="1GB")
    text = tensors_of(tmp_path / "text")
    seeing = {
        name.replace("model.", "model.language_model.", 1): each
        for name, each in text.items()
        if ".experts." not in name
    }
    for number in range(3):
        experts = f"layers.{number}.mlp.experts"
        of = [[text[f"model.{experts}.{n}.{kind}_proj.weight"] for kind in ("gate", "up", "down")] for n in range(4)]
        seeing[f"model.language_model.{experts}.gate_up_proj"] = torch.stack([torch.cat((g, u)) for g, u, _ in of])
        seeing[f"model.language_model.{experts}.down_proj"] = torch.stack([down for _, _, down in of])
    others = {name: torch.randn(3, 5).bfloat16() for name in ("model.visual.pos_embed.weight", "mtp.fc.weight")}
    save_file(seeing | others, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "text" / "config.json"
    inner = json.loads(path.read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": inner}
    path.write_text(json.dumps(whole | {"vision_config": {"depth": 1}, "image_token_id": 5}))

    to_megatron(tmp_path / "text", tmp_path / "megatron", platform, shard_bytes=SHARD)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", platform, shard_bytes=SHARD)
    expected = {name.replace("model.", "model.language_model.", 1): each for name, each in text.items()}
    assert same_bits(tensors_of(tmp_path / "back"), expected | others)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vision_config"] == {"depth": 1}


def test_layers_beyond_those_of_config_json_are_refused(tmp_path: Path, platform: Any, groups: Any) -> None:
    with_prediction_layer(tmp_path)
    predict(tmp_path, 0)
    with pytest.raises(ConfigurationError, match=r"model.layers.2.*, which no model of the shape in config.json has"):
        to_megatron(tmp_path, tmp_path / "megatron", platform)
