"""Whatever Slurm's commands print, their readers return an answer or raise the error that callers expect."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples import examples
from hostile import ODD_TEXTS, damaged_bytes
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import squeue_record

from launcher.backends.slurm import cluster_facts, jobs, reasons, sbatch
from launcher.host.slurm import call, formats, orders, queries
from launcher.host.slurm.call import CommandOutput, SlurmRefused

RECORDED = Path(__file__).parents[2] / "helpers" / "slurm_output"
JOB = (
    "JobId=4711 JobName=x Restarts=1 JobState=RUNNING Requeue=1 PreemptTime=2026-11-29T17:00:00 ExcNodeList=n[1-3] "
    "StdOut=/a b/c.log QOS=normal Comment=x mrl:0123 TimeLimit=1-00:00:00\n"
)
TIMES = {"SubmitTime": "2026-11-29T17:00:00", "EndTime": "2026-11-30T17:00:00", "TimeLimit": "1-00:00:00"}
LISTED = squeue_record(JobID="4711", State="RUNNING", NodeList="n[1-2]", RestartCnt="0", exit_code="768", **TIMES)
ENDED = "4711|CANCELLED by 1000|0:15|2026-11-29T17:00:00|2026-11-29T17:00:00|Unknown|n[1-2]|a|b\n"
STEPS = "4711.0 train\n4711.batch batch\n4711.extern extern\n"
TEXTS = [JOB, LISTED * 2, ENDED, STEPS, *(file.read_text() for file in sorted(RECORDED.glob("*/*")) if file.is_file())]
WORDS = [
    *ODD_TEXTS,
    *("9" * 5000, "²", "1-", "0-0", "99999999999-00:00:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00", "|", "\x1f"),
    *("n[1-99999999]", "n[5-1]", "n[1-3][1-65536][1-65536]", "(null)", "=", "Connexion refusée", "Invalid job id"),
]


class Answer(NamedTuple):
    """A reader, and the errors that its callers expect."""

    read: Callable[[str], Any]
    errors: tuple[type[Exception], ...] = ()


ANSWERS = [
    Answer(jobs.parse_squeue, (ValueError,)),
    Answer(jobs.parse_sacct, (ValueError,)),
    Answer(lambda text: jobs.read_jobs(["4711", "4712", text[:9]])),
    Answer(lambda _: jobs.cluster_name()),
    Answer(lambda _: queries.show_job("4711"), (SlurmRefused,)),
    Answer(lambda _: queries.node_states(["n1"]), (SlurmRefused,)),
    Answer(lambda text: queries.avoided_nodes(formats.parse_fields(text)), (SlurmRefused,)),
    Answer(lambda text: queries.preemption_cancels(formats.parse_fields(text))),
    Answer(lambda _: queries.kill_wait()),
    Answer(lambda _: queries.ended_as("4711", 1e9)),
    Answer(lambda _: queries.partitions(), (SlurmRefused,)),
    Answer(lambda _: queries.waiting_for("4711", "x"), (SlurmRefused,)),
    Answer(lambda _: queries.steps_of("4711"), (SlurmRefused,)),
    Answer(lambda _: queries.step_called("4711", "train"), (SlurmRefused,)),
    Answer(lambda _: queries.could_start("script", ["n1"]), (SlurmRefused,)),
    Answer(lambda _: sbatch.submit(Path("script")), (sbatch.SubmissionRefused, SlurmRefused)),
    Answer(lambda _: orders.submit_successor("1", "script", "n", "c", None, [], {}), (SlurmRefused,)),
    Answer(lambda _: orders.requeue("1"), (SlurmRefused,)),
    Answer(lambda _: orders.signal_step("1", "train", "USR1"), (SlurmRefused,)),
    Answer(cluster_facts.settings),
    Answer(cluster_facts.oneliners),
    Answer(cluster_facts.table),
    Answer(cluster_facts.version),
    Answer(lambda text: reasons.translate(text, {})),
    Answer(lambda text: reasons.wait_of(jobs.JobState("1", "PENDING", "pending", text[:60], dependency=text[60:]))),
]
VALUES = [
    Answer(formats.expand_hosts, (ValueError,)),
    Answer(formats.time_limit_s, (ValueError,)),
    *map(Answer, (formats.seconds_of, formats.time_of, formats.id_of_job)),
    *map(Answer, (cluster_facts.number, cluster_facts.options, cluster_facts.tres, cluster_facts.gres)),
]


def tried(answer: Answer, text: str) -> None:
    with suppress(*answer.errors):
        answer.read(text)


@examples(15)
@given(
    text=st.sampled_from(TEXTS),
    word=st.sampled_from(WORDS),
    chance=st.randoms(use_true_random=False),
    code=st.sampled_from([0, 0, 0, 1]),
)
def test_a_damaged_answer_is_an_answer_or_an_expected_error(text, word, chance, code):
    if chance.random() < 0.5:
        text = damaged_bytes(text.encode(), chance).decode("utf-8", "replace")
    parts = re.split(r"(\s|\||=|,|:|\x1f|\[|\]|-)", text)
    parts[chance.randrange(len(parts))] = word.encode("utf-8", "replace").decode()
    said = "".join(parts)
    output = CommandOutput(code, said, said[-200:] if code else "")
    with pytest.MonkeyPatch.context() as patch:
        for module in (call, sbatch, jobs):
            patch.setattr(module, "run", lambda *_, **__: output)
        for answer in ANSWERS:
            tried(answer, said)


@examples(60)
@given(parts=st.lists(st.sampled_from([*WORDS, *"0123456789[]-:,()n"]), min_size=1, max_size=6))
def test_a_damaged_value_is_a_value_or_an_expected_error(parts):
    for answer in VALUES:
        tried(answer, "".join(parts))
