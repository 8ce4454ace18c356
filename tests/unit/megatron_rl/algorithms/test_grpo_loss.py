"""The GRPO loss of generated tokens equals its definition, in value and in gradient, whatever options are on."""

import math
from dataclasses import asdict, replace
from itertools import chain, pairwise, product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.loss_terms import answer_log_ratios, importance_weights, kept
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.rank.metrics.stats import combined
from megatron_rl.recipe.grpo import GrpoConfig
from megatron_rl.recipe.ratio_bounds import ImportanceConfig, RejectionConfig

OPTIONS = [
    GrpoConfig(
        eps_low=low, eps_high=high, importance=bounds, kl_beta=beta, kl_estimator=estimator, entropy_coefficient=ent
    )
    for (low, high), bounds, (beta, estimator), ent in product(
        [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)],
        [None, ImportanceConfig(lower=0.95, upper=1.1)],
        [(0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3")],
        [0.0, 0.05],
    )
][::-3]
"""A third of all combinations, in which each two values of two options occur together."""


def describe(config):
    on = [f"eps={config.eps_low}/{config.eps_high}"]
    on += ["weighed"] if config.importance else []
    on += [f"{config.kl_estimator}={config.kl_beta}"] if config.kl_beta else []
    on += [f"entropy={config.entropy_coefficient}"] if config.entropy_coefficient else []
    return " ".join(on)


with_every_option = pytest.mark.parametrize("config", OPTIONS, ids=describe)


def random_inputs(tokens, seed=0, dtype=torch.float64):
    """Tokens of a policy a few updates away from the one that sampled; every fifth carries no loss."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.1
    weights = torch.rand(tokens, generator=generator, dtype=torch.float64)
    weights[::5] = 0
    return TrainedTokens(
        logprobs=(old + normal(0.3)).to(dtype).requires_grad_(),
        old_logprobs=old.to(dtype),
        advantages=normal(1).to(dtype),
        weights=weights.to(dtype),
        inference_logprobs=(old + normal(0.1)).to(dtype),
        ref_logprobs=(old + normal(0.3)).to(dtype),
        entropy=normal(1).abs().to(dtype),
    )


def select(inputs, index):
    """The tokens at `index`, as separate inputs."""
    return inputs.each(lambda values: values[index])


def token_loss_by_hand(logp, old, advantage, inference, ref, entropy, config):
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - config.eps_low), 1 + config.eps_high)
    weight = min(max(math.exp(old - inference), 0.95), 1.1) if config.importance else 1.0
    d = ref - logp
    kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[config.kl_estimator]
    surrogate = min(ratio * advantage, clipped * advantage)
    return -weight * surrogate + config.kl_beta * kl - config.entropy_coefficient * entropy


def loss_by_hand(inputs, config):
    columns = [
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.inference_logprobs,
        inputs.ref_logprobs,
        inputs.entropy,
    ]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    losses = [token_loss_by_hand(*row, config) for row in rows]
    return math.fsum(weight * loss for weight, loss in zip(inputs.weights.tolist(), losses, strict=True))


@with_every_option
def test_equals_the_definition_in_float64(config):
    inputs = random_inputs(200)
    loss, _ = grpo_loss(inputs, config)
    assert loss.item() == pytest.approx(loss_by_hand(inputs, config), rel=1e-12)


@with_every_option
def test_gradient_is_that_of_the_loss(config):
    inputs = random_inputs(60)
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().exp()
    kinks = torch.tensor([1 - config.eps_low, 1 + config.eps_high])
    smooth = select(inputs, ((ratio[:, None] - kinks).abs() > 1e-3).all(dim=1))
    assert len(smooth.weights) > 50

    def loss(logprobs):
        return grpo_loss(replace(smooth, logprobs=logprobs), config)[0]

    assert torch.autograd.gradcheck(loss, smooth.logprobs.detach().requires_grad_(), fast_mode=True)


@with_every_option
def test_trajectories_without_gradient_have_neither_gradient_nor_loss(config):
    """Each token is its own answer; a third have no advantage, a fifth carry no loss."""
    inputs = random_inputs(60, dtype=torch.float32)
    inputs.advantages[::3] = 0
    said = (inputs.weights != 0) & ((inputs.advantages != 0) | config.trains_all_answers)
    grpo_loss(inputs, config)[0].backward()
    assert not inputs.logprobs.grad[~said].any()
    assert grpo_loss(select(inputs, ~said), config)[0] == 0
    penalised = config.kl_beta > 0 or config.entropy_coefficient > 0
    assert said.sum() == (48 if penalised else 32)


def sampled(log_ratios, answer_log_ratios=None, answer_tokens=None):
    """Tokens whose log-probs before the step exceed those of the engine by the log ratios."""
    ratios = torch.as_tensor(log_ratios)
    zeros = torch.zeros_like(ratios)
    return TrainedTokens(
        logprobs=ratios.clone().requires_grad_(),
        old_logprobs=ratios,
        inference_logprobs=zeros,
        entropy=zeros,
        advantages=zeros + 1,
        weights=zeros + 1,
        answer_log_ratios=answer_log_ratios,
        answer_tokens=answer_tokens,
    )


@pytest.mark.parametrize(
    ("bounds", "weights", "kept_tokens"),
    [
        ({"lower": 0.5, "upper": 2.0}, [1.0, 2.0, 0.5], [True, False, False]),
        ({"upper": 2.0}, [1.0, 2.0, 0.4], [True, False, True]),
        ({"lower": 0.5}, [1.0, 5.0, 0.5], [True, True, False]),
        ({"lower": 0.1, "upper": 3.0}, [1.0, 3.0, 0.4], [True, False, True]),
    ],
)
def test_ratios_outside_the_bounds_are_truncated_as_weights_or_rejected(bounds, weights, kept_tokens):
    tokens = sampled(torch.log(torch.tensor([1.0, 5.0, 0.4])))
    found = importance_weights(tokens, ImportanceConfig(**bounds))
    torch.testing.assert_close(found, torch.tensor(weights))
    assert not found.requires_grad
    assert kept(tokens, RejectionConfig(**bounds)).tolist() == kept_tokens


def test_answers_are_rejected_and_their_tokens_weighed_independently():
    """The answers have geometric means of 1 and 1.5; the first keeps the weights of its tokens, in one loss of both."""
    ratios = torch.log(torch.tensor([0.5, 2.0, 1.5, 1.5], dtype=torch.float64))
    tokens = sampled(ratios, *answer_log_ratios(ratios, torch.tensor([2, 2])))
    config = GrpoConfig(
        importance=ImportanceConfig(upper=1.25), rejection=RejectionConfig(level="geometric", lower=0.9, upper=1.1)
    )
    loss, stats = grpo_loss(tokens, config)
    loss.backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.5, -1.25, 0, 0])
    assert (stats.rejected, stats.tokens) == (2, 4)


@pytest.mark.parametrize("log_ratio", [1.0, -1.0, 1e3, -1e3])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_with_a_single_bound_are_finite(level, log_ratio):
    """A product of 89 ratios of e exceeds fp32."""
    ratios = torch.full((89,), log_ratio)
    tokens = sampled(ratios, *answer_log_ratios(ratios, torch.tensor([89])))
    for bounds in ({"lower": 0.5}, {"upper": 2.0}):
        loss, _ = grpo_loss(tokens, GrpoConfig(importance=ImportanceConfig(level=level, **bounds)))
        assert loss.isfinite() and abs(loss) <= 89 * math.exp(20) * 1.001


@given(st.lists(st.lists(st.floats(-3, 3), max_size=6), max_size=6))
@example([])  # of a rank whose answers were all lost
def test_answer_has_one_log_ratio_over_all_its_tokens(answers):
    lengths = torch.tensor([*map(len, answers)])
    ratios = torch.tensor([*chain(*answers)], dtype=torch.float32)
    sums = [math.fsum(answer) for answer in answers for _ in answer]
    means = [math.fsum(answer) / len(answer) for answer in answers for _ in answer]
    found_sums, counts = answer_log_ratios(ratios, lengths)
    for found, expected in ((found_sums, sums), (found_sums / counts, means)):
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=1e-5)


def test_token_without_finite_log_ratio_is_excluded_from_its_answers_ratio():
    ratios = torch.tensor([0.5, math.nan, 0.25, -math.inf, 1.0])
    lengths = torch.tensor([3, 2])
    sums, counts = answer_log_ratios(ratios, lengths)
    assert sums.tolist() == [0.75, 0.75, 0.75, 1.0, 1.0]
    assert counts.tolist() == [2, 2, 2, 1, 1]


@given(st.permutations(range(40)), st.sampled_from(OPTIONS))
def test_order_of_tokens_does_not_matter(order, config):
    inputs = random_inputs(40)
    loss, stats = grpo_loss(inputs, config)
    permuted_loss, permuted_stats = grpo_loss(select(inputs, order), config)
    torch.testing.assert_close(permuted_loss, loss)
    torch.testing.assert_close(asdict(permuted_stats), asdict(stats))


@given(st.lists(st.integers(0, 40), max_size=5), st.sampled_from(OPTIONS))
def test_micro_batches_add_up_to_the_batch(cuts, config):
    inputs = random_inputs(40)
    loss, stats = grpo_loss(inputs, config)
    edges = [0, *sorted(cuts), 40]
    parts = [
        grpo_loss(select(inputs, slice(start, stop)), config)
        for start, stop in pairwise(edges)  # equal cuts make empty micro-batches
    ]
    torch.testing.assert_close(sum(part for part, _ in parts), loss)
    torch.testing.assert_close(asdict(combined([part for _, part in parts])), asdict(stats))


def test_empty_micro_batch_has_a_differentiable_loss():
    inputs = select(random_inputs(5), slice(0, 0))
    loss, stats = grpo_loss(inputs, OPTIONS[0])
    loss.backward()
    assert loss == 0
    assert not any(asdict(stats).values())


def test_stats_are_sums_over_the_trained_tokens():
    bounds = ImportanceConfig(upper=1.05)
    config = GrpoConfig(eps_low=0.1, eps_high=0.1, importance=bounds, kl_beta=0.1, kl_estimator="k2")
    inputs = random_inputs(200)
    loss, stats = grpo_loss(inputs, config)
    trained = select(inputs, inputs.weights != 0)
    rows = list(
        zip(
            trained.logprobs.tolist(),
            trained.old_logprobs.tolist(),
            trained.advantages.tolist(),
            trained.inference_logprobs.tolist(),
            trained.ref_logprobs.tolist(),
            strict=True,
        )
    )
    ratios = [math.exp(logp - old) for logp, old, *_ in rows]
    differences = [abs(old - inference) for _, old, _, inference, _ in rows]
    expected = {
        "tokens": 160,
        "ratio": sum(ratios),
        "clip_low": sum(r < 0.9 and row[2] < 0 for r, row in zip(ratios, rows, strict=True)),
        "clip_high": sum(r > 1.1 and row[2] > 0 for r, row in zip(ratios, rows, strict=True)),
        "importance_weight": sum(min(math.exp(old - inference), 1.05) for _, old, _, inference, _ in rows),
        "kl": sum((ref - logp) ** 2 / 2 for logp, *_, ref in rows),
        "inference_difference": sum(differences),
    }
    assert expected["clip_low"] > 10 and expected["clip_high"] > 10
    assert {name: getattr(stats, name).item() for name in expected} == pytest.approx(expected, rel=1e-5)
    assert stats.ratio_max.item() == pytest.approx(max(ratios), rel=1e-6)
    assert stats.inference_difference_max.item() == pytest.approx(max(differences), rel=1e-6)
    assert stats.entropy.item() == pytest.approx(trained.entropy.sum().item(), rel=1e-5)
    assert stats.loss.item() == loss.item()


def test_reference_is_ignored_without_beta():
    inputs = random_inputs(5)
    loss, _ = grpo_loss(replace(inputs, ref_logprobs=torch.full((5,), math.nan, dtype=torch.float64)), GrpoConfig())
    assert loss.item() == grpo_loss(inputs, GrpoConfig())[0].item()


def test_penalty_without_reference_is_rejected():
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        grpo_loss(replace(random_inputs(5), ref_logprobs=None), GrpoConfig(kl_beta=0.1))


with_all_terms = pytest.mark.parametrize(
    "config", [config for config in OPTIONS if config.importance and config.entropy_coefficient], ids=describe
)


@with_all_terms
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "inference_logprobs", "ref_logprobs", "entropy"])
def test_token_without_weight_is_ignored_whatever_its_values(config, name):
    inputs = random_inputs(20, dtype=torch.float32)
    loss, stats = grpo_loss(inputs, config)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    for odd in (99.9, -math.inf, math.nan):
        spoiled = getattr(inputs, name).detach().clone()
        spoiled[::5] = odd
        spoiled.requires_grad_(name == "logprobs")
        changed = replace(inputs, **{name: spoiled})
        same_loss, same_stats = grpo_loss(changed, config)
        (same_gradient,) = torch.autograd.grad(same_loss, changed.logprobs)
        assert torch.equal(same_loss, loss) and torch.equal(same_gradient, gradient), odd
        assert asdict(same_stats) == asdict(stats), odd


@with_every_option
def test_trained_token_without_finite_log_prob_or_entropy_is_excluded_and_counted(config):
    """The loss equals the definition over the other tokens, in float64: one bad value excludes one token, not the
    update."""
    read = [["inference_logprobs"], ["logprobs", "old_logprobs"], ["logprobs"], ["entropy"]]
    for names, odd in product([*read, ["ref_logprobs"]] if config.kl_beta else read, [-math.inf, math.inf, math.nan]):
        assert_excluded(config, names, odd)


def assert_excluded(config, names, odd):
    inputs = random_inputs(60)
    spoiled = {name: getattr(inputs, name).detach().clone() for name in names}
    for values in spoiled.values():
        values[[0, 3, 17]] = odd  # of these the first carries no loss
    if "logprobs" in spoiled:
        spoiled["logprobs"].requires_grad_()
    changed = replace(inputs, **spoiled)
    loss, stats = grpo_loss(changed, config)
    (gradient,) = torch.autograd.grad(loss, changed.logprobs)
    weights = inputs.weights.clone()
    weights[[3, 17]] = 0
    assert loss.item() == pytest.approx(loss_by_hand(replace(inputs, weights=weights), config), rel=1e-12)
    assert gradient.isfinite().all() and not gradient[[3, 17]].any() and gradient[1] != 0
    assert (stats.nonfinite, stats.tokens) == (2, 46)
    assert all(value.isfinite() for value in asdict(stats).values() if value is not None)
