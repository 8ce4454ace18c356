"""Tokens leave a replica once the weights that sampled them were checked, under the versions that vLLM reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_rl.generate.engine.interface import AnswerPrefix, Delta, GenerationRequest
from megatron_rl.generate.vllm.checked_answers import VllmAnswer, begun, shared_streams
from megatron_rl.generate.vllm.client import NewTokens
from megatron_rl.generate.vllm.process import VllmGone
from megatron_rl.recipe.inference import Sampling

END = 9


def request(samples: int = 1, known: dict[int, AnswerPrefix] | None = None, **sampling: object) -> GenerationRequest:
    chosen = Sampling.model_validate({"max_new_tokens": 6, **sampling})
    return GenerationRequest([1, 2], samples, chosen, key=0, known=known or {})


def spell(tokens: Sequence[int]) -> str:
    return "".join("abcdefghij"[token] for token in tokens)


def answers_to(asked: GenerationRequest) -> list[VllmAnswer]:
    return begun(asked, [END], spell)


def piece(tokens: list[int], versions: list[int] | None = None) -> NewTokens:
    return NewTokens(0, tokens, [-0.5] * len(tokens), versions)


def left(*answers: VllmAnswer) -> list[Delta]:
    return [delta for answer in answers if (delta := answer.delta()) is not None]


def test_unchecked_tokens_stay_until_the_weights_are_checked() -> None:
    [answer] = answers_to(request())
    answer.take(piece([3]), 1, checked=True)
    answer.take(piece([4, END], [1, 2, 2]), 2, checked=False)
    assert [delta.tokens for delta in left(answer)] == [[3]]
    answer.check()
    [delta] = left(answer)
    assert (delta.tokens, delta.versions, delta.finish_reason) == ([4, END], [2, 2], "stop")
    assert answer.left


def test_tokens_of_weights_that_fail_their_check_are_sampled_again() -> None:
    [answer] = answers_to(request())
    answer.take(piece([3]), 1, checked=True)
    answer.take(piece([4, END]), 2, checked=False)
    answer.drop_unchecked()
    assert answer.prompt == [1, 2, 3]
    assert answer.known == 1
    answer.take(piece([5, END], [2, 2]), 2, checked=True)
    [delta] = left(answer)
    assert (delta.tokens, delta.versions) == ([3, 5, END], [1, 2, 2])


def test_versions_are_those_of_vllm_in_the_end_also_of_tokens_that_have_left() -> None:
    [answer] = answers_to(request())
    answer.take(piece([3, 4, 6]), 2, checked=True)
    assert [delta.versions for delta in left(answer)] == [[2, 2, 2]]
    answer.take(piece([5, END], [2, 1, 2, 2, 2]), 2, checked=True)
    answer.check()
    [delta] = left(answer)
    assert (delta.tokens, delta.versions) == ([5, END], [1, 2, 2, 2]), "those from the first wrong one on"


def test_an_answer_whose_known_tokens_are_complete_ends_at_once() -> None:
    known = {0: AnswerPrefix([4, END], [-1.0, -1.0], [3, 3]), 1: AnswerPrefix([4], [-1.0], [3])}
    both = answers_to(request(3, known))
    assert [answer.ended for answer in both] == [True, False, False]
    assert [(delta.sample, delta.tokens, delta.finish_reason) for delta in left(*both)] == [(0, [], "stop")]
    assert [[answer.transcript.sample for answer in stream] for stream in shared_streams(both, 8)] == [[1], [2]]


def test_answers_to_one_prompt_share_a_request_of_bounded_size() -> None:
    five = answers_to(request(5))
    assert [len(stream) for stream in shared_streams(five, 3)] == [3, 2]


def test_answers_with_stop_strings_end_at_the_token_that_completes_one() -> None:
    [first, second] = answers_to(request(2, stop=["de"]))
    assert len(shared_streams([first, second], 8)) == 2
    first.take(piece([2, 3, 4, 5]), 1, checked=True)
    [delta] = left(first, second)
    assert (delta.tokens, delta.stop, delta.finish_reason) == ([2, 3, 4], "de", "stop")


def test_choices_of_experts_come_with_the_last_piece_and_leave_out_what_the_driver_has() -> None:
    known = AnswerPrefix([4], [-1.0], [3], [b"p", b""])
    [answer] = answers_to(request(1, {0: known}))
    answer.take(piece([5]), 3, checked=True)
    assert [delta.choices for delta in left(answer)] == [[]]
    last = replace(piece([6, END], [3, 3, 3]), choices=[b"0", b"1", b"2", b"3", b"4"])
    answer.take(last, 3, checked=False)
    answer.check()
    [delta] = left(answer)
    assert delta.choices == [b"2", b"3", b"4"]
    assert answer.transcript.choices == [b"p", b"1", b"2", b"3", b"4"]


def test_choices_of_other_tokens_than_vllm_computed_are_refused() -> None:
    [answer] = answers_to(request())
    with pytest.raises(VllmGone, match="choices of experts for 2 tokens of 3"):
        answer.take(replace(piece([6, END], [3, 3]), choices=[b"0", b"1"]), 3, checked=True)
