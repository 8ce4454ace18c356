"""Slow replicas, the wire format, and answers in which several replicas have a part."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.generate.engine.interface import AnswerPrefix, Delta, GenerationRequest
from megatron_rl.generate.replicas.paces import MEASURED_S, SLOWER, DecodePace, too_slow
from megatron_rl.generate.replicas.unanswered import Unanswered
from megatron_rl.generate.replicas.wire import (
    About,
    Garbled,
    News,
    Refusal,
    decode_news,
    decode_request,
    encode_news,
    encode_request,
)
from megatron_rl.recipe.inference import Sampling

LOGPROB = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
TOKENS = st.lists(st.tuples(st.integers(0, 2**31), LOGPROB, st.integers(0, 9)))


def test_slow_replica_is_detected_beside_measured_ones() -> None:
    usual = DecodePace(tokens=1000, seconds=MEASURED_S)
    slow = DecodePace(tokens=1000, seconds=MEASURED_S * (SLOWER + 0.1))
    assert too_slow({(0, 0): usual, (1, 0): usual, (2, 0): slow}) == [(2, 0)]
    assert too_slow({(0, 0): usual, (1, 0): slow._replace(seconds=MEASURED_S * SLOWER)}) == []
    assert too_slow({(2, 0): slow}) == []
    assert too_slow({(0, 0): DecodePace(10, MEASURED_S / 2), (2, 0): slow}) == []


CHOICES = st.lists(st.sampled_from([b"ab", b"\x00\xff", b""]), max_size=6)


@given(TOKENS, st.integers(0, 2**64 - 1), st.none() | st.integers(0), CHOICES)
def test_request_survives_the_wire(
    known: list[tuple[int, float, int]], key: int, ordinal: int | None, choices: list[bytes]
) -> None:
    lists = [*map(list, zip(*known, strict=True))] or [[], [], []]
    beginning = AnswerPrefix(*lists, choices=choices)
    asked = GenerationRequest([5, 6], 3, Sampling(max_new_tokens=4, stop=["\n"]), key, ordinal, {2: beginning})
    arrived = decode_request(json.loads(json.dumps(encode_request(asked))))
    assert arrived == asked
    assert arrived.id == asked.id


@given(TOKENS, st.integers(0, 2), CHOICES)
def test_news_survive_the_wire_bit_for_bit(
    tokens: list[tuple[int, float, int]], corrected: int, choices: list[bytes]
) -> None:
    numbers, logprobs, versions = ([each[place] for each in tokens] for place in range(3))
    delta = Delta(1, numbers, logprobs, [5] * corrected + versions, None, "stop", "\n", choices=choices)
    told = News(About(1, 0, 8, 3, 2, 1, 0.5, 0, 4.5), 7, [("id", delta)], [Refusal("other", "value", "why")])
    assert decode_news(json.loads(json.dumps(encode_news(told)))) == told


def test_without_choices_nothing_of_them_is_on_the_wire() -> None:
    told = News(About(1, 0, 8, 3, 2, 1, 0.5, 0, 4.5), 7, [("id", Delta(1, [5], [-1.0], [0]))], [])
    assert encode_news(told)["pieces"] == [["id", 1, [5], [-1.0], [0], None, None]]


def test_answers_to_one_prompt_share_its_choices_in_a_message() -> None:
    deltas = [Delta(at, [5], [-1.0], [0], choices=[b"ab"] * 30 + [b"%02d" % at]) for at in range(3)]
    told = News(About(1, 0, 8, 3, 2, 1, 0.5, 0, 4.5), 7, [(name, each) for each in deltas for name in ("a", "b")], [])
    body = json.loads(json.dumps(encode_news(told)))
    assert decode_news(body) == told
    assert [piece[-1][:2] for piece in body["pieces"]] == [[0, 31]] * 2 + [[30, 1]] * 4


def test_choices_that_do_not_fit_their_tokens_are_garbled() -> None:
    told = News(About(1, 0, 8, 3, 2, 1, 0.5, 0, 4.5), 7, [("id", Delta(1, [5], [-1.0], [0], choices=[b"ab"]))], [])
    body = encode_news(told)
    body["pieces"][0][-1][1] = 3
    with pytest.raises(Garbled, match="2 bytes are not the choices of 3 tokens"):
        decode_news(body)


def test_an_answer_of_two_replicas_has_the_choices_of_both() -> None:
    work = Unanswered(GenerationRequest([1, 2], 1, Sampling(max_new_tokens=4), key=0))
    work.take(Delta(0, [5, 6], [-1.0] * 2, [3] * 2, choices=[b"a", b"b", b"c"]), now=0.0)
    work.begin_again(with_parts=True)
    assert work.request.known[0].choices == [b"a", b"b", b"c"]
    work.take(Delta(0, [7], [-1.0], [4], None, "stop", choices=[b"d"]), now=0.0)
    (answer,) = work.completions()
    assert (answer.tokens, answer.choices) == ([5, 6, 7], [b"a", b"b", b"c", b"d"])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_last_piece_may_correct_the_versions_of_the_tokens_before_it(sizes: list[int], data: st.DataObject) -> None:
    work, count = Unanswered(GenerationRequest([1], 1, Sampling(max_new_tokens=18), key=0)), sum(sizes)
    right = [*range(count)]
    for size in sizes[:-1]:
        work.take(Delta(0, [3] * size, [-1.0] * size, [-1] * size), now=0.0)
    kept = data.draw(st.integers(0, count - sizes[-1]))
    last = Delta(0, [3] * sizes[-1], [-1.0] * sizes[-1], right[kept:], None, "stop")
    work.take(last, now=0.0)
    assert work.completions()[0].versions == [-1] * kept + right[kept:]


def test_more_corrections_than_tokens_violate_the_protocol() -> None:
    work = Unanswered(GenerationRequest([1], 1, Sampling(max_new_tokens=4), key=0))
    with pytest.raises(ValueError, match="has 0 versions, and more are corrected"):
        work.take(Delta(0, [3], [-1.0], [1, 1]), now=0.0)


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(0, 20), st.booleans())
def test_answer_continued_on_another_replica_is_the_same(order: list[int], lost_after: int, resumes: bool) -> None:
    """Three samples of four tokens; sample i's token t is 10 i + t; the replica is lost after some pieces."""
    work = Unanswered(GenerationRequest([1], 3, Sampling(max_new_tokens=4), key=0))
    place = [0, 0, 0]

    def tell(sample: int) -> None:
        token = 10 * sample + place[sample]
        place[sample] += 1
        finish = "length" if place[sample] == 4 else None
        work.take(Delta(sample, [token], [-1.0], [0], None, finish), now=0.0)

    for sample in order[:lost_after]:
        if place[sample] < 4:
            tell(sample)
    had = [*place]
    work.begin_again(with_parts=resumes)
    known = {sample: len(there.tokens) for sample, there in work.request.known.items()}
    assert known == ({sample: count for sample, count in enumerate(had) if count} if resumes else {})
    place[:] = had if resumes else [0, 0, 0]
    for sample in range(3):
        if place[sample] == 4:  # all known: the next replica only reports its end
            work.take(Delta(sample, [], [], [], None, "length"), now=0.0)
        while place[sample] < 4:
            tell(sample)
    assert work.answered
    assert work.outstanding == 0
    assert [each.tokens for each in work.completions()] == [[10 * i + t for t in range(4)] for i in range(3)]
