"""Reference of metrics, generated from their registry: `mrl help METRIC`, and docs/metrics.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from megatron_rl.metrics.metric import Metric
from megatron_rl.metrics.names import COMPONENTS, ENVIRONMENT_METRICS, EVALUATION_METRICS, STEP_METRICS, SUBJECTS

WIDTH = 100  # columns of the terminal
PAGE_WIDTH = 120  # columns of docs/metrics.md

PAGE = """\
# Metrics

Every metric of a run: its unit, its meaning, the range in which a run learns well, and what to do outside of it.

    mrl help truncated_ratio      # one entry
    mrl explain RUN               # applies rules to all of them, and says what is wrong
    mrl help --metrics            # this page, which is generated

A run writes a line per step to `metrics.jsonl`, and the same numbers to TensorBoard and W&B. A value that does not
exist in a step is absent, never NaN. Names under `time/`, `throughput/` and `system/` may differ between two runs of a
recipe; on CPUs all others are the same bit for bit. *Trained tokens* are those of answers that are run through the
model for training: none in a group whose rewards are all equal, unless the loss has other terms.

Ranges are those of ordinary runs and no proof: a task may have good reasons to leave them. *Rules* are those of
[`mrl explain`](run-directory.md#when-nothing-is-learned) that read the metric, with exact limits.
"""
OTHERS = f"""
## Parts of rewards, and environments

- **`{COMPONENTS}NAME`** (reward): mean of a component of the reward, over the answers that have it. *Rules*:
  `component-never-earned`.

A run with several environments has these for each, `environments/ID/NAME`:
"""


def metrics_page() -> str:
    """Return the page docs/metrics.md."""
    lines = [PAGE.rstrip("\n")]
    for title, metrics in {**SUBJECTS, "Evaluations (evaluations.jsonl)": EVALUATION_METRICS}.items():
        lines += ["", f"## {title}"]
        for name, metric in metrics.items():
            lines += ["", *_bullet(name, metric)]
    lines += OTHERS.rstrip("\n").split("\n")
    for name, of_environment in ENVIRONMENT_METRICS.items():
        lines += ["", f"- **`{name}`**: {of_environment.meaning}."]
    return "\n".join(lines) + "\n"


def metric_texts() -> dict[str, str]:
    """Return the meaning of each metric."""
    return {name: metric.meaning for name, metric in {**STEP_METRICS, **EVALUATION_METRICS}.items()}


def metric_lines(name: str) -> list[str]:
    """Return the entry of a metric for the terminal; empty if there is none of this name."""
    known = {**STEP_METRICS, **EVALUATION_METRICS}
    if name not in known:
        return []
    metric = known[name]
    rows = [("", metric.meaning), ("good", metric.good), ("else", metric.advice), ("rules", ", ".join(metric.rules))]
    lines = [f"{name}, a metric" + (f" in {metric.unit}" if metric.unit else "")]
    for label, text in rows:
        first = f"  {label:<6}" if label else "  "
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
    return lines


def _bullet(name: str, metric: Metric) -> Iterator[str]:
    text = f"- **`{name}`**" + (f" ({metric.unit})" if metric.unit else "") + f": {metric.meaning}."
    if metric.good:
        text += f" *Good*: {metric.good}. *Else*: {metric.advice}"
    if metric.rules:
        text += f" *Rules*: {', '.join(f'`{rule}`' for rule in metric.rules)}."
    yield from textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
