"""Fate of every prompt of a run according to its record: trained once, or dropped once with a reason."""

from __future__ import annotations

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines

Fate = int | str
"""Step that trained on a prompt, or the reason why it was dropped."""


class NotExactlyOnce(ValueError):
    """An ordinal has no fate or several, or the record cannot be read; the message says where."""


def fates(run: RunDir) -> dict[int, Fate]:
    """Return the fate of every ordinal that the run has drawn.

    Raises NotExactlyOnce unless each of 0, 1, 2, ... up to the last ordinal has exactly one fate.
    """
    lines = read_lines(MetricsLine, run.metrics)
    if isinstance(lines, Unreadable):
        raise NotExactlyOnce(str(lines))
    for damage in lines.damaged:
        raise NotExactlyOnce(f"{run.metrics}: line {damage.line}: {damage.why}")
    found: dict[int, Fate] = {}
    for expected, line in enumerate(lines.records, start=1):
        try:
            _settle(found, line, expected)
        except NotExactlyOnce as error:
            raise NotExactlyOnce(f"{run.metrics}: {error}") from None
    return found


def _settle(found: dict[int, Fate], line: MetricsLine, expected: int) -> None:
    """Add the fates of one step's ordinals."""
    step = line.step
    if step != expected:
        raise NotExactlyOnce(f"step {step} instead of step {expected}")
    first, beyond = (_whole(line, name) for name in ("first_ordinal", "next_ordinal"))
    if first != len(found) or beyond < first:
        message = "step {} settles the prompts from {} up to {}, the previous one ended at {}"
        raise NotExactlyOnce(message.format(step, first, beyond, len(found)))
    dropped = _dropped(line)
    strangers = sorted(ordinal for ordinal in dropped if not first <= ordinal < beyond)
    if strangers:
        raise NotExactlyOnce(f"step {step} drops {strangers}, which it has not drawn")
    found.update((ordinal, dropped.get(ordinal, step)) for ordinal in range(first, beyond))


def _whole(line: MetricsLine, name: str) -> int:
    value = line.values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NotExactlyOnce(f"step {line.step} has no {name}")
    return value


def _dropped(line: MetricsLine) -> dict[int, str]:
    """Return the reasons by ordinal; JSON has no numbers as keys."""
    dropped = line.values.get("dropped_ordinals", {})
    try:
        return {int(ordinal): str(reason) for ordinal, reason in dropped.items()}
    except (AttributeError, ValueError):
        raise NotExactlyOnce(f"step {line.step}: its dropped_ordinals cannot be read") from None
