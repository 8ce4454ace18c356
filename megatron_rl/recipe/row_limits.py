"""Held-out rows and an early stop that contradict the rest of a recipe. Pure, no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.recipe.sections import Sections


def against_rows(config: Sections) -> Iterator[str]:
    """Yield the reason for each contradiction, with its keys and what to do."""
    early, data = config.training.early_stop, config.rows
    if early is not None and not config.supervised:
        yield (
            "training.early_stop is set, and training.objective is grpo, which has no held-out rows: leave it out; "
            "evaluation.every shows when the accuracy falls"
        )
        return
    if early is not None and not data.holds_out:
        yield (
            "training.early_stop is set, and no rows are held out whose loss could end the run: give data.held_out, "
            "or held_out of an entry of data.sets"
        )
    if early is not None and config.evaluation.every == 0:
        yield (
            "training.early_stop is set, and evaluation.every is 0, which evaluates only before the first and after "
            "the last step: set evaluation.every"
        )
    trained = {one.source: name for name, one in data.members.items() if one.path is not None}
    for name, one in data.members.items():
        held = one.held_out_rows()
        if held is None:
            continue
        key = f"held_out of set {name!r} in data.sets" if data.sets else "data.held_out"
        if held.path is None:
            yield f"{key} names a split, and the rows are the environment's worked examples: give a share, or a path"
        elif held.source in trained:
            other = f", as set {trained[held.source]!r}" if data.sets else ""
            yield (
                f"{key} is split {held.split} of {held.path}, which is trained on{other}: name another split or file, "
                "or hold out a share of it"
            )
