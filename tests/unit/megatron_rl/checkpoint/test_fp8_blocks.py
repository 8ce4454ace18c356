"""Weights in FP8 with a scale per block, as DeepSeek-V3 was published, are read as the products that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_helpers import DEEPSEEK, publish
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.fp8_blocks import fp8_weights
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.hf.to_megatron import to_megatron
from megatron_rl.recipe.hf_config import UnusableWeights

BLOCK = 16
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.")


def product(weight: Tensor, scales: Tensor) -> Tensor:
    """The definition, block by block."""
    whole = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            whole[block] = weight[block].float() * scales[row, column]
    return whole


@given(data=st.data(), rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_a_box_is_that_of_the_whole_product(data: st.DataObject, rows: int, columns: int) -> None:
    shape, grid = (rows, columns), (-(-rows // BLOCK), -(-columns // BLOCK))
    stored = {"w": torch.randn(shape).to(torch.float8_e4m3fn), "w_scale_inv": torch.rand(grid) + 0.1}
    (weight,) = fp8_weights({name: tuple(each.shape) for name, each in stored.items()}, CONFIG).values()
    box = []
    for size in shape[: data.draw(st.integers(1, 2))]:
        first = data.draw(st.integers(0, size - 1))
        box.append(slice(first, data.draw(st.integers(first + 1, size))))
    found = weight.read(tuple(box), lambda name, part: stored[name][part])
    assert torch.equal(found, product(stored["w"], stored["w_scale_inv"])[tuple(box)])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Weights in FP8 except embeddings, norms and routers."""
    folder = tmp_path / "fp8"
    publish(folder, DEEPSEEK, torch.bfloat16, shard="1GB")
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if not any(part in name for part in PLAIN):
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(*(-(-size // BLOCK) for size in weight.shape)) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder


def test_an_export_has_the_products_in_bf16(tmp_path: Path, published: Path, platform: Any, groups: Any) -> None:
    to_megatron(published, tmp_path / "megatron", platform)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", platform)
    stored, back = load_file(published / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, weight in back.items():
        scales = stored.get(f"{name}_scale_inv")
        assert torch.equal(weight, stored[name] if scales is None else product(stored[name], scales))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (None, r"weight_block_size is None, and must be two numbers: rows and columns"),
        ([BLOCK, 8], r"which are not a weight and a scale for each 16 rows and 8 columns"),
    ],
)
def test_other_blocks_are_refused(published: Path, block: list[int] | None, message: str) -> None:
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnusableWeights, match=message):
        WeightsFolder(published)


def test_weights_without_scales_are_refused(published: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusableWeights, match=r"o_proj.weight is of type F8_E4M3: weights of F32, BF16, F16 can"):
        WeightsFolder(published)
