"""Choices of experts as bytes of each token, in JSON, and in the tensors of a micro-batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from core_helpers import tiny_model

from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import decode_choices, encode_choices, known_from, merged

EXPERTS = {"experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
FORM = ChoiceForm.of(tiny_model(num_experts=4, **EXPERTS))
A, B, C, D = (bytes(numbers) for numbers in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0], [2, 0, 1, 3]))


def test_numbers_take_a_byte_up_to_256_experts_and_two_above() -> None:
    assert [ChoiceForm.of(tiny_model(num_experts=count, **EXPERTS)).width for count in (256, 257)] == [4, 8]


def test_only_layers_with_experts_have_choices() -> None:
    form = ChoiceForm.of(tiny_model(num_experts=4, num_layers=5, dense_layers=3, **EXPERTS))
    assert (form.layers, form.width) == ((4, 5), 4)


@pytest.mark.parametrize("experts", [4, 300])
def test_rows_become_entries_and_rows_again(experts: int) -> None:
    form = ChoiceForm.of(tiny_model(num_experts=experts, **EXPERTS))
    rows = np.random.default_rng(0).integers(experts, size=(3, 4))
    listed = form.listed(rows)
    table, known = form.table([listed[:2], [b"", *listed[2:]]], [3, 2])
    assert known.tolist() == [True, True, False, False, True]
    assert (table[known] == rows).all()


def test_the_first_pass_over_a_token_wins() -> None:
    assert merged([A, b"", B], [C, C, C, D]) == [A, C, B, D]
    assert merged([A, B], [C]) == [A, B]
    assert merged([], [C]) == [C]


def test_known_entries_end_at_the_first_gap() -> None:
    assert [known_from(each) for each in ([], [A, B], [A, b"", B])] == [0, 2, 1]


@pytest.mark.parametrize("choices", [[A, B], [b"", A, b""], [b"", b""]])
def test_json_has_them_exactly(choices: list[bytes]) -> None:
    assert decode_choices(json.loads(json.dumps(encode_choices(choices)))) == choices


def test_json_leaves_out_what_the_reader_has() -> None:
    encoded = encode_choices([A, B, b"", D], [A, B, C])
    assert encoded == [2, 2, [0], "AgABAw=="]
    assert decode_choices(encoded, [A, B, C]) == [A, B, b"", D]


@pytest.mark.parametrize(
    "body",
    [
        *([0, 2, [], "AAAA"], [0, 1, [0], "AAAA"], [0, 1, [], ""], [0, 1, [], "*"], [0, 0, [0], ""]),
        *([1, 1, [], "AAAA"], [-1, 1, [], "AAAA"]),
    ],
)
def test_bytes_that_do_not_fit_the_tokens_are_refused(body: list[object]) -> None:
    with pytest.raises(ValueError):
        decode_choices(body)


def test_choices_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="choices of experts take 4 bytes per token"):
        FORM.table([[A[:3]]], [1])
    with pytest.raises(ValueError, match="expert 4 as a choice, and the model has 4"):
        FORM.table([[bytes([0, 1, 2, 4])]], [1])
