"""Text of a model card. Pure: the same record gives the same card, so a second push changes nothing.

Names in a recipe, a data set or a model may be somebody else's text. The hub renders a card as Markdown with HTML, so
those that could be more than a name are set as code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from launcher.report.run_report import ResultRow
from megatron_rl.contract.text import printable

MARK = "<!-- Made by mrl push, which replaces this card unless this line is deleted. -->"

ACCURACY = "greedy accuracy "
"""Beginning of the names of accuracies in a curve, which follow the other metrics."""

_PLAIN = re.compile(r"(?i)(?!.*(?:://|www\.|@.*\.))[\w ,.:;/+()%=±@-]*")
"""Text that Markdown shows as it is."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of a model card."""

    name: str
    step: int
    method: str
    base: str
    """Base model as the card names it; empty for random weights."""
    published_base: str | None
    """Its name on the hub; None if it has none."""
    licence: Mapping[str, str]
    """Keys of the card about the licence; empty if it is unknown."""
    adapters: bool
    datasets: Sequence[str]
    """Names of data sets on the hub."""
    environments: Sequence[str]
    version: str
    commit: str | None
    results: Sequence[ResultRow]
    curve: Sequence[Mapping[str, float]]
    """Metrics at some steps, each with `step`."""
    totals: Mapping[str, str]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Keys that differ from their defaults."""


def text_of(card: ModelCard) -> str:
    """Return the card, a README.md of the hub."""
    parts = [
        f"---\n{_yaml(_head(card))}---\n{MARK}\n",
        f"# {_shown(card.name)}\n",
        _summary(card),
        *_results(card),
        *_curve(card),
        "## Training\n",
        _table(["", ""], [[name, value] for name, value in card.totals.items()]),
        "Keys of the recipe that differ from their defaults:\n",
        _fenced(_yaml(dict(card.recipe))),
    ]
    return "\n".join(parts)


def _head(card: ModelCard) -> dict[str, Any]:
    """Metadata that the hub reads."""
    head: dict[str, Any] = {**card.licence}
    if card.published_base:
        head["base_model"] = card.published_base
        head["base_model_relation"] = "adapter" if card.adapters else "finetune"
    head |= {"library_name": "peft" if card.adapters else "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["mrl", card.method.lower().replace(" ", "-")]
    if card.datasets:
        head["datasets"] = [*card.datasets]
    if card.results:
        head["model-index"] = [{"name": card.name, "results": [_indexed(row) for row in card.results]}]
    return head


def _indexed(row: ResultRow) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": row.set, "name": row.set},
        "metrics": [{"type": row.score, "value": round(row.value, 4)}],
    }


def _summary(card: ModelCard) -> str:
    what = "Adapters (LoRA) of" if card.adapters else "Weights that began as"
    origin = f"{what} {_shown(card.base)}" if card.base else "Weights that began as random numbers"
    commit = f", commit {_shown(card.commit)}" if card.commit else ""
    trained = f" on {', '.join(map(_shown, card.environments))}" if card.environments else ""
    sets = f" Data: {', '.join(map(_shown, card.datasets))}." if card.datasets else ""
    return (
        f"{origin}, trained for {card.step:,} steps by {card.method}{trained} with mrl {card.version}{commit}.{sets}\n"
    )


def _results(card: ModelCard) -> list[str]:
    if not card.results:
        return []
    rows = [
        [
            row.set,
            row.score,
            f"{row.value:.4g}" + (f" ± {row.standard_error:.2g}" if row.standard_error is not None else ""),
            str(row.problems or ""),
        ]
        for row in card.results
    ]
    return ["## Evaluation\n", _table(["set", "score", "value ± standard error", "problems"], rows)]


def _curve(card: ModelCard) -> list[str]:
    if not card.curve:
        return []
    names = sorted(
        dict.fromkeys(name for point in card.curve for name in point), key=lambda name: name.startswith(ACCURACY)
    )
    rows = [[f"{point[name]:.4g}" if name in point else "" for name in names] for point in card.curve]
    return ["## Curves\n", _table(names, rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_shown(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _shown(text: str) -> str:
    """Text in which nothing is a link, a tag or an image, and which does not end its line or span."""
    if _PLAIN.fullmatch(text):
        return text
    fence = _longer_than_in(text, "`")
    return f"{fence} {printable(text)} {fence}"


def _fenced(text: str) -> str:
    fence = _longer_than_in(text, "```")
    return f"{fence}yaml\n{text}{fence}\n"


def _longer_than_in(text: str, fence: str) -> str:
    """Backticks, at least `fence`, and more than stand in a row anywhere in the text."""
    return max([fence, *(found + "`" for found in re.findall("`+", text))], key=len)


def _yaml(value: Mapping[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
