"""Best loss on held-out rows, and the end of a run that no longer reaches it."""

from __future__ import annotations

from megatron_rl.learn.supervised.early_stop import BestLoss, best_after, why_over
from megatron_rl.recipe.training import EarlyStopConfig


def test_a_run_is_over_after_as_many_evaluations_without_improvement_as_its_patience() -> None:
    config = EarlyStopConfig(patience=2, improvement=0.1)
    best, over = None, []
    for step, loss in enumerate([2.0, 1.5, 1.45, float("nan"), 1.0, 0.95, 0.91]):
        best = best_after(best, loss, step, config)
        over.append(bool(why_over(best, config)))
    assert best == BestLoss(1.0, 4, since=2)
    assert over == [False, False, False, True, False, False, True]
    assert why_over(best, config).endswith("the best was 1 after step 4: checkpoint step-000004")
    assert not why_over(best, None)


def test_a_loss_that_is_not_finite_is_never_the_best() -> None:
    assert best_after(None, float("inf"), 0, EarlyStopConfig(patience=1)) is None
