"""A run directory with everything that `mrl report` shows, without training."""

from __future__ import annotations

import math
import random
from pathlib import Path

from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import (
    AttemptEnd,
    AttemptStart,
    MetricsLine,
    Outcome,
    SlowestRank,
    TimelineLine,
    UsedKernels,
)
from megatron_rl.contract.files import append_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, encode_line, write
from megatron_rl.contract.rollout_records import (
    AnswerLine,
    GroupLine,
    SequenceLine,
    group_json,
    member,
    rollouts_file,
)

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<!--<style>*{display:none}</style>{{ 7 * 7 }}\u202egnp.exe\u2066\x00\x1b[31m\u2028\ud83d javascript:alert(1)"
)
"""Text that harms a page which takes it for HTML, for a template or for characters to obey."""
WORDS = ["<think>", "So ", "4", " and ", "5", "\n", "give ", "9", ".", "</think>", "\\boxed{", "9", "}", "<end>"]


def make_reported_run(
    folder: Path, steps: int = 60, groups: int = 2, answers: int = 4, sampled_every: int = 10, hostile: bool = False
) -> RunDir:
    """Write a run that was preempted once and finished.

    Args:
        groups, answers: of each step, and of each group.
        sampled_every: steps between groups with tokens.
        hostile: whether all texts of the model and of errors are HOSTILE.
    """
    run = RunDir(folder)
    recipe = load_recipe("demo", ["grpo.group_size=8", f"training.steps={steps}"])
    run.root.mkdir(parents=True)
    run.resolved.write_text(dump_resolved(recipe.config), encoding="utf-8")
    run.recipe.write_text(f"# override: grpo.group_size=8\n# override: training.steps={steps}\n{recipe.text}", "utf-8")
    chance = random.Random(1)
    metrics = [encode_line(MetricsLine(step, _values(step, steps, chance))) for step in range(1, steps + 1)]
    run.metrics.write_text("\n".join(metrics) + "\n", encoding="utf-8")
    for step in (0, steps // 2, steps):
        accuracy = 0.25 + 0.5 * step / steps
        append(
            run.evaluations, MetricsLine(step, {"eval/held_out/greedy_accuracy": accuracy, "eval/trained/pass@8": 0.9})
        )
    _attempts(run, steps, HOSTILE.encode("utf-8", "replace").decode("utf-8") if hostile else "preempted")
    _rollouts(run, steps, groups, answers, sampled_every, hostile, chance)
    return run


def _values(step: int, steps: int, chance: random.Random) -> dict[str, float]:
    share = step / steps
    return {
        "answers": 16,
        "mean_reward": 0.2 + 0.6 * share + 0.05 * chance.gauss(0, 1),
        "right_ratio": min(1.0, max(0.0, 0.2 + 0.6 * share + 0.05 * chance.gauss(0, 1))),
        "nonzero_groups_ratio": 0.6 + 0.1 * chance.random(),
        "entropy": 1.2 * math.exp(-2 * share) + 0.03 * chance.random(),
        "answer_length": 200 + 300 * share + 20 * chance.gauss(0, 1),
        "answer_length_min": 20.0 + chance.random(),
        "answer_length_max": 900.0 + 50 * chance.random(),
        "truncated_ratio": 0.1 * chance.random(),
        "loss": 0.01 * chance.gauss(0, 1),
        "grad_norm": 0.4 + 0.1 * chance.random(),
        "learning_rate": 1e-6,
        "clip_fraction_low": 0.01 * chance.random(),
        "clip_fraction_high": 0.02 * chance.random(),
        "inference_logprob_difference": 0.01 + 0.002 * chance.random(),
        "inference_logprob_difference_max": 0.4 + 0.2 * chance.random(),
        "time/step_s": 60 + 5 * chance.random(),
        "time/generate_s": 35 + 3 * chance.random(),
        "time/train_s": 20 + 2 * chance.random(),
        "throughput/tokens_per_s": 8000 + 500 * chance.random(),
    }


def _attempts(run: RunDir, steps: int, cause: str) -> None:
    begin, half = 1.8e9, steps // 2
    append(run.attempts_ledger, AttemptStart(1, begin, gpus=8, job_id="1", nodes=["n1"], submitted_at=begin - 600))
    middle = begin + 120 + 60 * half
    append(run.attempts_ledger, AttemptEnd(1, middle, "drained", step=half, cause=cause, seconds=middle - begin))
    again = middle + 3600
    append(run.attempts_ledger, AttemptStart(2, again, gpus=8, job_id="2", nodes=["n2"], submitted_at=middle))
    end = again + 120 + 60 * (steps - half)
    append(run.attempts_ledger, AttemptEnd(2, end, "finished", step=steps, seconds=end - again))
    for attempt, since, first, last in ((1, begin, 0, half), (2, again, half, steps)):
        files = run.attempt(attempt)
        files.folder.mkdir(parents=True)
        write(files.kernels, UsedKernels("local", "the test has no GPU", "torch", decoding="operation by operation"))
        write(files.outcome, Outcome("drained" if attempt == 1 else "finished", last))
        lines = [TimelineLine(since + 120, first, {"start-up": 960.0}, began=since, ranks=8, resumed=first)]
        for step in range(first + 1, last + 1):
            spent = {"generate": 280.0, "train": 160.0, "wait": 40.0}
            slowest = {"generate": SlowestRank(3, 38.0, 35.0), "train": SlowestRank(5, 20.5, 20.0)}
            lines.append(TimelineLine(since + 120 + 60 * (step - first), step, spent, slowest=slowest))
        files.timeline.write_text("".join(encode_line(line) + "\n" for line in lines), encoding="utf-8")
    run.done.touch()


def _rollouts(
    run: RunDir, steps: int, groups: int, answers: int, sampled_every: int, hostile: bool, chance: random.Random
) -> None:
    lines: dict[str, list[str]] = {}
    for step in range(1, steps + 1):
        attempt = run.attempt(1 if step <= steps // 2 else 2)
        for place in range(groups):
            problem = chance.randrange(10 * groups)
            chances = 0.0 if problem == 0 else min(1.0, 0.1 + problem / (10 * groups) + 0.5 * step / steps)
            rewards = [float(chance.random() < chances) for _ in range(answers)]
            mean = sum(rewards) / answers
            sampled = step % sampled_every == 0 and place == 0
            text = HOSTILE if hostile else f"What is {problem} + 5? Think first."
            group = GroupLine(
                step,
                (step - 1) * groups + place,
                f"{problem:012x}",
                text,
                rewards,
                [reward - mean for reward in rewards],
                [len(WORDS) + chance.randrange(900) for _ in range(answers)],
                ["stop" if chance.random() < 0.9 else "length" for _ in range(answers)],
                step - 1,
                step - 1,
                answers=[_answer(step, hostile, chance) for _ in range(answers)] if sampled else [],
            )
            lines.setdefault(rollouts_file(attempt, 0, step), []).append(group_json(group) + "\n")
    for name, its in lines.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        append_bytes(name, member("".join(its)))


def _answer(step: int, hostile: bool, chance: random.Random) -> AnswerLine:
    written = [HOSTILE, "\ud83d", *WORDS] if hostile else WORDS
    pieces = ["<user>", "What is 4 + 5?", "<model>", *written, "<tool>", "9", *written]
    first, second = 3, 3 + len(written) + 2
    turns = [[first, first + len(written)], [second, second + len(written)]]
    inside = [any(low <= at < high for low, high in turns) for at in range(len(pieces))]
    engine = [round(-chance.random() * 3, 4) if one else 0.0 for one in inside]
    trainer = [value + round(0.2 * chance.gauss(0, 1), 4) if value else 0.0 for value in engine]
    versions = [step - 1 if one else -1 for one in inside]
    line = SequenceLine(list(range(len(pieces))), pieces, turns, inside, engine, trainer, versions)
    output = HOSTILE if hostile else "9\n"
    return AnswerLine("".join(written), [line], {"format": 1.0, HOSTILE[:20] if hostile else "right": 0.5}, 1, output)
