"""Replays of routers: experts of a pass that were chosen before (arXiv 2510.11370), and recordings of those it chooses.

A layer's router asks its replay, if it has one, which experts process its tokens. The weights of the chosen experts are
the router's own scores, so gradients reach the router as without a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReplayTally:
    """Counts choices of experts, of one token in one layer each, without waiting for the device."""

    counts: Tensor
    """[2] int64: replayed choices, and those that differ from the router's own."""

    @classmethod
    def on(cls, device: torch.device) -> ReplayTally:
        return cls(torch.zeros(2, dtype=torch.long, device=device))

    def count(self, replayed: Tensor, own: Tensor, known: Tensor | None) -> None:
        """replayed, own: [tokens, chosen]. known: [tokens] which of them are replayed; None: all."""
        differ = (replayed.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
        if known is None:
            known = torch.ones_like(differ)
        self.counts.add_(torch.stack((known.sum(), (differ & known).sum())))


class GivenChoices:
    """Replays choices that are given for each token; the router chooses for tokens without any."""

    def __init__(
        self, given: Tensor, known: Tensor, columns: Mapping[int, int], tally: ReplayTally, part: int = 0
    ) -> None:
        """
        given: [tokens, layers, chosen], on the device, as small integers. known: [tokens] bool.
        columns: index among `layers` of each layer of this rank.
        part: rank among those that share the tokens equally (sequence parallelism).
        """
        self._given, self._known, self._columns, self._tally, self._part = given, known, columns, tally, part

    def choose(self, layer_number: int, scores: Tensor) -> Tensor:
        begin = self._part * len(scores)
        given = self._given[begin : begin + len(scores), self._columns[layer_number]].long()
        known = self._known[begin : begin + len(scores)]
        own = _own(scores, given.shape[1])
        padding = own[len(given) :]
        own = own[: len(given)]
        self._tally.count(given, own, known)
        return torch.cat((torch.where(known[:, None], given, own), padding))


class FirstChoices:
    """Replays what the routers choose in the first pass over the tokens."""

    def __init__(self, chosen: int, tally: ReplayTally) -> None:
        """chosen: experts of a token."""
        self._chosen, self._tally = chosen, tally
        self._of_layers: dict[int, Tensor] = {}

    def choose(self, layer_number: int, scores: Tensor) -> Tensor:
        own = _own(scores, self._chosen)
        if layer_number not in self._of_layers:
            self._of_layers[layer_number] = own.to(torch.int16)
            return own
        replayed = self._of_layers[layer_number].long()
        self._tally.count(replayed, own, None)
        return replayed


class RecordedChoices:
    """Lets the routers choose, and writes their choices to a table."""

    def __init__(self, table: Tensor, columns: Mapping[int, int], target: Tensor, source: Tensor | None = None) -> None:
        """
        table: [slots, layers, chosen]. columns: as for `GivenChoices`.
        target: [written] slots. source: [written] tokens whose choices go there; None: the first ones.
        """
        self._table, self._columns, self._target, self._source = table, columns, target, source

    def choose(self, layer_number: int, scores: Tensor) -> Tensor:
        own = _own(scores, self._table.shape[2])
        written = own[: len(self._target)] if self._source is None else own.index_select(0, self._source)
        self._table[:, self._columns[layer_number]].index_copy_(0, self._target, written.to(self._table.dtype))
        return own


def _own(scores: Tensor, chosen: int) -> Tensor:
    return scores.detach().topk(chosen, dim=1).indices
