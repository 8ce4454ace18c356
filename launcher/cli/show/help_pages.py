"""Reference of recipe keys and of metrics, generated from their types and their registry: `mrl help`, docs/keys.md and
docs/metrics.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.explain.explanation import RULES
from launcher.recipe.meaning import meanings
from launcher.recipe.problems import ITEM, expected, generic, known_keys
from launcher.recipe.shipped import shipped_bases
from launcher.recipe.suggest import KeyPath
from launcher.recipe.written import EXTENDS
from megatron_rl.contract import window_rules
from megatron_rl.contract.learning import WINDOW
from megatron_rl.rank.metrics.names import COMPONENTS, ENVIRONMENT_METRICS, EVALUATION_METRICS, STEP_METRICS, SUBJECTS
from megatron_rl.recipe.config import RunConfig

WIDTH = 100  # columns of the terminal
PAGE_WIDTH = 120  # columns of the generated pages
UNITS = {"_s": "seconds", "_gib": "GiB"}  # by the end of a key
ENVIRONMENTS = ("environments",)

PAGE = """\
# Recipe keys

Every key of a recipe, with what it takes, its default and its meaning. A key without a default is required. Paths and
`extends` are described in [recipes.md](recipes.md), arguments of environments in [environments.md](environments.md).

    mrl help grpo.kl_beta         # one entry
    mrl help grpo                 # a section
    mrl help --markdown           # this page, which is generated
"""


class Keys:
    def __init__(self) -> None:
        name = {
            "type": "string",
            "words": "the name of a shipped recipe or base, or the path of a file",
            "default": None,
        }
        self.known: dict[KeyPath, Mapping[str, Any]] = {(EXTENDS,): name, **known_keys(RunConfig.model_json_schema())}
        base = (
            "Recipe to start from. Mappings merge, and all other values, lists included, replace those of the base; an "
            f"environment of another name replaces the whole section. Bases: {', '.join(shipped_bases())}."
        )
        self._meanings = {(EXTENDS,): base, **meanings(RunConfig)}

    def lines(self, path: KeyPath) -> list[str]:
        inside = [key for key in self.known if len(key) > len(path) and key[: len(path)] == path]
        lines = [self._head(path), *_wrapped(self.meaning(path), "  ")]
        for key in inside:
            if not self._is_section(key):
                lines += ["", f"  {self._head(key)}", *_wrapped(self.meaning(key), "    ")]
        return lines

    def markdown(self) -> str:
        top = [key for key in self.known if len(key) == 1]
        lines = [
            PAGE,
            "## Top level",
            *(line for key in top if not self._is_section(key) for line in self._bullet(key)),
        ]
        for section in (key for key in self.known if self._is_section(key)):
            lines += ["", f"{'#' * (len(section) + 1)} {_name(section)}", ""]
            lines += textwrap.wrap(self.meaning(section), PAGE_WIDTH, break_on_hyphens=False)
            if section == ENVIRONMENTS:
                lines += ["", "Each item has the keys of `environment`, and:"]
            for key in self.known:
                again = section == ENVIRONMENTS and ("environment", key[-1]) in self.known
                if key[:-1] in (section, (*section, ITEM)) and not self._is_section(key) and not again:
                    lines += self._bullet(key)
        return "\n".join(lines) + "\n"

    def meaning(self, path: KeyPath) -> str:
        return self._meanings.get(path, "")

    def _is_section(self, path: KeyPath) -> bool:
        return any(len(key) > len(path) and key[: len(path)] == path for key in self.known)

    def _head(self, path: KeyPath) -> str:
        kind, default = self._type(path)
        return f"{_name(path)}: {kind}" + (f"; {default}" if default else "")

    def _bullet(self, path: KeyPath) -> Iterator[str]:
        kind, default = self._type(path)
        known = f"default `{default.removeprefix('default ')}`" if default.startswith("default") else default
        text = f"- **`{path[-1]}`** ({kind}; {known}): {self.meaning(path)}"
        yield ""
        yield from textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)

    def _type(self, path: KeyPath) -> tuple[str, str]:
        field = self.known[path]
        if "properties" in field:
            return "a section", ""
        kind = " or ".join(
            "a section" if "properties" in option else expected(option) for option in field.get("anyOf", [field])
        )
        unit = next((f", in {unit}" for end, unit in UNITS.items() if path[-1].endswith(end)), "")
        return kind + unit, f"default {_written(field['default'])}" if "default" in field else "required"


def key_path(name: str) -> KeyPath:
    return generic(tuple(name.split(".")))


def _name(path: KeyPath) -> str:
    return ".".join("N" if part == ITEM else part for part in path)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if value == "":
        return '""'
    return str(value).lower() if isinstance(value, bool) else str(value)


METRICS_PAGE = """\
# Metrics

Every metric of a run: its unit, its meaning, the range in which a run learns well, and what to do outside of it.

    mrl help truncated_ratio      # one entry
    mrl explain RUN               # applies rules to all of them, and says what is wrong
    mrl help --metrics            # this page, which is generated

A run writes a line per step to `metrics.jsonl`, and the same numbers to TensorBoard and W&B. A value that does not
exist in a step is absent, never NaN. Names under `time/`, `throughput/` and `system/` may differ between two runs of a
recipe; on CPUs all others are the same bit for bit. *Trained tokens* are those of answers that are run through the
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
    """Return the entry of a metric for the terminal; empty if there is none of this name."""
    if name not in METRICS:
        return []
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
