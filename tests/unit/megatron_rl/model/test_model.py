"""The policy computes what `transformers`' Qwen2, Qwen3 and Llama compute from the same weights, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import (
    PADDED_VOCAB,
    VOCAB,
    full_forward,
    packed,
    random_groups,
    tiny_model,
    tiny_policy,
)
from family_shapes import QWEN35
from published_twin import packed_beside_twin, published_twin
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_rl.model.norm import Norm
from megatron_rl.model.platform import frozen_linear
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import Recompute

SENTENCE = [3, 10, 4, 12, 7, 13, 0, 14, 1]

QWEN3 = {"qk_norm": True, "qkv_bias": False, "head_dim": 12, "tied_embeddings": False}
EXPERTS = QWEN3 | {"num_experts": 6, "experts_per_token": 2, "expert_ffn_hidden_size": 20}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
LLAMA = {"rope_scaling": {"factor": 8.0}, "rope_base": 5e5, "qkv_bias": False, "tied_embeddings": False}

SHAPES = {
    "grouped queries, tied": {},
    "grouped queries, untied": {"tied_embeddings": False},
    "one key for all": {"num_query_groups": 1},
    "no grouping": {"num_query_groups": 4, "tied_embeddings": False},
    "another rotary base and epsilon": {"rope_base": 1e6, "layernorm_epsilon": 1e-3},
    "Qwen3": QWEN3,
    "Qwen3 with experts": EXPERTS,
    "Llama 3.1": LLAMA,
    "Qwen2 with YaRN": {"rope_scaling": YARN},
    "Llama with YaRN's magnitudes": LLAMA | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "Qwen3 with linear positions": QWEN3 | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "Qwen3 with dynamic positions": QWEN3 | {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_those_of_the_published_model(
    platform: Any, groups: Any, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers training and, except for experts, the frozen copy for generation with small and large weights."""
    model = tiny_model(**shape)
    policy = tiny_policy(platform, model)
    with torch.no_grad():
        expected = published_twin(policy, model)(torch.tensor([SENTENCE])).logits[0, :, :VOCAB]
    logits = full_forward(policy, SENTENCE)
    assert expected.std() > 0.5  # otherwise any two would be close
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for least_packed in (1, 2**30):
        monkeypatch.setattr(frozen_linear, "LEAST_PACKED", least_packed)
        frozen = policy.frozen()
        assert (frozen is None) == ("num_experts" in shape)
        if frozen:
            tokens, layout = torch.tensor(SENTENCE), policy.layout(whole_sequences([len(SENTENCE)]))
            with torch.inference_mode():
                logits = frozen.logits(tokens, torch.arange(len(SENTENCE)), layout, torch.tensor([8, 2]))
            torch.testing.assert_close(logits, expected[[8, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        ({}, "none"),
        ({"tied_embeddings": False}, "selective"),
        ({}, "full"),
        (QWEN3, "full"),
        (EXPERTS, "none"),
        (EXPERTS, "full"),
        (LLAMA, "none"),
        (QWEN3 | {"rope_scaling": YARN}, "none"),
    ],
    ids=[
        "tied",
        "untied, attention recomputed",
        "layers recomputed",
        "Qwen3, layers recomputed",
        "experts",
        "experts, layers recomputed",
        "Llama 3.1",
        "Qwen3 with YaRN",
    ],
)
def test_packed_answers_have_the_logprobs_and_gradients_of_the_published_model(
    platform: Any, groups: Any, shape: dict[str, Any], recompute: Recompute
) -> None:
    """Compares answers of mixed lengths that share prompts in one packed forward with one sequence at a time."""
    model = tiny_model(**shape)
    compared = packed_beside_twin(tiny_policy(platform, model, recompute=recompute), model)
    torch.testing.assert_close(compared.logprobs, compared.their_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compared.gradients, compared.their_gradients, rtol=1e-4, atol=1e-4)


def test_padding_rows_of_the_embedding_have_no_logits(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform)
    assert policy.embedding.word_embeddings.weight.shape[0] == PADDED_VOCAB > VOCAB
    assert full_forward(policy, SENTENCE).shape == (len(SENTENCE), VOCAB)


def test_only_the_selected_tokens_have_logits(platform: Any, groups: Any) -> None:
    policy = tiny_policy(platform)
    trajectories = [trajectory for made in random_groups(2, 3) for trajectory in made.trajectories]
    (micro,) = packed(trajectories)
    with torch.no_grad():
        everything = policy(micro.tokens, micro.positions, policy.layout(micro))
        selected = policy(micro.tokens, micro.positions, policy.layout(micro), micro.select)
    assert everything.shape == (len(micro.tokens), VOCAB)
    torch.testing.assert_close(selected, everything[micro.select], rtol=1e-6, atol=1e-6)


def test_a_forward_copies_no_weight_for_each_token(platform: Any, groups: Any) -> None:
    """torch silently copies the weight for a batched product if it needs no gradient, so all products must be of two
    matrices."""
    policy = tiny_policy(platform, tiny_model(qkv_bias=False)).requires_grad_(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        full_forward(policy, SENTENCE)
    products = {event.key for event in profile.key_averages() if event.key.endswith("mm")}
    assert products <= {"aten::mm", "aten::addmm"}
    assert products


def test_bf16_is_near_fp32(platform: Any, groups: Any) -> None:
    half = tiny_policy(platform, tiny_model(dtype="bf16"), scale=0.1)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    logits = full_forward(half, SENTENCE)
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        expected = published_twin(half, tiny_model(dtype="bf16"))(torch.tensor([SENTENCE])).logits[0, :, :VOCAB]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.05)
    if frozen := half.frozen():  # this processor multiplies bf16
        tokens, layout = torch.tensor(SENTENCE), half.layout(whole_sequences([len(SENTENCE)]))
        with torch.inference_mode():
            generating = frozen.logits(tokens, torch.arange(len(SENTENCE)), layout)
        assert generating.dtype == torch.bfloat16
        torch.testing.assert_close(generating.float(), expected, rtol=0.05, atol=0.05)


def test_logits_in_fp32_round_nothing_of_the_output_layer(platform: Any, groups: Any) -> None:
    """The layers before it are the same, in bf16."""
    shape: dict[str, Any] = {"dtype": "bf16", "tied_embeddings": False}
    half, exact = (tiny_policy(platform, tiny_model(**shape, fp32_output=on), scale=0.1) for on in (False, True))
    tokens, layout = torch.tensor(SENTENCE), exact.layout(whole_sequences([len(SENTENCE)]))
    positions = torch.arange(len(SENTENCE))
    rounded, found = full_forward(half, SENTENCE).detach(), full_forward(exact, SENTENCE).detach()
    assert (rounded.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found.bfloat16(), rounded, rtol=0.02, atol=0.02)
    assert (found - rounded.float()).abs().mean() > 1e-5, "as much as the product in bf16 rounds"
    if frozen := exact.frozen():  # this processor multiplies bf16
        with torch.inference_mode():
            generating = frozen.logits(tokens, positions, layout)
        assert generating.dtype == torch.float32
        torch.testing.assert_close(generating, found, rtol=0.05, atol=0.05)


def test_an_embedding_smaller_than_the_tokenizer_is_refused(platform: Any, groups: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"model.vocab_size 7 is less than the tokenizer's {VOCAB} tokens"):
        tiny_policy(platform, tiny_model(vocab_size=7))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_keeps_less_for_the_backward_pass_with_the_same_bits(
    platform: Any, groups: Any, recompute: Recompute
) -> None:
    def kept_and_gradient(recompute: Recompute) -> tuple[int, torch.Tensor]:
        policy = tiny_policy(platform, recompute=recompute)
        sizes = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layout = policy.layout(whole_sequences([len(SENTENCE)]))
            logits = policy(torch.tensor(SENTENCE), torch.arange(len(SENTENCE)), layout)
        logits.logsumexp(-1).sum().backward()
        return sum(sizes), policy.decoder.layers[0].mlp.linear_fc1.weight.grad

    kept, gradient = kept_and_gradient("none")
    less, same = kept_and_gradient(recompute)
    assert less < kept
    assert torch.equal(gradient, same)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_tensor_of_an_expert_layer_outlives_the_backward_pass(
    platform: Any, groups: Any, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of recomputed layers once stayed until the next pass, referenced by megatron-core's dispatcher."""
    normed: list[StorageWeakRef] = []
    norm = Norm.forward

    def noted(self: Norm, hidden: torch.Tensor) -> torch.Tensor:
        made = norm(self, hidden)
        normed.append(StorageWeakRef(made.untyped_storage()))
        return made

    monkeypatch.setattr(Norm, "forward", noted)
    experts = tiny_model(tied_embeddings=False, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24)
    policy = tiny_policy(platform, experts, recompute=recompute)
    policy(torch.arange(9), torch.arange(9), policy.layout(whole_sequences([9]))).sum().backward()
    assert len(normed) == 2 * experts.num_layers * (1 + (recompute == "full")) + 1
    assert all(each.expired() for each in normed)


@pytest.mark.parametrize(
    ("sizes", "shape", "said"),
    [
        ((3, 1, 1), {}, "tp 3 does not divide model.num_attention_heads 4 (4 = 1 x 3 + 1)"),
        ((4, 1, 1), {"ffn_hidden_size": 50}, "tp 4 does not divide model.ffn_hidden_size 50 (50 = 12 x 4 + 2)"),
        ((2, 1, 1), {"vocab_multiple": 5}, "tp 2 does not divide model.vocab_multiple 5 (5 = 2 x 2 + 1)"),
        ((1, 3, 1), {}, "pp 3 does not divide model.num_layers 2 (2 = 0 x 3 + 2)"),
        ((1, 1, 4), EXPERTS, "ep 4 does not divide model.num_experts 6 (6 = 1 x 4 + 2)"),
        ((4, 1, 1), EXPERTS | {"expert_ffn_hidden_size": 6}, "tp 4 does not divide model.expert_ffn_hidden_size 6"),
        ((4, 1, 1), QWEN35, "tp 4 does not divide model.delta_net.key_heads 2"),
        ((1, 1, 2), {}, "ep 2 needs model.num_experts: without experts to share"),
        ((4, 1, 1, 2), {}, "tp 4 is more than model.num_query_groups 2: ranks share a key/value head only as in train"),
    ],
)
def test_sizes_that_do_not_divide_are_named(sizes: tuple[int, ...], shape: dict[str, Any], said: str) -> None:
    problem, *_ = tiny_model(**shape).undivided(*sizes)
    assert problem.startswith(said)


# Two key/value heads on four ranks: each is on two ranks.


def test_sequence_parallelism_needs_several_ranks(platform: Any, groups: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"sequence_parallel .* tp is 1"):
        build_policy(tiny_model(), VOCAB, platform, sequence_parallel=True)
