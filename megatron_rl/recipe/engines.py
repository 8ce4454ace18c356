"""Capabilities of each engine: code asks this table, not the engine's name. No torch: the configuration reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    repeatable: bool = False
    """Samples depend on key, sample and position alone: a record is equal bit for bit on the CPU, and unfinished
    answers can be generated again (`resume.partial: regenerate`)."""
    probed: bool = False
    """Each swap of weights is checked: log-probs of a short text beside the trainer's."""
    own_replicas: bool = False
    """May be the replicas of a partitioned run, which the run starts, feeds with weights and restarts."""
    starts_workers: bool = False
    """Is always replicas, each one process on each of its nodes, which starts the workers on the GPUs there itself: a
    vLLM (`inference.vllm`). In a co-located run they take turns with the training ranks on the same GPUs."""
    has_stages: bool = False
    """A replica may have pipeline stages, and data-parallel attention (`placement.inference.pp`, `dp`, `ep`)."""
    of_megatron_core: bool = False
    """Generates in megatron-core's engine, which has its own scheduler and cache."""
    records_steps: bool = False
    """Records the GPU work of decode steps under the conditions of this project's own engine."""
    spans_updates: bool = False
    """Answers may begin before an update and end after it (`async.max_lag` above 0)."""
    returns_choices: bool = False
    """Returns the experts that it chose for each token (`model.router_replay: rollout`)."""
    modelled: bool = False
    """Speed in `mrl plan` is this engine's, and `mrl rehearse` can run it on tensors without data."""


_CAPABILITIES: Mapping[str, Capabilities] = {
    "native": Capabilities(
        repeatable=True,
        own_replicas=True,
        records_steps=True,
        spans_updates=True,
        returns_choices=True,
        modelled=True,
    ),
    "megatron": Capabilities(of_megatron_core=True),
    "vllm": Capabilities(
        probed=True, own_replicas=True, starts_workers=True, has_stages=True, spans_updates=True, returns_choices=True
    ),
}
ENGINES = tuple(_CAPABILITIES)
AUTO = "auto"
"""Asks for an engine that is there: see `RunConfig` and `launcher.plan.engine_choice.py`. It counts as mrl's own until
then."""


def capabilities_of(engine: str) -> Capabilities:
    return _CAPABILITIES["native" if engine == AUTO else engine]
