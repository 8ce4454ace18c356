"""Token weights add up to the global mean, whichever rank or micro-batch a token is in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.reduction import local_normaliser, sequence_weights, token_weights

REDUCTIONS = ["token", "sequence"]
ANSWERS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 1, 1])), max_size=20)
"""(tokens, trained) of each answer."""


def columns(answers):
    return torch.tensor([length for length, _ in answers]), torch.tensor([float(trained) for _, trained in answers])


def token_losses(answers):
    generator = torch.Generator().manual_seed(len(answers))
    return [torch.randn(length, generator=generator, dtype=torch.float64) for length, _ in answers]


def mean_by_hand(answers, losses, reduction):
    trained = [loss for (length, on), loss in zip(answers, losses, strict=True) if on and length]
    if not trained:
        return 0.0
    if reduction == "token":
        return (sum(loss.sum() for loss in trained) / sum(len(loss) for loss in trained)).item()
    return (sum(loss.mean() for loss in trained) / len(trained)).item()


def test_empty_answer_does_not_count():
    lengths, trained = torch.tensor([2, 0]), torch.tensor([1.0, 1.0])
    assert local_normaliser(lengths, trained, "sequence") == 1
    assert local_normaliser(lengths, trained, "token") == 2


@given(st.lists(ANSWERS, min_size=1, max_size=4), st.sampled_from(REDUCTIONS))
def test_weighted_sums_of_the_ranks_add_up_to_the_global_mean(ranks, reduction):
    normaliser = sum(local_normaliser(*columns(answers), reduction) for answers in ranks)
    everything = [answer for answers in ranks for answer in answers]
    losses = token_losses(everything)
    weights = torch.cat([token_weights(*columns(answers), reduction, normaliser) for answers in ranks])
    total = sum(weight * loss.sum() for weight, loss in zip(weights.double(), losses, strict=True))
    assert float(total) == pytest.approx(mean_by_hand(everything, losses, reduction), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_weights_are_zero_if_nothing_is_trained(reduction):
    lengths, trained = torch.tensor([3, 4]), torch.zeros(2)
    normaliser = local_normaliser(lengths, trained, reduction)
    assert normaliser == 0
    assert token_weights(lengths, trained, reduction, normaliser).tolist() == [0, 0]


# Rollouts of several sequences

ROLLOUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.sampled_from([0, 1])), max_size=9
)
"""(tokens of each sequence, trained) of each rollout."""


def all_weights(rollouts, reduction, branches):
    """[sequences] weight of each token of each sequence, by the code."""
    lengths = torch.tensor([length for sequences, _ in rollouts for length in sequences], dtype=torch.long)
    trajectory = torch.tensor([i for i, (its, _) in enumerate(rollouts) for _ in its], dtype=torch.long)
    trained = torch.tensor([float(on) for _, on in rollouts])
    weights = sequence_weights(lengths, trajectory, trained, branches)
    return token_weights(lengths, weights, reduction, local_normaliser(lengths, weights, reduction))


def all_weights_by_hand(rollouts, reduction, branches):
    found = []
    for sequences, on in rollouts:
        trained = sum(length > 0 for length in sequences)
        for length in sequences:
            share = on / (trained if branches == "mean" and trained else 1)
            found.append((length, share / length if reduction == "sequence" and length else share))
    total = sum(length * weight for length, weight in found)
    return [weight / total if total else 0.0 for _, weight in found]


@given(ROLLOUTS, st.sampled_from(REDUCTIONS), st.sampled_from(["mean", "sum"]))
def test_weights_of_sequences_follow_the_definition(rollouts, reduction, branches):
    found = all_weights(rollouts, reduction, branches).tolist()
    lengths = [length for sequences, _ in rollouts for length in sequences]
    expected = all_weights_by_hand(rollouts, reduction, branches)
    for length, weight, right in zip(lengths, found, expected, strict=True):
        assert weight == pytest.approx(right, rel=1e-6) or not length


@pytest.mark.parametrize(("branches", "times"), [("mean", 1), ("sum", 10)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ten_branches_count_like_one_sequence_unless_they_are_summed(reduction, branches, times):
    weights = all_weights([([6] * 10, 1), ([6], 1)], reduction, branches)
    of_ten, of_one = 6 * weights[:10].double().sum(), 6 * weights[10].double()
    assert float(of_ten + of_one) == pytest.approx(1)
    assert float(of_ten / of_one) == pytest.approx(times)


@given(ANSWERS, st.sampled_from(REDUCTIONS), st.sampled_from(["mean", "sum"]))
def test_single_sequences_have_the_same_bits_with_either_key(answers, reduction, branches):
    lengths, trained = columns(answers)
    weights = sequence_weights(lengths, torch.arange(len(answers)), trained, branches)
    assert torch.equal(weights, trained.double())
