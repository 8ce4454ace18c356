"""Policy gradient without a ratio."""

from __future__ import annotations

from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.losses.token_loss import TokenLoss
from megatron_rl.algorithms.trained_tokens import TrainedTokens


def reinforce(tokens: TrainedTokens, config: GrpoConfig) -> TokenLoss:
    """Return the loss of REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696):

        L = -A log_prob

    It has neither a ratio nor a bound: with several updates per step, or tokens of older weights, only
    `grpo.importance` corrects for the difference of the policies. The value of L has no meaning of its own.
    """
    return TokenLoss(-tokens.advantages * tokens.logprobs)
