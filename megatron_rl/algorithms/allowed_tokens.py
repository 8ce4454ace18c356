"""The tokens among which trained tokens were drawn, where a grammar did not allow all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from megatron_rl.agent.trajectories import Branch
from megatron_rl.model.grammar import Grammars

FORBIDDEN = -1e30
"""Logit of a token that could not be drawn. Its probability is 0, and sums over a vocabulary of such logits, which a
part of it may have, stay finite in fp32."""


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    sets: Tensor
    """[sets, bytes] uint8, the distinct sets of allowed tokens: token t is bit t % 8 of byte t // 8. The first one has
    all tokens."""
    of: Tensor
    """[trained tokens] int64, set of each."""

    def at(self, index: Tensor | slice) -> AllowedTokens:
        return AllowedTokens(self.sets, self.of[index])

    def forbid(self, logits: Tensor, tokens: range) -> Tensor:
        """Return logits [trained tokens, rows] with FORBIDDEN for the tokens that could not be drawn.

        tokens: of the vocabulary, in the first rows.
        """
        forced = self.of.nonzero().squeeze(1)
        if not len(forced):
            return logits
        column = torch.arange(tokens.start, tokens.stop, device=logits.device)
        of_tokens = self.sets[self.of[forced]][:, column // 8]
        allowed = (of_tokens >> (column % 8).to(torch.uint8)) & 1
        forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        forbidden[forced, : len(tokens)] = allowed == 0
        return logits.masked_fill(forbidden, FORBIDDEN)


def allowed_tokens(
    sequences: Sequence[Branch], grammars: Grammars | None, device: torch.device
) -> AllowedTokens | None:
    """Return the sets of the trained tokens of these sequences, concatenated; None if no grammar forced any.

    grammars: of the run's tokenizer. Needed if there are some.
    """
    if not any(sequence.grammars for sequence in sequences):
        return None
    assert grammars is not None, "answers in a given form need the tokenizer"
    numbers: dict[bytes, int] = {}
    of: list[int] = []
    for sequence in sequences:
        of_sequence = [0] * len(sequence.tokens)
        for turn, grammar in zip(sequence.turns, sequence.grammars or [""] * len(sequence.turns), strict=True):
            if grammar:
                rows = grammars.allowed(grammar, sequence.tokens[turn.start : turn.stop])
                of_sequence[turn.start : turn.stop] = [
                    1 + numbers.setdefault(row.tobytes(), len(numbers)) for row in rows
                ]
        of += compress(of_sequence, sequence.loss_mask)
    sets = np.frombuffer(b"".join(numbers), dtype=np.uint8).reshape(len(numbers), -1)
    all_tokens = np.full((1, sets.shape[1]), 255, dtype=np.uint8)
    return AllowedTokens(
        torch.from_numpy(np.concatenate((all_tokens, sets))).to(device), torch.tensor(of, device=device)
    )
