"""Weights in MXFP4, as gpt-oss was published, are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import full_forward
from hf_helpers import GPT_OSS, SENTENCE, VOCAB, model_of, pack_experts, publish
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.mxfp4 import unpacked
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.model.hf_mapping import sources
from megatron_rl.model.hf_weights import weights
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.hf_config import UnusableWeights

EXPERTS = "model.layers.1.mlp.experts"
DRAWS = torch.Generator()


def random_bytes(*shape: int, least: int = 0, beyond: int = 256) -> Tensor:
    return torch.randint(least, beyond, shape, generator=DRAWS.manual_seed(len(shape)), dtype=torch.uint8)


def test_the_sixteen_numbers_are_those_of_the_format() -> None:
    """Each byte has two, the first in its lower half; 127 stands for a scale of 1."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    both = torch.tensor([number | number << 4 for number in range(16)], dtype=torch.uint8)
    found = unpacked(both[None], torch.tensor([127], dtype=torch.uint8))
    assert found.tolist() == [value for each in (*positive, *(-each for each in positive)) for value in (each, each)]
    byte = torch.tensor([[0x2F, *[0] * 15]], dtype=torch.uint8)
    assert unpacked(byte, torch.tensor([129], dtype=torch.uint8))[:3].tolist() == [-24.0, 4.0, 0.0]


def test_numbers_are_those_of_transformers() -> None:
    """Compares every byte with all scales of which bf16 has each product."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_bytes(3, 40, 5, 16), random_bytes(3, 40, 5, least=2, beyond=252)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(unpacked(blocks, scales).transpose(1, 2), expected)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    publish(tmp_path, GPT_OSS, torch.bfloat16, shard="1GB")
    pack_experts(tmp_path)
    return tmp_path


def test_a_directory_shows_weights_where_it_has_blocks_and_scales(packed: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    files = WeightsFolder(packed)
    files.check(sources(weights(files.config.model())).values(), tied=False)
    stored = load_file(packed / "model.safetensors")
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        whole = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert (files.tensors[name].shape, files.tensors[name].dtype) == (tuple(whole.shape), whole.dtype)
        assert torch.equal(files.read(name), whole)
        for box in (
            (slice(1, 2),),
            (slice(2, 3), slice(7, 41)),
            (slice(0, 1), slice(None), slice(5, 19)),
            (slice(0, 4), slice(33, 34), slice(1, 2)),
        ):
            assert torch.equal(files.read(name, box), whole[box])


def test_blocks_without_a_quantised_config_are_refused(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnusableWeights, match=r"_proj_(blocks|scales) is of type U8: weights of F32, BF16, F16 can"):
        WeightsFolder(packed)


def test_scales_of_other_blocks_and_scales_that_are_no_number_are_refused(packed: Path) -> None:
    path, name = packed / "model.safetensors", f"{EXPERTS}.down_proj"
    stored = load_file(path)
    stored[f"{name}_scales"][2, 3, 1] = 255
    save_file(stored, path, {"format": "pt"})
    files = WeightsFolder(packed)
    files.read(name, (slice(0, 2),))
    with pytest.raises(UnusableWeights, match="down_proj_scales: a scale is 255, which is not a number"):
        files.read(name)
    stored[f"{name}_scales"] = stored[f"{name}_scales"][:, :-1].contiguous()
    save_file(stored, path, {"format": "pt"})
    with pytest.raises(UnusableWeights, match="which are not blocks of 32 numbers and their scales"):
        WeightsFolder(packed)


def test_an_export_has_the_numbers_in_bf16(packed: Path, tmp_path: Path, platform: Any, groups: Any) -> None:
    """transformers computes from it what a policy computes that read the blocks and scales itself."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    to_megatron(packed, tmp_path / "m", platform)
    to_hugging_face(tmp_path / "m", tmp_path / "back", platform)
    stored, exported = (load_file(folder / "model.safetensors") for folder in (packed, tmp_path / "back"))
    blocks = {name.removesuffix("_blocks"): tensor for name, tensor in stored.items() if name.endswith("_blocks")}
    expected = {name: convert_moe_packed_tensors(each, stored[f"{name}_scales"]) for name, each in blocks.items()}
    expected |= {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    model = model_of(packed)
    policy = build_policy(model, VOCAB, platform)
    load_pretrained(policy, model, packed)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    with torch.no_grad():
        logits = twin(torch.tensor([SENTENCE])).logits[0]
    torch.testing.assert_close(full_forward(policy, SENTENCE), logits, rtol=1e-4, atol=1e-4)
