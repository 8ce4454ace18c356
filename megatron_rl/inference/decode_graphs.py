"""Recorded decode steps: the host tells the device of a token by one call, instead of operation by operation.

A step of 64 layers is some 1,800 launches, which take the host five times as long as the device needs for the work of a
few rows. What is recorded is replayed with the sizes, addresses and numbers that the host gave it then. So

- a step computes on one of few numbers of rows, the next from those that there are. The rows behind them are nobody's:
  they write into a page of the cache that no sequence has, and stay where they are;
- all else that the host decides is the key of a recording (`DrawWork`), or changes tensors before the step;
- a recording is dropped with the cache, whose memory training needs, and where new weights are not where the old ones
  were. What stays in its place while numbers change, as weights mostly do, needs nothing.

A step whose key is new is computed operation by operation, and recorded when it comes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from megatron_rl.inference.config import InferenceConfig, without_graphs
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import DTYPES, Policy
from megatron_rl.platform.api import GraphRecorder, Platform

logger = logging.getLogger(__name__)

MOST_RECORDED = 64
"""Recordings at a time. Requests of one kind need one for each size; others may ask for whatever they like."""

Step = Callable[[], None]


class DecodeGraphs:
    """The recorded steps of one policy."""

    def __init__(self, recorder: GraphRecorder, policy: Policy, most_rows: int) -> None:
        self._recorder = recorder
        self._policy = policy
        self._most_rows = most_rows
        self._replays: dict[Hashable, Step | None] = {}  # None: seen once
        self._addresses: tuple[int, ...] = ()  # of the weights, when the first of them was recorded

    def size(self, rows: int) -> int:
        """Rows to compute on where there are so many: see `padded_rows`."""
        return min(padded_rows(rows), self._most_rows)

    def run(self, key: Hashable, step: Step) -> None:
        """Do a step, by a recording where there is one. Steps with the same key differ in nothing but what their
        tensors hold."""
        if replay := self._replays.get(key):
            replay()
        elif key in self._replays:
            self._replays[key] = replay = self._record(step)
            replay()
        else:
            if len(self._replays) == MOST_RECORDED:
                self.drop()
            self._replays[key] = None
            self._recorder.warm_up(step)

    def _record(self, step: Step) -> Step:
        """What does the step from now on: where it cannot be recorded it is slower, and that is all."""
        self._addresses = self._addresses or _addresses(self._policy)
        try:
            return self._recorder.record(step)
        except RuntimeError as error:
            logger.warning("a decode step cannot be recorded, inference.cuda_graphs=false would not try: %s", error)
            return step

    def keep_for_weights(self) -> None:
        """The policy has new weights: drop what was recorded, unless they are where those before were."""
        if self._addresses and self._addresses != _addresses(self._policy):
            self.drop()

    def drop(self) -> None:
        """Forget what was recorded, and let go of its memory."""
        if self._replays:
            self._recorder.release()
            self._replays.clear()
            self._addresses = ()


def padded_rows(rows: int) -> int:
    """1, 2, 4, 8, then multiples of 8 up to 64, and four sizes from each power of two to the next: 19 up to 256.

    Up to some hundred rows a step takes as long as the weights take to be read, so further ones cost little; tensor
    cores multiply eight at once.
    """
    power: int = 2 ** (rows - 1).bit_length()
    if power <= 8:
        return power
    step = max(8, power // 8)
    return -(-rows // step) * step


def why_not_recorded(
    platform: Platform, model: ModelConfig, config: InferenceConfig, page_tokens: int, *, fp8: bool
) -> str | None:
    """Why the decode steps of such an engine are computed operation by operation; None: they are recorded.

    page_tokens: of its cache.
    """
    against = without_graphs(config, model, fp8=fp8)
    if against is None and platform.graph_recorder(DTYPES[model.dtype], page_tokens) is None:
        against = f"this device has no kernel for pages of {page_tokens} tokens in {model.dtype}"
    return against


def decode_graphs(policy: Policy, model: ModelConfig, config: InferenceConfig, page_tokens: int) -> DecodeGraphs | None:
    """Of an engine; None where its steps are not recorded."""
    platform = policy.platform
    recorder = platform.graph_recorder(DTYPES[model.dtype], page_tokens)
    against = why_not_recorded(platform, model, config, page_tokens, fp8=bool(policy.config.fp8))
    return DecodeGraphs(recorder, policy, config.max_batch) if recorder and against is None else None


def _addresses(policy: Policy) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in policy.parameters())
