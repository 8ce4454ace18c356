"""Pure: the experts of each token and their weights, in fp32, as transformers computes them.

    score    normalised    weights of the chosen experts
    softmax  true          softmax over their logits alone (Qwen3-MoE, gpt-oss)
    softmax  false         their probabilities in the softmax over all experts
    sigmoid  true          their sigmoids, divided by the sum (DeepSeek-V3, GLM-4.5)
    sigmoid  false         their sigmoids

megatron-core's own routing (0.16.1 and 0.19.2) differs: it always divides several sigmoids by their sum, adds a bias to
sigmoids alone, and scores a group by its best topk // group_topk experts where transformers takes two. Both give
experts of other groups the score -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.recipe.model_parts import RouterConfig

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by, as in transformers."""


def choice_scores(logits: Tensor, router: RouterConfig, correction: Tensor | None) -> Tensor:
    """Scores by which experts are chosen, the highest first; -inf outside of the token's groups.

    Args:
        logits: [tokens, experts] in fp32.
        correction: [experts] that are added to the scores; None without such a bias.

    Returns [tokens, experts].
    """
    if router.score == "sigmoid":
        scores = logits.sigmoid()
    elif correction is None and router.groups == 1:
        return logits  # in the order of their softmax
    else:
        scores = logits.softmax(dim=-1)
    if correction is not None:
        scores = scores + correction
    if router.groups == 1:
        return scores
    of_groups = scores.unflatten(-1, (router.groups, -1))
    best = of_groups.topk(min(2, of_groups.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(router.groups_per_token, dim=-1).indices, 1)
    return of_groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def weights_of(logits: Tensor, choices: Tensor, router: RouterConfig) -> Tensor:
    """Weights of the chosen experts, whose gradient reaches the logits of any choice.

    logits: [tokens, experts] in fp32. choices: [tokens, k] indices of experts. Returns [tokens, k].
    """
    divides = router.normalised and choices.shape[-1] > 1
    if router.score == "softmax" and divides:
        weights = logits.gather(-1, choices).softmax(dim=-1)
    else:
        scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(dim=-1)
        weights = scores.gather(-1, choices)
        if divides:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weights if router.scale == 1 else weights * router.scale


def moved_correction(correction: Tensor, tokens: Tensor, rate: float) -> Tensor:
    """Correction bias after an update: higher for experts with fewer tokens than the mean, lower for the others
    (auxiliary-loss-free balancing, arXiv 2408.15664, algorithm 1).

    correction: [experts]. tokens: [experts] numbers of tokens, or any multiple of them. Returns [experts].
    """
    counts = tokens.to(correction.dtype)
    return correction + rate * torch.sign(counts.mean() - counts)
