"""A record round-trips through its file; any other content is unreadable, and nothing raises."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest
from contract_strategies import JSON, TYPES, records
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from megatron_rl.contract.attempt_records import Address, Drain, Marks, RankError
from megatron_rl.contract.plan_records import PlanRecord, PlanRole
from megatron_rl.contract.records import ABSENT, Unreadable, decode, encode, if_readable, read, write
from megatron_rl.contract.run_records import Fork

every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
several = examples(5, suppress_health_check=list(HealthCheck))
of_any_type = examples(40, suppress_health_check=list(HealthCheck))
ANY_RECORD = st.sampled_from(TYPES).flatmap(records)
FOREIGN = [
    b"",
    b"\n",
    b"5",
    b"[]",
    b"null",
    b'"x"',
    b"NaN",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe",
    b"\0" * 64,
    b"9" * 10_000,
    b"\xef\xbb\xbf{}",
    b'{"version": 1} {}',
]


@every_type
@several
@given(data=st.data())
def test_every_record_round_trips(tmp_path, kind, data):
    value = data.draw(records(kind))
    write(tmp_path / "record.json", value, durable=False)
    assert read(kind, tmp_path / "record.json") == value


@of_any_type
@given(record=ANY_RECORD)
def test_truncated_record_is_never_accepted(record):
    text = encode(record).encode()
    for end in range(len(text.rstrip())):
        assert isinstance(decode(type(record), text[:end], "f"), Unreadable), text[:end]


@every_type
def test_invalid_content_is_unreadable_and_never_absent(tmp_path, kind):
    path = tmp_path / "record.json"
    for content in FOREIGN:
        path.write_bytes(content)
        found = read(kind, path)
        assert isinstance(found, Unreadable), content[:20]
        assert found.path == str(path)


@of_any_type
@given(record=ANY_RECORD, data=st.data())
def test_damage_never_raises_and_never_returns_a_wrong_record(record, data):
    kind, text = type(record), bytearray(encode(record).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        byte = data.draw(st.sampled_from([*b'0159eE-+."{}[],:ntf\\', 0, 0xFF]))
        how = data.draw(st.sampled_from(["flip", "insert", "delete"]))
        text[at : at + (how != "insert")] = b"" if how == "delete" else bytes([byte])
    found = decode(kind, bytes(text), "f")
    assert isinstance(found, Unreadable) or (type(found) is kind and decode(kind, encode(found).encode(), "f") == found)


@of_any_type
@given(record=ANY_RECORD, data=st.data(), other=JSON)
def test_field_of_another_type_is_unreadable_or_fits(record, data, other):
    kind, fields = type(record), json.loads(encode(record))
    fields[data.draw(st.sampled_from(sorted(fields)))] = other
    found = decode(kind, json.dumps(fields).encode(), "f")
    assert isinstance(found, Unreadable) or (type(found) is kind and encode(found))


@of_any_type
@given(record=ANY_RECORD)
def test_newer_version_is_unreadable_and_says_so(record):
    fields = json.loads(encode(record))
    found = decode(type(record), json.dumps({**fields, "version": 2}).encode(), "f")
    assert isinstance(found, Unreadable)
    assert "newer mrl" in found.why


@pytest.mark.parametrize("version", [0, -1, True, "1", 1.0, None])
def test_invalid_version_is_unreadable(version):
    assert isinstance(decode(Marks, json.dumps({"version": version}).encode(), "f"), Unreadable)


def test_missing_file_is_absent(tmp_path):
    (tmp_path / "file").touch()
    assert read(Drain, tmp_path / "drain.json") is ABSENT
    assert read(Drain, tmp_path / "file" / "drain.json") is ABSENT
    assert if_readable(read(Drain, tmp_path / "drain.json")) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ELOOP])
def test_file_that_cannot_be_opened_is_unreadable(tmp_path, monkeypatch, number):
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    write(tmp_path / "drain.json", Drain("signal", "me", 1.0))
    monkeypatch.setattr(os, "open", refuse)
    found = read(Drain, tmp_path / "drain.json")
    assert found == Unreadable(str(tmp_path / "drain.json"), os.strerror(number))
    assert if_readable(found) is None


def test_stale_handle_is_retried_once(tmp_path, monkeypatch):
    real, calls = os.open, []

    def stale_at_first(*arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments)

    write(tmp_path / "drain.json", Drain("signal", "me", 1.0))
    monkeypatch.setattr(os, "open", stale_at_first)
    assert read(Drain, tmp_path / "drain.json") == Drain("signal", "me", 1.0)


@pytest.mark.timeout(10)
def test_pipe_a_device_a_folder_and_a_loop_are_unreadable(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path, tmp_path / "loop", "a\0b"):
        assert isinstance(read(Drain, path), Unreadable), path


def test_unreadable_file_is_retried_until_the_time_limit(tmp_path):
    path = tmp_path / "drain.json"
    path.touch()
    writer = threading.Timer(0.3, lambda: write(path, Drain("signal", "me", 1.0)))
    writer.start()
    assert isinstance(read(Drain, path), Unreadable)
    assert read(Drain, path, patience=10.0) == Drain("signal", "me", 1.0)
    writer.join()


def test_unknown_keys_are_ignored_and_missing_ones_take_their_defaults():
    told = {"cause": "preempted", "by": "Slurm", "at": 5, "mood": "grim"}
    assert decode(Drain, json.dumps(told).encode(), "f") == Drain("preempted", "Slurm", 5.0, None, None)


def test_defaults_are_not_shared():
    told = json.dumps({"rank": 0, "host": "a", "step": 1, "phase": "training", "error": "boom"}).encode()
    first, second = (decode(RankError, told, "f") for _ in range(2))
    assert not isinstance(first, Unreadable)
    assert not isinstance(second, Unreadable)
    first.log.append("mine")
    assert second.log == []


@pytest.mark.parametrize(
    ("port", "said"),
    [
        ('"5"', "port: expected a whole number, got text"),
        ("true", "port: expected a whole number, got true or false"),
        ("1" + "0" * 30, "port: expected a whole number, got a number out of range or of the wrong type"),
        ("null", "port: expected a whole number, got null"),
    ],
)
def test_message_names_the_field(port, said):
    assert decode(Address, f'{{"host": "a", "port": {port}}}'.encode(), "f") == Unreadable("f", said)
    assert str(Unreadable("f", said)) == f"f cannot be used: {said}"


def test_missing_field_is_named_even_inside_another_record():
    assert decode(Address, b'{"host": "a"}', "f") == Unreadable("f", "port is missing")
    role = {"name": "train", "first": "0", "behind": 0, "gpus": None, "tasks_per_node": 8}
    plan = {"nodes": 2, "gpus_per_node": 8, "spare_nodes": 0, "roles": [role]}
    found = decode(PlanRecord, json.dumps(plan).encode(), "f")
    assert found == Unreadable("f", "roles.0.first: expected a whole number, got text")


@pytest.mark.parametrize(
    "value",
    [
        Marks(ready=float("nan")),
        Marks(ready=float("inf")),
        Address("a", "5"),
        Address(None, 5),
        Fork("run", 1, {"key": [float("nan")]}, 1.0),
        PlanRecord(1, 8, 0, [], rest={"nodes": 2}),
        PlanRecord(1, 8, 0, [PlanRole("train", 0, 0, None, 8)], rest={"version": 7}),
    ],
    ids=str,
)
def test_unreadable_value_is_not_written(tmp_path, value):
    write(tmp_path / "record.json", Marks())
    with pytest.raises(ValueError):
        write(tmp_path / "record.json", value)
    assert read(Marks, tmp_path / "record.json") == Marks()


def test_keys_on_disk_are_pinned():
    assert json.loads(encode(Drain("signal", "me", 1.0, deadline=9.0))) == {
        "version": 1,
        "cause": "signal",
        "by": "me",
        "at": 1.0,
        "deadline": 9.0,
    }
    assert json.loads(encode(Fork("/runs/a", 40, {}, 1.0, "me")))["from"] == "/runs/a"
