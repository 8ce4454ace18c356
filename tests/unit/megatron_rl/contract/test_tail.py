"""The two ends of a file are those of the whole file, however its lines fall into blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract import tail
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.records import Unreadable, encode_line
from megatron_rl.contract.tail import read_ends


@examples(50)
@given(
    texts=st.lists(st.text("x", max_size=40) | st.sampled_from(["", "{"]), max_size=20),
    block=st.integers(1, 100),
    first=st.integers(0, 20),
    last=st.integers(0, 20),
    torn=st.booleans(),
)
def test_the_ends_are_those_of_the_whole_file(tmp_path_factory, texts, block, first, last, torn):
    path = tmp_path_factory.mktemp("ends") / "metrics.jsonl"
    lines = [MetricsLine(step, {"text": text}) for step, text in enumerate(texts)]
    written = [text if text == "{" else encode_line(line) for text, line in zip(texts, lines, strict=True)]
    path.write_text("".join(f"{one}\n" for one in written) + ('{"st' if torn else ""))
    whole = [line for line, text in zip(lines, texts, strict=True) if text != "{"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "BLOCK", block)
        found = read_ends(MetricsLine, path, lambda line: line.step == first, lambda line: line.step == last)
    assert isinstance(found, list)
    begin = next((place for place, line in enumerate(whole) if line.step == last), 0)
    assert found[-len(whole[begin:]) or len(found) :] == whole[begin:], "every line from the last one asked for"
    assert [line for line in whole if line in found] == found, "each line once, in order"
    assert found[:1] == whole[:1] or block < 100, "the first line too, if a block holds it"


def test_a_file_that_cannot_be_read_is_not_empty(tmp_path: Path):
    assert read_ends(MetricsLine, tmp_path / "none", bool, bool) == []
    assert isinstance(read_ends(MetricsLine, tmp_path, bool, bool), Unreadable)
