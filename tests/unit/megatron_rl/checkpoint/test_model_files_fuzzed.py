"""Files of published models, whatever stands in them, are read or refused with a sentence."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from examples import examples
from hf_helpers import PUBLISHED
from hypothesis import given
from odd_values import DEEP, as_json, changed, drawn, nested, refusal, spoilt
from optional import needs
from published_configs import PUBLISHED_CONFIGS
from server_helpers import byte_tokenizer

from megatron_rl.checkpoint.hf.folder import INDEX, WeightsFolder
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.hf_config import UnusableWeights, read_hf_config
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

pytestmark = needs("transformers")

CONFIG = PUBLISHED["Qwen2"] | {"architectures": ["Qwen2ForCausalLM"]}
NORM, STACKED = "model.norm.weight", "model.layers.0.mlp.experts.gate_up_proj"
HEADER = {
    "__metadata__": {"format": "pt"},
    NORM: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    STACKED: {"dtype": "BF16", "shape": [2, 2, 1], "data_offsets": [8, 16]},
}
FILE = "model-00001-of-00001.safetensors"
LISTED = {"metadata": {"total_size": 16}, "weight_map": {NORM: FILE, STACKED: FILE}}


def safetensors(header: bytes, size: int = 16) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(size)


def files(**others: bytes) -> dict[str, bytes]:
    whole = {"config.json": as_json(CONFIG), INDEX: as_json(LISTED), FILE: safetensors(as_json(HEADER))}
    return whole | others


def weights(random: Random) -> dict[str, bytes]:
    changes = {
        "config.json": lambda: as_json(changed(CONFIG | {"quantization_config": {"quant_method": "fp8"}}, random)),
        INDEX: lambda: as_json(changed(LISTED, random)),
        FILE: lambda: safetensors(as_json(changed(HEADER, random))),
    }
    name = random.choice([*changes])
    return files(**{name: changes[name]() if random.randrange(3) else spoilt(files()[name], random)})


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def read(content: dict[str, bytes]) -> str | None:
    """Why weights are refused."""
    with TemporaryDirectory() as folder:
        place = write(Path(folder), content)

        def use() -> None:
            found = WeightsFolder(place)
            assert found.kept is not None and found.digest
            found.check([], tied=False)

        return refusal(use, UnusableWeights)


@given(drawn(weights))
def test_weights_of_any_shape_are_read_or_refused(content: dict[str, bytes]) -> None:
    read(content)


@given(drawn(lambda random: as_json(changed(random.choice([*PUBLISHED_CONFIGS.values()]), random))))
def test_configs_of_any_shape_are_read_or_refused(config: bytes) -> None:
    with TemporaryDirectory() as folder:
        place = write(Path(folder), {"config.json": config})
        refusal(lambda: read_hf_config(place).model(), UnusableWeights)


def headed(**tensors: Any) -> dict[str, bytes]:
    size = max(each["data_offsets"][1] for each in tensors.values())
    listed = as_json({"weight_map": dict.fromkeys(tensors, FILE)})
    return files(**{INDEX: listed, FILE: safetensors(as_json(tensors), size)})


EMPTY = {"dtype": "BF16", "shape": [10**12, 0, 0], "data_offsets": [0, 0]}
FOUND: list[tuple[dict[str, bytes], str]] = [
    (files(**{"config.json": b"[" * DEEP}), "config.json is not JSON of a model: it has more than 100 lists"),
    (
        files(**{"config.json": as_json(CONFIG | {"head_dim": 10**400})}),
        "config.json is not JSON of a model: it has a number of 401 digits",
    ),
    (
        {"config.json": as_json(CONFIG), INDEX: as_json({"weight_map": {NORM: "a\0b"}})},
        "cannot be read: embedded null byte",
    ),
    (
        {"config.json": as_json(CONFIG), INDEX: as_json({"weight_map": {NORM: "\ud800"}})},
        "cannot be read: 'utf-8' codec can't encode",
    ),
    (files(**{INDEX: as_json(nested(200))}), "is not an index of safetensors"),
    (files(**{FILE: struct.pack("<Q", 2**63)}), "is cut short or damaged"),
    (files(**{FILE: safetensors(as_json(HEADER), 15)}), "is cut short or damaged"),
    (headed(**{STACKED: EMPTY}), "model.layers.0.mlp.experts.gate_up_proj"),
    (
        headed(**{f"model.layers.{'9' * 5000}.a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}),
        "model.layers.9",
    ),
]


def test_faults_found_in_weights_stay_mended() -> None:
    for content, sentence in FOUND:
        assert sentence in (read(content) or "")


@cache
def published() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        byte_tokenizer().save(Path(folder))
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return found | {"generation_config.json": b'{"eos_token_id": [1, 2], "temperature": 0.6}'}


def tokenizer(random: Random) -> dict[str, bytes]:
    name = random.choice([*published()])
    data = published()[name]
    structured = name.endswith(".json") and random.randrange(3)
    return published() | {name: as_json(changed(json.loads(data), random)) if structured else spoilt(data, random)}


def built(content: dict[str, bytes]) -> str | None:
    """Why a tokenizer is refused."""
    with TemporaryDirectory() as folder:
        path = str(write(Path(folder), content))

        def use() -> None:
            found = build_tokenizer(TokenizerConfig(type="huggingface", path=path))
            refusal(lambda: found.conversation([{"role": "user", "content": "hi"}]), ValueError)
            found.decode(found.encode("hello"))

        return refusal(use, ValueError)


@examples(8)
@given(drawn(tokenizer))
def test_tokenizers_of_any_shape_are_read_or_refused(content: dict[str, bytes]) -> None:
    built(content)


@pytest.mark.parametrize("text", ["\ud800", "é\udfff"])
def test_half_a_character_is_a_value_error(text: str) -> None:
    assert "surrogates not allowed" in (refusal(lambda: byte_tokenizer().encode(text), ValueError) or "")
