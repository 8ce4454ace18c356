"""The token of a run: made once, long, and for its owner's eyes alone."""

from __future__ import annotations

import pytest

from launcher.host.record.token import make_token
from megatron_rl.contract.paths import RunDir


def test_a_token_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    run = RunDir(tmp_path)
    make_token(run)
    text = run.token.read_text()
    assert len(text.split()) == 1
    assert len(text.strip()) >= 32
    assert run.token.stat().st_mode & 0o777 == 0o600
    make_token(run)
    assert run.token.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("damage", ["empty", "torn", "garbage", "readable by all"])
def test_one_that_is_damaged_or_that_others_could_read_is_replaced(tmp_path, damage):
    run = RunDir(tmp_path)
    make_token(run)
    before = run.token.read_text()
    changed = {"empty": "", "torn": before[:9] + "\n", "garbage": "\N{SNOWMAN}" * 40 + "\n"}
    run.token.write_text(changed.get(damage, before))
    if damage == "readable by all":
        run.token.chmod(0o644)
    make_token(run)
    assert run.token.read_text() not in (before, changed.get(damage))
    assert run.token.stat().st_mode & 0o777 == 0o600
