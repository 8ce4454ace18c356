"""Capabilities of each engine: code asks this table, not the engine's name. No torch: the configuration reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    repeatable: bool
    """Samples depend on key, sample and position alone: a record is equal bit for bit on the CPU, and unfinished
    answers can be generated again (`resume.partial: regenerate`)."""
    probed: bool
    """Each swap of weights is checked: log-probs of a short text beside the trainer's."""
    own_replicas: bool
    """May be the replicas of a partitioned run, which the run starts, feeds with weights and restarts."""
    starts_workers: bool
    """A replica is one process, which starts the workers on its GPUs itself: a vLLM (`inference.vllm`)."""
    of_megatron_core: bool
    """Generates in megatron-core's engine, which has its own scheduler and cache."""
    records_steps: bool
    """Records the GPU work of decode steps under the conditions of this project's own engine."""
    colocated: bool
    spans_updates: bool
    """Answers may begin before an update and end after it (`async.max_lag` above 0)."""
    modelled: bool
    """Speed in `mrl plan` is this engine's, and `mrl rehearse` can run it on tensors without data."""


_CAPABILITIES: Mapping[str, Capabilities] = {
    "native": Capabilities(
        repeatable=True,
        probed=False,
        own_replicas=True,
        starts_workers=False,
        of_megatron_core=False,
        records_steps=True,
        colocated=True,
        spans_updates=True,
        modelled=True,
    ),
    "megatron": Capabilities(
        repeatable=False,
        probed=False,
        own_replicas=False,
        starts_workers=False,
        of_megatron_core=True,
        records_steps=False,
        colocated=True,
        spans_updates=False,
        modelled=False,
    ),
    "vllm": Capabilities(
        repeatable=False,
        probed=True,
        own_replicas=True,
        starts_workers=True,
        of_megatron_core=False,
        records_steps=False,
        colocated=False,
        spans_updates=True,
        modelled=False,
    ),
}


ENGINES = tuple(_CAPABILITIES)


def capabilities_of(engine: str) -> Capabilities:
    return _CAPABILITIES[engine]
