"""JSON of others is read to a depth that all later code can follow."""

from __future__ import annotations

import json
import pickle

import pytest

from megatron_rl.contract.bounded_json import DEEPEST, bounded_json


@pytest.mark.parametrize("opens, closes", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_only_what_is_not_too_deep_is_read(opens: str, closes: str) -> None:
    def text(depth: int) -> str:
        times = depth // len(closes)
        return opens * times + "1" + closes * times

    found = bounded_json(text(DEEPEST))
    assert found == json.loads(text(DEEPEST)) == pickle.loads(pickle.dumps(found))
    for depth in (DEEPEST + len(closes), 950, 100_000):
        for given in (text(depth), text(depth).encode()):
            with pytest.raises(ValueError, match="more than 100 lists and objects inside one another"):
                bounded_json(given)


def test_many_values_beside_one_another_are_read() -> None:
    assert len(bounded_json("[" + ",".join(["[{}]"] * 1000) + "]")) == 1000
    assert bounded_json('"' + "[" * 1000 + '"') == "[" * 1000


@pytest.mark.parametrize("text", ["", "{", b"\xff", b"\x00", "9" * 5000])
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        bounded_json(text)
