"""Reads the directory of a run for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from launcher.errors import BadInput
from launcher.explain.explanation import explain
from launcher.explain.record import Record, accuracies, held_out_losses, read_record
from launcher.host.judge.sentence import describe_end
from launcher.host.record.accounting import LOST, GpuUsage, goodput_of, held_of
from launcher.host.record.goodput import read_usage
from launcher.host.record.ledger import ends_in, read_ledger, starts_in
from launcher.recipe.located_yaml import read_text
from launcher.recipe.meaning import with_defaults
from launcher.report.charts import chart_groups, evaluation_charts
from launcher.report.page_rollouts import collect, thinned
from launcher.report.run_report import (
    AttemptRow,
    FirstAndLast,
    ResultRow,
    RunFact,
    RunReport,
    generated_tokens,
    span,
)
from launcher.report.shown_lesson import lesson_of
from launcher.runs.state import RunStatus, read_statuses
from megatron_rl.contract.attempt_records import (
    AttemptEnd,
    AttemptStart,
    FabricReport,
    LedgerLine,
    NodeHealth,
    UsedKernels,
)
from megatron_rl.contract.attempt_records import NodeAssignment as Nodes
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.files import names_in
from megatron_rl.contract.learning import numbers
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, UnreadableRecord, if_readable, read, read_lines
from megatron_rl.contract.rollout_records import STEPS_PER_FILE, GroupLine, read_rollouts, rollout_parts
from megatron_rl.contract.run_records import Fork, RecipeChange
from megatron_rl.recipe.config import RunConfig

RECENT = 20  # steps whose pace gives the time left
MOST_READ = 6 << 20
"""Bytes of compressed groups that are read: some 170,000 groups without tokens, in six seconds."""
LEAST_SHARE = 0.0005
"""Share of the time below which the page leaves a kind of work out."""


def read_report(run: RunDir, now: float) -> RunReport:
    """Return the data of a run's page; parts that cannot be read are missing from it, and named in `unread`. Raises
    Failed if the record of its steps cannot be read, and BadInput as `resolved_values`."""
    (status,) = read_statuses([run])
    record = read_record(run)
    record = replace(record, recipe=with_defaults(record.recipe, RunConfig))
    unread = [*status.unread, *record.left_out]
    usage, ledger = _gpu_usage(status, now, unread)
    running = status.state in ("running", "saving", "unknown")
    total = usage.total
    step = record.lines[-1].step if record.lines else 0
    groups, unread_parts = chosen_groups(run, step)
    collected = collect(groups)
    starts, ends = starts_in(ledger), ends_in(ledger)
    device = "GPU" if record.key("job.device", str) == "cuda" else "process"
    return RunReport(
        status=status,
        path=str(run.root.absolute()),
        recipe=record.key("name", str) or "",
        step=step,
        began=starts[0].at if starts else None,
        ended=None if running or not ends else ends[-1].at,
        device=device,
        gpus=usage.attempts[-1].gpus if usage.attempts else 0,
        gpu_seconds=held_of(total),
        goodput=goodput_of(total),
        tokens=generated_tokens(record.lines),
        reward=span(record.lines, "mean_reward"),
        right=span(record.lines, "right_ratio"),
        losses={
            name: FirstAndLast(losses[0][1], losses[-1][1])
            for name, losses in held_out_losses(record.evaluations).items()
        },
        accuracies={
            name: FirstAndLast(first, last)
            for name, (first, last) in accuracies(record.evaluations).items()
            if first is not None and last is not None
        },
        eta_s=_eta(record, status) if running else None,
        explanation=explain(run, record),
        groups=chart_groups(record.lines),
        lesson=lesson_of(collected.first, collected.last),
        right_answers=record.lesson.right if record.lesson else [],
        rollouts=collected.rollouts(),
        unread_parts=unread_parts,
        evaluations=evaluation_charts(record.evaluations),
        results=results_of(run, unread),
        shares={name: share for name, share in (usage.as_json()["shares"] or {}).items() if share >= LEAST_SHARE},
        attempts=attempt_rows(usage, ledger, now),
        written=_written(run, unread),
        changes=_changes(run, unread),
        fork=if_readable(read(Fork, run.fork)),
        values=dict(record.recipe),
        facts=_facts(run, status.attempt, record),
        unread=unread,
    )


def chosen_groups(run: RunDir, last: int) -> tuple[Iterator[GroupLine], int]:
    """Return the groups up to a step, and the number of parts that are left out of a long record: the first part, the
    newest ones and evenly spaced ones between them are read."""
    parts = sorted(rollout_parts(run, last).items())
    chosen = sorted({0, *thinned([size for _, size in parts], MOST_READ)})
    if len(chosen) >= len(parts):
        return read_rollouts(run, 1, last), 0
    spans = [(parts[place][0], min(last, parts[place][0] + STEPS_PER_FILE - 1)) for place in chosen]
    return chain.from_iterable(read_rollouts(run, first, until) for first, until in spans), len(parts) - len(chosen)


def _gpu_usage(status: RunStatus, now: float, unread: list[str]) -> tuple[GpuUsage, list[LedgerLine]]:
    """Return the use of the GPUs and the ledger; if unreadable both are empty, and `unread` gets the reason."""
    running, queued = status.state in ("running", "saving", "unknown"), status.state in ("queued", "requeued")
    try:
        return read_usage(status.run, now, running, queued), read_ledger(status.run, patience=0.0)
    except UnreadableRecord as error:
        unread.append(str(error))
    except OSError as error:
        unread.append(f"{error.filename or status.run.root}: {error.strerror}")
    return GpuUsage([]), []


def attempt_rows(usage: GpuUsage, ledger: Sequence[LedgerLine], now: float) -> list[AttemptRow]:
    starts = {line.attempt: line for line in ledger if isinstance(line, AttemptStart)}
    ends = {line.attempt: line for line in ledger if isinstance(line, AttemptEnd)}
    rows = []
    for one in usage.attempts:
        if one.attempt is None:
            continue
        end = ends.get(one.attempt)
        held = held_of(one.seconds)
        rows.append(
            AttemptRow(
                one.attempt,
                one.start,
                one.end - one.start,
                one.start - one.queued_at,
                one.gpus,
                list(starts[one.attempt].nodes),
                goodput_of(one.seconds),
                one.seconds[LOST] / held if held else None,
                end.outcome if end else "",
                describe_end(end, now) if end else "",
            )
        )
    return rows


def _eta(record: Record, status: RunStatus) -> float | None:
    times = numbers(record.lines[-RECENT:], "time/step_s")
    return (status.steps - record.lines[-1].step) * sum(times) / len(times) if times and status.steps else None


def results_of(run: RunDir, unread: list[str]) -> list[ResultRow]:
    """Return the scores of `mrl evaluate` for this run, or of this run if it evaluates another one. `unread` gets
    the reasons for files that cannot be read."""
    files = [run.evaluation]
    try:
        names = names_in(run.evaluation_results)
        files += [run.evaluation_results / name for name in sorted(names) if name.endswith(".json")]
    except OSError as error:
        unread.append(f"{run.evaluation_results}: {error.strerror}")
    rows = []
    for file in files:
        found = read(EvaluationResult, file)
        if isinstance(found, Unreadable):
            unread.append(str(found))
        elif isinstance(found, EvaluationResult):
            rows += _rows(found)
    return rows


def _rows(result: EvaluationResult) -> list[ResultRow]:
    found = result.settings.get("checkpoint")
    checkpoint = found if isinstance(found, Mapping) else {}
    step = checkpoint.get("step")
    weights = f"step {step}" if step is not None else str(checkpoint.get("name") or checkpoint.get("path") or "")
    return [
        ResultRow(weights, set_name, name, score.value, score.standard_error, score.problems)
        for set_name, scored in result.sets.items()
        for name, score in scored.scores.items()
    ]


def _changes(run: RunDir, unread: list[str]) -> list[RecipeChange]:
    found = read_lines(RecipeChange, run.changes)
    if isinstance(found, Unreadable):
        unread.append(str(found))
        return []
    return found.records


def _written(run: RunDir, unread: list[str]) -> str:
    """Return recipe.yaml: what the run gives itself, with the overrides of the command line as comments."""
    try:
        return read_text(run.recipe)
    except BadInput as error:
        unread += error.problems
        return ""


def _facts(run: RunDir, number: int, record: Record) -> list[RunFact]:
    if not number:
        return []
    attempt = run.attempt(number)
    facts: list[RunFact] = []
    if kernels := if_readable(read(UsedKernels, attempt.kernels)):
        named = {
            "layers": f"{kernels.transformer_impl}: {kernels.reason}",
            "attention": kernels.attention,
            "fp8": kernels.fp8,
            "decoding": kernels.decoding,
            "experts": kernels.experts,
        }
        facts += [RunFact(label, text) for label, text in named.items() if text]
    if nodes := if_readable(read(Nodes, attempt.nodes)):
        facts += [RunFact(f"nodes of {step}", ", ".join(hosts)) for step, hosts in nodes.steps.items()]
        facts += [RunFact("spare nodes", ", ".join(nodes.spare))] if nodes.spare else []
        facts += [RunFact(f"{host} is not used", why) for host, why in nodes.bad.items()]
        checked = [
            if_readable(read(NodeHealth, attempt.health(host)))
            for host in sorted({*chain(*nodes.steps.values(), nodes.spare)})
        ]
        facts += [RunFact(one.host, "; ".join(one.problems)) for one in checked if one and one.problems]
    fabric = if_readable(read(FabricReport, attempt.fabric))
    if fabric and fabric.whole and fabric.whole.gbps:
        facts.append(RunFact("all-reduce between nodes", f"{fabric.whole.gbps:.3g} GB/s"))
    return facts
