"""Rotary frequencies and rotations equal those of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.rotation import frequencies, rotation_tables
from megatron_rl.recipe.architectures.parts import written_scaling
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import RopeScaling

CPU = torch.device("cpu")
FACTORS = st.floats(1, 64)


@st.composite
def scalings(draw: st.DrawFn) -> dict[str, Any] | None:
    kind = draw(st.sampled_from([None, "linear", "dynamic", "llama3", "yarn"]))
    if kind is None:
        return None
    scaling: dict[str, Any] = {"type": kind, "factor": draw(FACTORS)}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = draw(st.sampled_from([None, 16, 2048, 4096]))
    if kind == "llama3":
        low = draw(st.floats(0.5, 4))
        scaling |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8))}
    if kind == "yarn":
        slow = draw(st.floats(0.5, 4))
        scaling |= {"beta_slow": slow, "beta_fast": slow * draw(st.floats(1, 64)), "truncate": draw(st.booleans())}
        magnitudes = st.sampled_from([None, 0.0, 0.707, 1.0])
        scaling |= {"mscale": draw(magnitudes), "mscale_all_dim": draw(magnitudes)}
        scaling["attention_factor"] = draw(st.sampled_from([None, None, 0.8]))
    return scaling


@given(
    scaling=scalings(),
    head=st.sampled_from([8, 64, 96, 128]),
    part=st.sampled_from([1.0, 0.5, 0.25]),
    base=st.sampled_from([1e4, 1.5e5, 1e6]),
    positions=st.sampled_from([48, 4096, 131072]),
)
def test_frequencies_and_the_factor_of_cosines_are_those_of_transformers(
    scaling: dict[str, Any] | None, head: int, part: float, base: float, positions: int
) -> None:
    shape = {"head_dim": head, "partial_rotary_factor": part, "rope_base": base, "max_position_embeddings": positions}
    model = tiny_model(**shape, rope_scaling=scaling)
    theirs, factor = of_transformers(model)
    torch.testing.assert_close(frequencies(model), theirs, rtol=2e-6, atol=0)
    found = model.rope_scaling.cosine_factor if model.rope_scaling else 1.0
    assert found == pytest.approx(factor, rel=1e-12)


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Rotary positions of a model in config.json of transformers 5."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.partial_rotary_factor != 1:
        found["partial_rotary_factor"] = model.partial_rotary_factor
    if model.rope_scaling is not None:
        found |= written_scaling(model.rope_scaling)
    return found


def of_transformers(model: ModelConfig) -> tuple[torch.Tensor, float]:
    from transformers import Glm4MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    rope = rope_parameters(model) | {"partial_rotary_factor": model.partial_rotary_factor}
    functions = {"default": Glm4MoeRotaryEmbedding.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}
    positions = model.max_position_embeddings
    config = Glm4MoeConfig(head_dim=model.head_dim, max_position_embeddings=positions, rope_parameters=rope)
    frequency, factor = functions[rope["rope_type"]](config)
    return frequency, factor


def test_the_positions_before_llama3s_scaling_are_8192_by_default() -> None:
    plain, stretched = (
        frequencies(tiny_model(head_dim=64, rope_base=5e5, rope_scaling=scaling)) for scaling in (None, {"factor": 8.0})
    )
    wavelength = 2 * torch.pi / plain
    torch.testing.assert_close(stretched[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert torch.equal(stretched[wavelength < 2048], plain[wavelength < 2048])


def test_a_part_of_each_head_is_rotated_as_transformers_does() -> None:
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    yarn = RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=12)
    table = rotation_tables(tiny_model(head_dim=16, partial_rotary_factor=0.5, rope_scaling=yarn), torch.float32, CPU)
    query, key = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    rotation = table.at(torch.tensor([0, 3, 7, 8, 40])).of(1)
    cosines, sines = rotation.cosines[:, 0], rotation.sines[:, 0] * torch.tensor([-1.0] * 4 + [1.0] * 4)
    theirs = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cosines[None], sines[None])
    for ours, their in zip(rotation.turn(query, key), theirs, strict=True):
        torch.testing.assert_close(ours, their[0].transpose(0, 1))


def test_layers_with_a_window_have_their_own_base_without_scaling() -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    scaling = {"type": "linear", "factor": 8.0}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"layer_types": kinds, "num_layers": 3, "sliding_window": 8, "sliding_rope_base": 1e4}
    model = tiny_model(**shape, head_dim=16, rope_base=1e6, rope_scaling=scaling)
    local = rope_parameters(tiny_model(head_dim=16, rope_base=1e4))
    rope = {"full_attention": rope_parameters(model), "sliding_attention": local}
    twin = Gemma3RotaryEmbedding(
        Gemma3TextConfig(head_dim=16, num_hidden_layers=3, layer_types=kinds, rope_parameters=rope)
    )
    positions = torch.tensor([0, 5, 47])
    found = rotation_tables(model, torch.float32, CPU).at(positions)
    for number, kind in enumerate(kinds, start=1):
        cosines, sines = twin(torch.zeros(1), positions[None], kind)
        torch.testing.assert_close(found.of(number).cosines[:, 0], cosines[0])
        torch.testing.assert_close(found.of(number).sines[:, 0, 8:], sines[0, :, 8:])
