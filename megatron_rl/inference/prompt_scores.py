"""Log-probs of a prompt's own tokens, computed while it is prefilled."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.inference.api import MOST_TOP_LOGPROBS, PromptScores


def prompt_scores(logits: Tensor, targets: Tensor, most: int) -> PromptScores:
    """Scores of the tokens `targets` [places] by the logits [places, vocab] before them.

    most: how many of the likeliest tokens of each place to note, at most MOST_TOP_LOGPROBS.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, targets[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    # Of equally likely ones, which are found first depends on how many are asked for: always as many.
    values, tokens = (each[:, :most] for each in logprobs.topk(min(MOST_TOP_LOGPROBS, logprobs.shape[1])))
    top = [
        dict(zip(place_tokens, place_values, strict=True))
        for place_tokens, place_values in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    return PromptScores(own.squeeze(1).tolist(), ranks.tolist(), top)
