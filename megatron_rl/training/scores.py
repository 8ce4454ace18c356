"""Log-probs of a step's trained tokens that are known before its updates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of scoring a batch, or of some of its tokens. Each is [trained tokens], on the device."""

    before: Tensor | None = None
    """Log-probs of the policy before the first update; None if the only update computes them itself."""
    answers: Tensor | None = None
    """Log ratios of whole answers, see `TrainedTokens.answer_log_ratios`."""
    answer_tokens: Tensor | None = None
    """Number of log ratios of whole answers."""
    reference: Tensor | None = None
    """Log-probs of the reference policy, if there is one."""
    teacher: Tensor | None = None
    """Log-probs of the teacher, if there is one."""
    recorded: Tensor | None = None
    """Receives the log-probs of the tokens that this rank predicts in the only update; None if none are recorded, or
    `before` has them."""

    def at(self, index: Tensor) -> Scores:
        """Return what is known of some tokens.

        index: [tokens] indices into the trained tokens.
        """
        known = (self.before, self.answers, self.answer_tokens, self.reference, self.teacher)
        return Scores(*(None if each is None else each[index] for each in known))
