"""Reference of metrics and of the rules about them, generated from their registry: `mrl help METRIC` and
docs/metrics.md."""

from __future__ import annotations

import re
import textwrap

from launcher.cli.show.terminal import PAGE_WIDTH, WIDTH
from launcher.explain.explanation import RULES
from megatron_rl.contract import window_rules
from megatron_rl.contract.learning import WINDOW
from megatron_rl.rank.metrics.names import COMPONENTS, ENVIRONMENT_METRICS, EVALUATION_METRICS, STEP_METRICS, SUBJECTS

METRICS_PAGE = """\
# Metrics

Every metric of a run: its unit, its meaning, the range in which a run learns well, and what to do outside of it.

    mrl help truncated_ratio      # one entry
    mrl explain RUN               # applies rules to all of them, and says what is wrong
    mrl help --metrics            # this page, which is generated

A run writes a line per step to `metrics.jsonl`; TensorBoard and other trackers show the same numbers. A value that does
not exist in a step is absent, never NaN. Names under `time/`, `throughput/` and `system/` may differ between two runs
of a recipe; on CPUs all others are the same bit for bit. *Trained tokens* are those of answers that are run through the
model for training: none in a group whose rewards are all equal, unless the loss has other terms.

Ranges are those of ordinary runs and no proof: a task may have good reasons to leave them. *Rules* have exact limits;
[`mrl explain`](run-directory.md#when-nothing-is-learned) applies them.
"""
OTHERS = f"""
## Parts of rewards, and environments

- **`{COMPONENTS}NAME`** (reward): mean of a component of the reward, over the answers that have it. *Rules*:
  `component-never-earned`.

A run with several environments has these for each, `environments/ID/NAME`:
"""
METRICS = {**STEP_METRICS, **EVALUATION_METRICS}
WARNINGS = len(window_rules.RULES)
RULES_OF_PAGE = f"""
## Rules

What `mrl explain` looks for, and what to try. The first {WARNINGS} are also the warnings of a run while it trains: they
look at its last {WINDOW} steps, and at the mean rewards of all. The others read the recipe, the whole record and its
answers too.
"""
CODE = re.compile(r"\(mrl [^)]+\)|mrl \w+ RUN@[^.]+(?:\.\w+)+=VALUE|\b[a-z_]+(?:\.[a-z_]+)+\b")
"""Commands and keys in the text of a rule, which a page shows as code."""


def metrics_page() -> str:
    lines = [METRICS_PAGE.rstrip("\n")]
    for title, metrics in {**SUBJECTS, "Evaluations (evaluations.jsonl)": EVALUATION_METRICS}.items():
        lines += ["", f"## {title}"]
        for name in metrics:
            lines += ["", *_bullet(name)]
    lines += OTHERS.rstrip("\n").split("\n")
    for name, of_environment in ENVIRONMENT_METRICS.items():
        lines += ["", f"- **`{name}`**: {of_environment.meaning}."]
    lines += RULES_OF_PAGE.rstrip("\n").split("\n")
    for name, rule in RULES.items():
        text = f"{rule.condition}. *Try*: {rule.advice}"
        lines += ["", *_page_wrapped(f"- **`{name}`**: {CODE.sub(_as_code, text)}")]
    return "\n".join(lines) + "\n"


def metric_lines(name: str) -> list[str]:
    """Return the entry of a registered metric for the terminal."""
    rules = [f"{rule}: {row.condition}. {row.advice}" for rule, row in RULES.items() if row.about == name]
    lines = [re.sub(r"[*`]", "", _metric_text(name)), *rules]
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def _bullet(name: str) -> list[str]:
    rules = [f"`{rule}`" for rule, row in RULES.items() if row.about == name]
    return _page_wrapped(f"- {_metric_text(name)}" + (f" *Rules*: {', '.join(rules)}." if rules else ""))


def _metric_text(name: str) -> str:
    metric = METRICS[name]
    text = f"**`{name}`**" + (f" ({metric.unit})" if metric.unit else "") + f": {metric.meaning}."
    text += f" *Good*: {metric.good}." if metric.good else ""
    return text + (f" *Else*: {metric.advice}" if metric.advice else "")


def _page_wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _as_code(found: re.Match[str]) -> str:
    text = found[0]
    return f"(`{text[1:-1]}`)" if text.startswith("(") else f"`{text}`"
