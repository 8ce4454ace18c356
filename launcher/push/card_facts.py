"""Facts of a run for its model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.explain.record import GREEDY, Record, read_record, sampled_shares, scores_of
from launcher.host.code.snapshot import tree_of
from launcher.push.card import ACCURACY, ModelCard
from launcher.recipe.load import load_recipe
from launcher.recipe.meaning import with_defaults
from launcher.report.read import results_of
from launcher.report.run_report import ResultRow, generated_tokens
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.learning import number
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import CodeSnapshot
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.extras import PACKAGE
from megatron_rl.recipe.hub import is_hub_name
from megatron_rl.recipe.registry import required_datasets
from megatron_rl.recipe.section import flat

POINTS = 12  # steps of the curves in a card
CURVES = ("loss", "mean_reward", "right_ratio", "answer_length", "kl", "grad_norm")
PRIVATE = ("cluster", "container", "image", "job", "logging", "name", "notify", "profile", "save")
"""Sections of a recipe that say nothing about the model, and may name people's machines."""
LICENCE = ("license", "license_name", "license_link")


def read_card(
    run: RunDir, step: int, version: str, homes: Sequence[Path], *, name: str, adapters: bool, licence: str | None
) -> ModelCard:
    """Return the facts of a checkpoint. Raises BadInput or Failed if the record of the run cannot be read.

    Args:
        homes: caches of the Hugging Face libraries, which may have the card of the base model.
        licence: that of the model; None for that of its base.
    """
    record = read_record(run, answers=False)
    config = load_recipe(str(run.resolved), trusted=True).config  # nothing of it runs
    lines = [line for line in record.lines if line.step <= step]
    base = base_of(config)
    published = base if base and is_hub_name(base) else None
    return ModelCard(
        name=name,
        step=step,
        method=method_of(config),
        base=published or Path(base).name,
        published_base=published,
        licence={"license": licence} if licence else licence_of(base, homes),
        adapters=adapters,
        datasets=[*dict.fromkeys(datasets_of(config))],
        environments=[*environments_of(config)],
        version=version,
        commit=commit_of(run),
        results=[*results(run, record, step)],
        curve=curve_of(lines, record.evaluations, step),
        totals=totals_of(config, lines),
        recipe=shown_keys(config),
    )


def base_of(config: RunConfig) -> str:
    """Return the name or path of the weights that a run began with; empty for random ones."""
    model = config.model
    return {"huggingface": model.huggingface, "checkpoint": model.checkpoint}.get(model.init) or ""


def method_of(config: RunConfig) -> str:
    if config.supervised:
        return "supervised training"
    return "distillation" if config.teachings.each else "GRPO"


def licence_of(base: str, homes: Sequence[Path]) -> dict[str, str]:
    """Return the keys about its licence of the base model's card; empty without a card on this machine."""
    folders = [Path(base)] if base else []
    folders += [
        one for home in homes for one in (home / "hub" / f"models--{base.replace('/', '--')}").glob("snapshots/*")
    ]
    for folder in folders:
        try:
            text = read_bytes(folder / "README.md").decode("utf-8", "replace")
            head = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else {}
        except (OSError, IndexError, yaml.YAMLError, ValueError, RecursionError):  # ValueError: the date 2024-13-01
            continue
        if isinstance(head, Mapping) and isinstance(head.get("license"), str):
            return {key: head[key] for key in LICENCE if isinstance(head.get(key), str)}
    return {}


def environments_of(config: RunConfig) -> Iterator[str]:
    if config.generates:
        yield from ([one.name for one in config.environments] if config.environments else [config.task.name])


def datasets_of(config: RunConfig) -> Iterator[str]:
    if config.supervised:
        yield from (one.path for one in config.rows.members.values() if one.path and is_hub_name(one.path))
    if config.generates:
        yield from required_datasets(config.task)


def commit_of(run: RunDir) -> str | None:
    """Return mrl's commit: of the newest snapshot of the run's code, or of this clone for a run on one machine, which
    has none; None outside of a clone."""
    taken = if_readable(read(CodeSnapshot, run.code_record))
    for source in taken.sources if taken else ():
        if source.kind == "package" and source.commit:
            return source.commit[:12] + (" with changes" if source.dirty else "")
    tree = None if taken else tree_of(str(PACKAGE))
    return tree.commit[:12] if tree and tree.commit else None


def results(run: RunDir, record: Record, step: int) -> Iterator[ResultRow]:
    """Yield the scores of the weights: those of the run's evaluation after this step, and of `mrl evaluate`."""
    for line in record.evaluations:
        if line.step == step:
            shown = ("loss", GREEDY, *sampled_shares([line]))
            for set_name, scores in scores_of(line).items():
                for score in shown:
                    if score in scores:
                        yield ResultRow(f"step {step}", set_name, score, scores[score], None, 0)
    yield from (row for row in results_of(run, []) if row.weights == f"step {step}")


def curve_of(lines: Sequence[MetricsLine], evaluations: Sequence[MetricsLine], step: int) -> list[dict[str, float]]:
    """Return metrics at evenly spaced steps, and accuracies of evenly spaced evaluations, up to a step."""
    points: dict[int, dict[str, float]] = {}
    for line in spaced(lines, POINTS):
        values = {name: value for name in CURVES if (value := number(line, name)) is not None}
        points.setdefault(line.step, {"step": line.step}).update(values)
    for line in spaced([one for one in evaluations if one.step <= step], POINTS):
        right = {name: scores[GREEDY] for name, scores in scores_of(line).items() if GREEDY in scores}
        values = {f"{ACCURACY}{set_name}": value for set_name, value in right.items()}
        points.setdefault(line.step, {"step": line.step}).update(values)
    return [points[at] for at in sorted(points)]


def spaced(lines: Sequence[MetricsLine], most: int) -> list[MetricsLine]:
    """Return at most so many lines, evenly spaced, the first and the last among them."""
    if len(lines) <= most:
        return [*lines]
    return [lines[round(at * (len(lines) - 1) / (most - 1))] for at in range(most)]


def totals_of(config: RunConfig, lines: Sequence[MetricsLine]) -> dict[str, str]:
    found = {"steps": f"{len(lines):,}", "type of the weights": config.model.dtype}
    if config.generates and config.grpo:
        found["prompts a step, answers to each"] = f"{config.grpo.prompts_per_step}, {config.grpo.group_size}"
    if tokens := generated_tokens(lines):
        found["generated tokens"] = f"{tokens:,.0f}"
    return {**found, "learning rate of Adam": f"{config.optimizer.learning_rate:g}"}


def shown_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys that differ from their defaults, without those of PRIVATE sections. Of a path on a machine only
    the name is left."""
    values = config.model_dump(mode="json")
    usual = flat(with_defaults(_emptied(values), RunConfig))
    return {
        key: _without_folders(value)
        for key, value in flat(values).items()
        if key.split(".")[0] not in PRIVATE and value != usual.get(key) and value != {}
    }


def _emptied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _emptied(value) for key, value in values.items() if isinstance(value, dict)}


def _without_folders(value: Any) -> Any:
    text = json.dumps(value)
    return json.loads(re.sub(r'"(?:~|/)[^"]*/([^"/]+)/?"', r'"\1"', text))
