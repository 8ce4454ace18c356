"""Recorded decode steps: the host starts all work of a token with one call, instead of operation by operation.

A step of 64 layers launches some 850 kernels (tests/benchmarks/decode_launches.py). For a few rows the host needs
several times as long to launch them as the device needs to run them. A recording replays the sizes, addresses and
numbers that the host passed then. So

- a step computes one of a few numbers of rows, padded up from the actual number. Padding rows write to a page of the
  cache that no sequence has, and do not advance;
- everything else that the host decides is part of the recording's key (`DrawWork`), or changes tensors before the step;
- a recording is dropped together with the cache, whose memory training needs, and when new weights have other
  addresses. Weights that change in place, as they usually do, keep it valid.

A step with a new key runs operation by operation, and is recorded when the key comes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from megatron_rl.model.core_config import DTYPES
from megatron_rl.model.experts import experts_one_by_one
from megatron_rl.model.platform.device import GraphRecorder, Kernels
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, without_graphs
from megatron_rl.recipe.model import ModelConfig

logger = logging.getLogger(__name__)

MOST_RECORDED = 64
"""Recordings at a time. Requests of one kind need one for each padded size; other kinds add to that."""

Step = Callable[[], None]


class DecodeGraphs:
    def __init__(self, recorder: GraphRecorder, policy: Policy, most_rows: int) -> None:
        self._recorder = recorder
        self._policy = policy
        self._most_rows = most_rows
        self._replays: dict[Hashable, Step | None] = {}  # None: the key has come once
        self._addresses: tuple[int, ...] = ()  # of the weights at the time of the first recording
        self._reasons: set[str] = set()  # why steps could not be recorded, as logged

    def size(self, rows: int) -> int:
        return min(padded_rows(rows), self._most_rows)

    def run(self, key: Hashable, step: Step) -> None:
        """Run a step, from its recording if there is one. Steps with the same key differ only in the values of their
        tensors."""
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
        """Return what runs the step from now on: its recording, or the step itself, slower, if recording fails."""
        self._addresses = self._addresses or _addresses(self._policy)
        try:
            return self._recorder.record(step)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]  # torch appends advice and its own stack
            if reason not in self._reasons:
                self._reasons.add(reason)
                logger.warning(
                    "decode steps cannot be recorded and stay slow; inference.cuda_graphs=false would not try: %s",
                    reason,
                )
            return step

    def keep_for_weights(self) -> None:
        if self._addresses and self._addresses != _addresses(self._policy):
            self.drop()

    def drop(self) -> None:
        if self._replays:
            self._recorder.release()
            self._replays.clear()
            self._addresses = ()


def padded_rows(rows: int) -> int:
    """Return 1, 2, 4, 8, then multiples of 8 up to 64, then four sizes per power of two: 19 sizes up to 256.

    Up to about a hundred rows a step takes as long as reading the weights, so padding costs little; tensor cores
    multiply eight rows at once.
    """
    power: int = 2 ** (rows - 1).bit_length()
    if power <= 8:
        return power
    step = max(8, power // 8)
    return -(-rows // step) * step


def why_not_recorded(
    kernels: Kernels, model: ModelConfig, config: InferenceConfig, page_tokens: int, *, tp: int
) -> str | None:
    """Return why the decode steps of such an engine run operation by operation; None if they are recorded.

    tp: tensor-parallel ranks of the engine.
    """
    dtype = DTYPES[model.dtype]
    against = without_graphs(config)
    if against is None and model.delta_net is not None:
        against = "the states of gated delta nets were not tested in recordings"
    if against is None and kernels.graph_recorder(dtype, page_tokens) is None:
        against = (
            f"this device has no kernel for pages of {page_tokens} tokens in {model.dtype}; a GPU has one with Triton, "
            "which torch for CUDA brings"
        )
    if against is None and model.expert_ffn_hidden_size is not None:
        sequential = experts_one_by_one(kernels, dtype, model.hidden_size, model.expert_ffn_hidden_size // tp)
        against = sequential and f"the host decides how many tokens each expert gets ({sequential})"
    return against


def decode_graphs(policy: Policy, model: ModelConfig, config: InferenceConfig, page_tokens: int) -> DecodeGraphs | None:
    recorder = policy.kernels.graph_recorder(DTYPES[model.dtype], page_tokens)
    tp = policy.pg_collection.tp.size()
    against = why_not_recorded(policy.kernels, model, config, page_tokens, tp=tp)
    return DecodeGraphs(recorder, policy, config.max_batch) if recorder and against is None else None


def _addresses(policy: Policy) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in policy.parameters())
