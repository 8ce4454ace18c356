"""What became of every prompt of a run, read from its record.

Standard library only, so that a report or a check on the login node can use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.run_dir import RunDir, read_json_lines


class NotSettledOnce(ValueError):
    """A record in which an ordinal has two fates or none; the message says at which step."""


def settled(run_dir: RunDir) -> dict[int, int | str]:
    """For every ordinal that the run has drawn, the step that trained on it, or the reason why none did.

    Raises NotSettledOnce unless each of 0, 1, 2, ... up to the last one has exactly one fate.
    """
    fates: dict[int, int | str] = {}
    for expected, line in enumerate(read_json_lines(run_dir.metrics), start=1):
        step, first, beyond = line["step"], line["first_ordinal"], line["next_ordinal"]
        if step != expected:
            raise NotSettledOnce(f"{run_dir.metrics}: step {step} where step {expected} belongs")
        if first != len(fates) or beyond < first:
            raise NotSettledOnce(
                f"{run_dir.metrics}: step {step} settles the prompts from {first} up to {beyond}, the one before "
                f"ended at {len(fates)}"
            )
        dropped = _dropped(line)
        strangers = sorted(ordinal for ordinal in dropped if not first <= ordinal < beyond)
        if strangers:
            raise NotSettledOnce(f"{run_dir.metrics}: step {step} drops {strangers}, which it has not drawn")
        fates.update((ordinal, dropped.get(ordinal, step)) for ordinal in range(first, beyond))
    return fates


def _dropped(line: Mapping[str, Any]) -> dict[int, str]:
    return {int(ordinal): reason for ordinal, reason in line.get("dropped_ordinals", {}).items()}
