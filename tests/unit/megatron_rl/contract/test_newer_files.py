"""Files of a newer mrl are refused with a sentence that says so, and those with more fields are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megatron_rl.contract import attempt_records, evaluation_records, plan_records, rollout_records, run_records
from megatron_rl.contract.manifest import (
    MANIFEST,
    CheckpointError,
    Damaged,
    Manifest,
    find_defect,
    read_manifest,
    write_manifest,
)
from megatron_rl.contract.records import Unreadable, decode
from megatron_rl.contract.run_records import Done
from megatron_rl.contract.shapes import SHAPES

ROOMS = (attempt_records, evaluation_records, plan_records, rollout_records, run_records)


def test_each_record_with_a_version_is_refused_if_it_is_of_a_newer_mrl() -> None:
    assert ROOMS
    versions = {kind: shape.version for kind, shape in SHAPES.items() if shape.version is not None}
    assert len(versions) > 15
    for kind, version in versions.items():
        found = decode(kind, json.dumps({"version": version + 1}).encode(), "FILE")
        assert isinstance(found, Unreadable)
        assert str(found) == (
            f"FILE cannot be used: was written by a newer mrl (version {version + 1}, this one knows {version})"
        )


def test_a_record_with_more_fields_is_read() -> None:
    data = {"version": 1, "attempt": 3, "step": 40, "at": 1e9, "because": "a later mrl says more"}
    assert decode(Done, json.dumps(data).encode(), "DONE") == Done(3, 40, 1e9)


def test_a_checkpoint_of_a_newer_mrl_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(4, "s", 1, None, 0.0, 0.0, {}, {}))
    assert find_defect(tmp_path) is None
    newer = json.loads((tmp_path / MANIFEST).read_text()) | {"holograms": 3}
    del newer["sha256"]
    newer["sha256"] = hashlib.sha256(json.dumps(newer, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(newer))
    with pytest.raises(
        CheckpointError, match=r"a newer mrl has written .*\(holograms\): continue with that mrl"
    ) as refused:
        read_manifest(tmp_path)
    assert not isinstance(refused.value, Damaged)
    assert "a newer mrl has written" in (find_defect(tmp_path) or "")
