"""The teacher's part of the advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.trained_tokens import LOG_RATIO_LIMIT


def teacher_advantages(teacher_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log p_teacher - log p_old of the sampled tokens, [tokens].

    Times the score of a token that p_old sampled, this is an unbiased estimate of minus the gradient of
    KL(p || p_teacher) at p = p_old, the reverse KL divergence of that position (arXiv 2306.08543):

        E[(log p_teacher - log p) grad log p] = -grad KL(p || p_teacher), because E[grad log p] = 0

    Its negative is the k1 estimate of that divergence. Values are clamped like log-ratios, and a value that is not a
    number, which neither side should give, counts as 0.

    Args:
        teacher_logprobs, old_logprobs: [tokens] log-probs of the teacher, and of the policy before the step.
    """
    difference = (teacher_logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.nan_to_num(difference, nan=0.0)
