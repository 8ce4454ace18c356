"""The loss and its gradient equal those of TRL's GRPOTrainer on the same log-probs and advantages.

TRL's real `_compute_loss` runs on a trainer stripped to the attributes it reads, its model replaced by given
log-probs. Where the definitions differ:

- TRL divides advantages by the *sample* standard deviation plus 1e-4, ours by the *population* one (what upstream
  Megatron-RL does). The advantages are therefore given to both sides.
- TRL's `dr_grpo` divides the sum of token losses by answers * max_completion_length, a constant: our `token`
  reduction with that normaliser.
- TRL's `grpo` takes the mean over all answers of the micro-batch; ours over those of the global batch that have a
  trained token.
- TRL's entropy bonus is on the full-vocabulary entropy, ours on the sampled token's -p log p: not compared.
- TRL counts an answer cut by length, with `mask_truncated_completions`, in the number of answers of `grpo`; ours
  leaves it out. Not compared.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.reduction import local_normaliser, token_weights
from megatron_rl.algorithms.trained_tokens import TrainedTokens

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
        mask=torch.arange(WIDTH) < LENGTHS[:, None],
    )


def trl_loss(trainer, batch, loss_type, config):
    """TRL's loss of one micro-batch that is the whole batch, and the metrics it logs."""
    metrics = {"train": {name: [] for name in ("kl", "entropy")}}
    for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean"):
        metrics["train"][f"clip_ratio/{name}"] = []
    stripped = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, torch.zeros_like(batch.old), None),
        _entropy_bonus_enabled=False,
        _metrics=metrics,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=config.kl_beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=config.clip_range[0],
        epsilon_high=config.clip_range[1],
        importance_sampling_level="token",
        loss_type=loss_type,
        max_completion_length=WIDTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
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
        # TRL computes the ratio where it generates, from the same two log-probs, and truncates it at its upper bound.
        inputs["importance_sampling_ratio"] = (batch.old - batch.inference).exp().clamp(max=config.importance.upper)
    loss = trainer._compute_loss(stripped, None, inputs)
    return loss, {name: values[0] for name, values in metrics["train"].items() if values}


def our_loss(batch, config, normaliser=None):
    trained = torch.ones(len(LENGTHS))
    if normaliser is None:
        normaliser = local_normaliser(LENGTHS, trained, config.reduction)
    weights = token_weights(LENGTHS, trained, config.reduction, normaliser).double()
    inputs = TrainedTokens(
        logprobs=batch.logprobs[batch.mask],
        old_logprobs=batch.old[batch.mask],
        advantages=batch.advantages.repeat_interleave(LENGTHS),
        weights=weights.repeat_interleave(LENGTHS),
        inference_logprobs=batch.inference[batch.mask],
        ref_logprobs=batch.reference[batch.mask],
        entropy=torch.zeros_like(batch.old[batch.mask]),
    )
    return grpo_loss(inputs, config)


OPTIONS = {
    "plain": {},
    "kl": {"kl_beta": 0.1},
    "clip-higher": {"eps_low": 0.1, "eps_high": 0.28},
    "truncated importance sampling": {"importance": {"upper": 1.1}},
    "all": {"kl_beta": 0.1, "eps_low": 0.1, "eps_high": 0.28, "importance": {"upper": 1.1}},
}


@pytest.mark.parametrize(
    ("loss_type", "reduction", "normaliser"),
    [
        ("dapo", "token", None),
        ("bnpo", "token", None),
        ("grpo", "sequence", None),
        ("dr_grpo", "token", float(len(LENGTHS) * WIDTH)),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_gradient_and_metrics_equal_trl(trl_trainer, batch, loss_type, reduction, normaliser, options):
    config = GrpoConfig(reduction=reduction, **options)
    theirs, metrics = trl_loss(trl_trainer, batch, loss_type, config)
    [their_gradient] = torch.autograd.grad(theirs, batch.logprobs)
    ours, stats = our_loss(batch, config, normaliser)
    [our_gradient] = torch.autograd.grad(ours, batch.logprobs)

    # Our weights are fp32, all else is float64.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)

    assert stats.clip_low / stats.tokens == pytest.approx(metrics["clip_ratio/low_mean"], rel=1e-6)
    assert stats.clip_high / stats.tokens == pytest.approx(metrics["clip_ratio/high_mean"], rel=1e-6)
    assert stats.clip_low > 0 and stats.clip_high > 0
    assert (stats.kl is None) == ("kl" not in metrics)
    assert stats.kl is None or stats.kl / stats.tokens == pytest.approx(metrics["kl"], rel=1e-5)
