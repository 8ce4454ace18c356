"""JSON-lines files: torn lines are counted and affect no other line, and nothing raises."""

from __future__ import annotations

import json
import os

import pytest
from contract_strategies import LINES, records
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import LEDGER, AttemptEnd, AttemptStart, MetricsLine
from megatron_rl.contract.records import (
    Damage,
    Lines,
    RecordTail,
    append,
    decode_lines,
    encode_line,
    read_lines,
)

few = examples(8, suppress_health_check=list(HealthCheck))
GOOD = MetricsLine(1, {"loss": 0.5})
TORN = [
    b'{"step": 2, "lo',
    b"5",
    b"{}",
    b"[]",
    b"null",
    b"\0" * 40,
    b'{"step": "2"}',
    b'{"n": "\xff',
    b"[" * 100_000,
    b'{"step": 2, "loss": 1e999}',
    b'{"step": 2, "loss": NaN}',
]


def whole(found):
    assert isinstance(found, Lines)
    return found


@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
@few
@given(data=st.data())
def test_lines_are_read_in_order(tmp_path_factory, kind, data):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    values = data.draw(st.lists(records(kind), max_size=3))
    for value in values:
        append(path, value)
    found = whole(read_lines(kind, path))
    assert (found.records, found.damaged, found.absent) == (values, [], not values)


@few
@given(lines=st.lists(records(AttemptStart) | records(AttemptEnd), max_size=4))
def test_starts_and_ends_are_distinguished(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("ledger") / "attempts.jsonl"
    for line in lines:
        append(path, line, durable=True)
    found = whole(read_lines(LEDGER, path))
    assert found.records == lines
    assert [type(line) for line in found.records] == [type(line) for line in lines]


def test_ledger_line_has_version_and_event():
    assert json.loads(encode_line(AttemptStart(1, 5.0, "a"))) == {
        "version": 1,
        "event": "start",
        "attempt": 1,
        "at": 5.0,
        "host": "a",
        "restart": 0,
        "nodes": [],
        "generating": 0,
    }


def test_step_is_one_flat_object(tmp_path):
    append(tmp_path / "metrics.jsonl", MetricsLine(3, {"mean_reward": 0.5, "dropped_ordinals": {"7": "too long"}}))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"dropped_ordinals": {"7": "too long"}, "mean_reward": 0.5, "step": 3}\n'


@pytest.mark.parametrize("hurt", TORN, ids=lambda hurt: hurt[:16].decode("latin1"))
def test_damaged_lines_are_reported_with_their_numbers(tmp_path, hurt):
    path = tmp_path / "metrics.jsonl"
    good = encode_line(GOOD).encode()
    path.write_bytes(good + b"\n" + hurt + b"\n" + good + b"\n")
    found = whole(read_lines(MetricsLine, path))
    assert found.records == [GOOD, GOOD]
    assert [damage.line for damage in found.damaged] == [2]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"event": "pause", "attempt": 1, "at": 1.0}, "does not belong in this file"),
        ({"event": ["start"], "attempt": 1, "at": 1.0}, "does not belong in this file"),
        ({"event": "start", "attempt": 1}, "at is missing"),
        (
            {"event": "start", "attempt": 1, "at": 1.0, "version": 2},
            "was written by a newer mrl (version 2, this one knows 1)",
        ),
    ],
)
def test_foreign_line_of_the_ledger_is_damage_with_a_reason(line, why):
    assert decode_lines(LEDGER, json.dumps(line).encode()).damaged == [Damage(1, why)]


@few
@given(cut=st.integers(0, 1000), after=st.lists(records(MetricsLine), max_size=3))
def test_torn_last_line_is_terminated_before_the_next_one(tmp_path_factory, cut, after):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    line = encode_line(MetricsLine(2, {"torn": "line"})).encode()
    path.write_bytes(encode_line(GOOD).encode() + b"\n" + line[: 1 + cut % (len(line) - 1)])
    for value in after:
        append(path, value)
    found = whole(read_lines(MetricsLine, path))
    assert found.records == [GOOD, *after]
    assert [damage.line for damage in found.damaged] == [2]


def test_a_reader_notices_a_file_that_was_cut_back_and_has_grown_beyond_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(MetricsLine, path)
    assert tail.new() == []
    first = [MetricsLine(step, {"time": 0.5 * step}) for step in range(5)]
    again = [*first[:2], *(MetricsLine(step, {"time": 0.25 * step}) for step in range(2, 9))]
    for line in first:
        append(path, line)
    assert (tail.new(), tail.replaced) == (first, 0)
    os.truncate(path, 2 * len(encode_line(first[0]) + "\n"))
    for line in again[2:]:
        append(path, line)
    assert (tail.new(), tail.replaced) == (again, 1)
    append(path, GOOD)
    assert (tail.new(), tail.replaced) == ([GOOD], 1)


@few
@given(data=st.binary(max_size=200))
def test_no_bytes_raise(data):
    for kinds in (LEDGER, MetricsLine):
        found = decode_lines(kinds, data)
        assert len(found.records) + len(found.damaged) == len([line for line in data.split(b"\n") if line])


def test_unreadable_line_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="step is the name of a field"):
        append(tmp_path / "metrics.jsonl", MetricsLine(1, {"step": 2}))
    with pytest.raises(ValueError, match="Out of range"):
        append(tmp_path / "metrics.jsonl", MetricsLine(1, {"loss": float("nan")}))
    assert not (tmp_path / "metrics.jsonl").exists()
