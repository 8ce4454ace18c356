"""The order of a step in which a vLLM and the ranks that train share devices, and what is on a device meanwhile. Pure.

    generate                                        the engine has the device
    pause   sleep   fetch   train   update   stow   the ranks have it
    measure   wake weights   send   put away        weights change hands, so both have some of it
    wake cache   probe   resume   generate          the engine has it again

The ranks carry it out (`run/turns.py`), and the plan and the rehearsal of a step's memory add up its stages
(`launcher/plan/gpu_memory.py`, `run/rehearse`). CUDA contexts, communicators and recorded graphs of both processes stay
throughout, so stages leave them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rl.recipe.job import Offload

Act = Literal[
    "generate",
    "pause",  # the engine keeps unfinished answers, but samples nothing
    "sleep",  # the engine drops its weights and its cache
    "fetch",  # the ranks' weights come back from host memory
    "train",
    "update",
    "stow",  # gradients are dropped, Adam's state moves to host memory
    "measure",  # the probe of the new weights, by the ranks
    "wake weights",
    "send",  # the ranks' weights to the engine
    "put away",  # the ranks' weights move to host memory
    "wake cache",
    "probe",
    "resume",
]
Holding = Literal["weights", "gradients", "optimizer", "activations", "bucket", "engine weights", "KV cache"]

ENGINE: frozenset[Holding] = frozenset({"engine weights", "KV cache"})
_RANKS: frozenset[Holding] = frozenset({"weights", "gradients", "optimizer"})
_BRIEF: frozenset[Holding] = frozenset({"bucket", "activations"})
"""Holdings that go after their use, whatever is off-loaded."""
_LEAVES: dict[Offload, frozenset[Holding]] = {
    "none": frozenset(),
    "buffers": ENGINE.union({"gradients"}),
    "optimizer": ENGINE.union({"gradients", "optimizer", "weights"}),
}
"""Holdings that leave the device while they are unused."""
_BROUGHT: dict[Act, frozenset[Holding]] = {
    "fetch": frozenset({"weights"}),
    "train": frozenset({"gradients", "activations"}),
    "update": frozenset({"optimizer"}),
    "wake weights": frozenset({"engine weights"}),
    "send": frozenset({"bucket"}),
    "wake cache": frozenset({"KV cache"}),
}
_TAKEN: dict[Act, frozenset[Holding]] = {
    "sleep": ENGINE,
    "train": frozenset({"activations"}),
    "stow": frozenset({"gradients", "optimizer"}),
    "put away": frozenset({"bucket", "weights"}),
}
TO_TRAIN: tuple[Act, ...] = ("pause", "sleep", "fetch")
"""Acts from generation to training."""
_TRAINING: tuple[Act, ...] = ("train", "update", "stow")
TO_GENERATE: tuple[Act, ...] = ("measure", "wake weights", "send", "put away", "wake cache", "probe", "resume")
"""Acts from training to generation."""
_ONLY_IF_AWAY: dict[Act, Holding] = {
    "sleep": "engine weights",
    "wake weights": "engine weights",
    "wake cache": "KV cache",
    "fetch": "weights",
}
"""Acts that have nothing to do where this stays on the device."""


@dataclass(frozen=True, slots=True)
class TurnStage:
    act: Act
    on_device: frozenset[Holding]
    """Everything that is on the device at some moment of the act."""


def sleeps(offload: Offload) -> bool:
    """Whether the engine gives up its memory while the ranks train."""
    return "engine weights" in _LEAVES[offload]


def stages(offload: Offload) -> tuple[TurnStage, ...]:
    """Stages of one step, from generation until the engine may generate again."""
    leaves = _LEAVES[offload]
    present: frozenset[Holding] = ENGINE | (_RANKS - leaves)
    found = [TurnStage("generate", present)]
    for act in (*TO_TRAIN, *_TRAINING, *TO_GENERATE):
        if act in _ONLY_IF_AWAY and _ONLY_IF_AWAY[act] not in leaves:
            continue
        during = present | _BROUGHT.get(act, frozenset())
        found.append(TurnStage(act, during))
        present = during - (_TAKEN.get(act, frozenset()) & (leaves | _BRIEF))
    return tuple(found)
