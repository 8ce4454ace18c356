"""Log-probs of given tokens and the entropy of the distributions they were drawn from."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets under softmax(logits / temperature), and that distribution's entropy in nats.

    logits [tokens, vocab], targets [tokens] -> logprobs [tokens] fp32 with gradient, entropy [tokens] without.
    Temperature 0, greedy decoding, counts as 1.
    """
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    all_logprobs = torch.log_softmax(scaled, dim=-1)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropy
