"""Small models that stand for a stage of a large one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from published_configs import PUBLISHED_CONFIGS

from megatron_rl.recipe.hf_config import published_config
from megatron_rl.recipe.job import TrainingLayout
from megatron_rl.recipe.layer_sizes import layer_kinds, stage_layers
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.run.rehearse.run import few_experts, growth

DEEPSEEK = published_config(PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3"]).model()
GPT_OSS = published_config(PUBLISHED_CONFIGS["openai/gpt-oss-20b"]).model()
LAYOUT = TrainingLayout(tp=8, pp=4, ep=8, first_stage_layers=16, last_stage_layers=13)


def kinds(model: ModelConfig, stage: int) -> dict[str, int]:
    counts = layer_kinds(model, stage_layers(model.num_layers, LAYOUT.pp)[stage])
    return {f"{kind.attention} {kind.has_experts}": count for kind, count in counts.items()}


def test_first_layers_without_experts_stand_in_the_first_stage_alone() -> None:
    first = growth(DEEPSEEK, LAYOUT, 0, (2, 4))
    assert kinds(first.small, 0) == {"full_attention False": 3, "full_attention True": 2}
    (deeper, layers), (wider, experts) = first.larger
    assert kinds(deeper, 0) == {"full_attention False": 3, "full_attention True": 4}
    assert layers == Fraction(13 - 2, 2)
    assert (first.small.num_experts, wider.num_experts) == (16, 32)
    assert experts == Fraction((256 - 16) * 13, 16 * 2)
    last = growth(DEEPSEEK, LAYOUT, 3, (2, 4))
    assert kinds(last.small, 3) == {"full_attention True": 2}


def test_the_last_stage_has_a_prediction_layer_at_any_depth_if_it_is_trained() -> None:
    model = DEEPSEEK.model_copy(update={"prediction_loss_coefficient": 0.1})
    (_, layers), (_, experts) = growth(model, LAYOUT, 3, (2, 4)).larger
    assert (layers, experts) == (Fraction(13 - 2, 2), Fraction((256 - 16) * (13 + 1), 16 * (2 + 1)))
    assert growth(model, LAYOUT, 0, (2, 4)).larger[1][1] == growth(DEEPSEEK, LAYOUT, 0, (2, 4)).larger[1][1]


def test_each_kind_of_attention_has_its_own_depth() -> None:
    found = growth(GPT_OSS, TrainingLayout(), 0, (2, 4))
    assert layer_kinds(found.small) == {("sliding_attention", True): 2, ("full_attention", True): 2}
    assert [steps for _, steps in found.larger] == [5, 5, Fraction((32 - 4) * 24, 4 * 4)]


@pytest.mark.parametrize(("ep", "few"), [(1, 16), (8, 16), (32, 64), (128, 256)])
def test_few_experts_are_enough_for_groups_tokens_and_ranks(ep: int, few: int) -> None:
    assert few_experts(DEEPSEEK, ep) == few
