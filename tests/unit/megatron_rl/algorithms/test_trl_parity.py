"""The loss and its gradient equal those of TRL's GRPOTrainer on the same log-probs and advantages.

TRL's real `_compute_loss` runs on a trainer stripped to the attributes it reads, its model replaced by given
log-probs. Where the definitions differ:

- TRL divides advantages by the *sample* standard deviation plus 1e-4, ours by the *population* one (what upstream
  Megatron-RL does). The advantages are therefore given to both sides.
- TRL's `cispo` takes the upper bound of the ratio itself, ours its distance from 1.
- TRL's `grpo` takes the mean over all answers of the micro-batch; ours over those of the global batch that have a
  trained token.
- TRL's entropy bonus is a mean over tokens whatever the loss; ours is averaged like the loss. They are compared where
  the loss is a mean over tokens.
- TRL counts an answer cut by length, with `mask_truncated_completions`, in the number of answers of `grpo`; ours
  leaves it out. Not compared.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.loss_terms import answer_log_ratios
from megatron_rl.algorithms.reduction import local_normaliser, token_weights
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.grpo import GrpoConfig

LENGTHS = torch.tensor([7, 1, 12, 4, 9, 12])
WIDTH = 12
"""Longest completion; TRL pads all to it."""


@pytest.fixture(scope="module")
def trl_trainer():
    pytest.importorskip("trl", reason="trl is an optional part of the benchmarks: pip install -e '.[bench]'")
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


@pytest.fixture
def batch():
    """Padded [answers, WIDTH] float64 log-probs of four policies, a mask, one advantage per answer."""
    generator = torch.Generator().manual_seed(11)

    def normal(scale):
        return torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64) * scale

    old = -normal(1).abs() - 0.1
    return SimpleNamespace(
        logprobs=(old + normal(0.3)).requires_grad_(),
        old=old,
        inference=old + normal(0.1),
        reference=old + normal(0.3),
        advantages=normal(1)[:, 0],
        entropy=normal(1).abs().requires_grad_(),
        mask=torch.arange(WIDTH) < LENGTHS[:, None],
    )


def trl_loss(trainer, batch, loss_type, config):
    """TRL's loss of one micro-batch that is the whole batch, and the metrics it logs."""
    metrics = {"train": defaultdict(list)}
    is_cispo = loss_type == "cispo"
    stripped = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, batch.entropy, None),
        _entropy_bonus_enabled=config.entropy_coefficient > 0,
        _metrics=metrics,
        accelerator=SimpleNamespace(
            num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=config.kl_importance,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        aux_loss_enabled=False,
        beta=config.kl_beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=config.clip_range[0],
        entropy_coef=config.entropy_coefficient,
        epsilon_high=1 + config.clip_range[1] if is_cispo else config.clip_range[1],
        importance_sampling_level="sequence" if config.policy_loss == "gspo" else "token",
        loss_type=loss_type,
        max_completion_length=WIDTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=config.importance is not None,
        vllm_importance_sampling_correction=True,
    )
    tokens = torch.zeros(batch.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": torch.ones_like(tokens[:, :1]),
        "completion_ids": tokens,
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
    }
    if config.importance is not None:
        # TRL computes the ratio where it generates, from the same two log-probs.
        difference = (batch.old - batch.inference) * batch.mask
        if config.importance.level == "sequence":
            difference = difference.sum(1, keepdim=True)
        ratio, low, high = difference.exp(), config.importance.lower or 0.0, config.importance.upper
        outside = (ratio < low) | (ratio > high)
        truncates = config.rejection is None
        inputs["importance_sampling_ratio"] = ratio.clamp(low, high) if truncates else ratio.masked_fill(outside, 0.0)
    loss = trainer._compute_loss(stripped, None, inputs)
    return loss, {name: values[0] for name, values in metrics["train"].items() if values}


def our_loss(batch, config):
    trained = torch.ones(len(LENGTHS))
    of_answers, answer_tokens = answer_log_ratios((batch.old - batch.inference)[batch.mask], LENGTHS)
    normaliser = local_normaliser(LENGTHS, trained, config.reduction)
    weights = token_weights(LENGTHS, trained, config.reduction, normaliser, config.reduction_length or 1).double()
    inputs = TrainedTokens(
        logprobs=batch.logprobs[batch.mask],
        old_logprobs=batch.old[batch.mask],
        advantages=batch.advantages.repeat_interleave(LENGTHS),
        weights=weights.repeat_interleave(LENGTHS),
        inference_logprobs=batch.inference[batch.mask],
        ref_logprobs=batch.reference[batch.mask],
        entropy=batch.entropy[batch.mask],
        answer_log_ratios=of_answers,
        answer_tokens=answer_tokens,
        sequence=torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS),
        sequences=len(LENGTHS),
    )
    return grpo_loss(inputs, config)


def both(bounds):
    """TRL's masks: tokens or answers outside the bounds are left out, the others have their ratio as weight."""
    return {"importance": bounds, "rejection": bounds}


OPTIONS = {
    "plain": {},
    "kl": {"kl_beta": 0.1},
    "kl weighed by the ratio": {"kl_beta": 0.1, "kl_importance": True},
    "clip-higher": {"eps_low": 0.1, "eps_high": 0.28},
    "truncated importance sampling": {"importance": {"lower": 0.95, "upper": 1.1}},
    "masked importance sampling": both({"lower": 0.9, "upper": 1.1}),
    "truncated by sequence": {"importance": {"level": "sequence", "lower": 0.8, "upper": 1.1}},
    "masked by sequence": both({"level": "sequence", "lower": 0.9, "upper": 1.2}),
    "all": {"kl_beta": 0.1, "eps_low": 0.1, "eps_high": 0.28, "importance": {"upper": 1.1}},
}


@pytest.mark.parametrize(
    ("loss_type", "reduction"),
    [
        ("dapo", {"reduction": "token"}),
        ("bnpo", {"reduction": "token"}),
        ("grpo", {"reduction": "sequence"}),
        ("dr_grpo", {"reduction": "constant", "reduction_length": WIDTH}),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_gradient_and_metrics_equal_trl(trl_trainer, batch, loss_type, reduction, options):
    config = GrpoConfig(**reduction, **options)
    stats, metrics = compared(trl_trainer, batch, loss_type, config)
    if config.rejection is None:  # TRL counts the tokens that it masks, too
        assert stats.clip_low / stats.tokens == pytest.approx(metrics["clip_ratio/low_mean"], rel=1e-6)
        assert stats.clip_high / stats.tokens == pytest.approx(metrics["clip_ratio/high_mean"], rel=1e-6)
        assert stats.clip_low > 0 and stats.clip_high > 0
    assert (stats.kl is None) == ("kl" not in metrics)
    if stats.kl is not None and not config.kl_importance:  # TRL logs the weighed penalty
        assert stats.kl / stats.tokens == pytest.approx(metrics["kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "keys"),
    [
        ("grpo", {"policy_loss": "gspo", "reduction": "sequence", "eps_low": 0.02, "eps_high": 0.03}),
        ("cispo", {"policy_loss": "cispo", "eps_high": 0.2}),
        ("sapo", {"policy_loss": "sapo", "reduction": "sequence"}),
    ],
    ids=["gspo", "cispo", "sapo"],
)
@pytest.mark.parametrize(
    "options", [{}, {"kl_beta": 0.1}, {"importance": {"upper": 1.1}}], ids=["plain", "kl", "importance sampling"]
)
def test_other_losses_equal_trl(trl_trainer, batch, loss_type, keys, options):
    stats, metrics = compared(trl_trainer, batch, loss_type, GrpoConfig(**keys, **options))
    if loss_type == "grpo":  # TRL counts sequences
        assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    if loss_type == "cispo":  # TRL counts only those of positive advantage
        assert stats.clip_high / stats.tokens > metrics["cispo_clip_ratio"] > 0


def test_entropy_bonus_equals_that_of_trl(trl_trainer, batch):
    config = GrpoConfig(entropy_coefficient=0.3)
    compared(trl_trainer, batch, "dapo", config)
    theirs, ours = trl_loss(trl_trainer, batch, "dapo", config)[0], our_loss(batch, config)[0]
    gradients = [torch.autograd.grad(loss, batch.entropy)[0] for loss in (theirs, ours)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def compared(trainer, batch, loss_type, config):
    """Assert that loss and gradient are equal. Returns our statistics and TRL's metrics."""
    theirs, metrics = trl_loss(trainer, batch, loss_type, config)
    [their_gradient] = torch.autograd.grad(theirs, batch.logprobs)
    ours, stats = our_loss(batch, config)
    [our_gradient] = torch.autograd.grad(ours, batch.logprobs)
    # Our weights are fp32, all else is float64.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)
    return stats, metrics
