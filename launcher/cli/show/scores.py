"""Evaluations in the terminal: lines of progress and a table of scores."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.cli.show.history import clock, shown_accuracy
from launcher.cli.show.terminal import echo
from launcher.explain.record import GREEDY, accuracies, sampled_shares, scores_of
from launcher.runs.state import result_file
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.evaluation_records import EvaluationResult, MeanScore, SetResult
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import if_readable, read

SHARES = ("greedy", "pass@", "avg@", "maj@", "cut_off")
NAMES = {"mean_reward": "mean reward", "tokens": "tokens per answer", "cut_off": "cut off at the limit"}


LINE_EVERY_S = 10.0  # seconds between two lines of progress


class ProgressLine:
    def __init__(self) -> None:
        self._began = self._due = time.monotonic()
        self._doing: str | None = None  # what the last line said, without its numbers

    def report(self, progress: Mapping[str, Any]) -> None:
        what = " ".join(filter(None, (progress["set"], progress["mode"])))
        text = progress["waits_for"] or f"{progress['done']} of {progress['of']} problems answered  {what}".strip()
        now, doing = time.monotonic(), re.sub(r"\d+", "", progress["waits_for"])
        if now >= self._due or doing != self._doing:
            self._due, self._doing = now + LINE_EVERY_S, doing
            echo(f"[{clock(now - self._began)}] {text}", err=True)


def result_of(run: RunDir) -> EvaluationResult | None:
    file = result_file(run)
    return None if file is None else if_readable(read(EvaluationResult, file))


def lines(result: EvaluationResult, out: str) -> Iterator[str]:
    settings = result.settings
    weights, sampling = settings["checkpoint"], settings["sampling"]
    step = "" if weights["step"] is None else f" after step {weights['step']}"
    asked = f", {settings['prompt_format']}" if settings["prompt_format"] else ""
    name = weights["path"] if weights["step"] is None else weights["name"]
    yield f"{name}{step} on {settings['environment']['name']}{asked}"
    limits = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    cuts = "".join(f", {key} {sampling[key]:g}" for key, none in limits.items() if sampling[key] != none)
    yield (
        f"temperature {sampling['temperature']:g}{cuts}, at most {sampling['max_new_tokens']} tokens, "
        f"{settings['k']} answers per problem, seed {settings['seed']}"
    )
    for set_name, found in result.sets.items():
        yield ""
        yield f"{set_name}: {found.problems} problems, {found.answers} answers"
        for score_name, score in found.scores.items():
            yield f"  {NAMES.get(score_name, score_name):<22} {_said(score_name, score, found)}"
        for what, failures in (("", found.failures), ("greedy ", found.greedy_failures)):
            for reason, count in failures.items():
                yield f"  {count} {what}answers lost: {reason}"
    yield ""
    yield out
    if result.pass_rates:
        yield f"pass rates: {result.pass_rates}"


def scores_json(result: EvaluationResult) -> dict[str, dict[str, float]]:
    return {name: {score: one.value for score, one in found.scores.items()} for name, found in result.sets.items()}


def brief(scores: Mapping[str, float]) -> str:
    chosen = [name for name in ("greedy", "pass@1", "mean_reward") if name in scores][:2]
    return ", ".join(f"{NAMES.get(name, name)} {scores[name]:.3f}" for name in chosen)


def _said(name: str, score: MeanScore, found: SetResult) -> str:
    digits = 3 if name.startswith((*SHARES, "mean_reward")) else 1
    spread = "" if score.standard_error is None else f" ± {score.standard_error:.{digits}f}"
    fewer = "" if score.problems == found.problems else f"  of {score.problems} problems"
    return f"{score.value:.{digits}f}{spread}{fewer}"


def scores_in_words(line: MetricsLine) -> str:
    """Return the loss or the accuracy on each set, pass@k and majority votes with their intervals, and the lost
    answers."""
    found, parts = scores_of(line), []
    if losses := [f"{name} {found[name]['loss']:.4f}" for name in sorted(found) if "loss" in found[name]]:
        parts.append(f"loss {'  '.join(losses)}")
    for score in (GREEDY, *sampled_shares([line])):
        values = accuracies([line], score)
        shown_here = [f"{name} {_score_in_words(found[name], score)}" for name in sorted(values)]
        if shown_here and not score.startswith("avg@"):  # pass@1, of other problems if some have too few answers
            parts.append(f"{score.replace('_', ' ')} {'  '.join(shown_here)}")
    return "; ".join(parts)


def _score_in_words(scores: Mapping[str, float], score: str) -> str:
    said = shown_accuracy(scores.get(score))
    if f"{score}_low" in scores:
        return f"{said} ({scores[f'{score}_low']:.3f} to {scores[f'{score}_high']:.3f})"
    return said + (f" ({scores['failed_rollouts']:.0f} answers lost)" if "failed_rollouts" in scores else "")
