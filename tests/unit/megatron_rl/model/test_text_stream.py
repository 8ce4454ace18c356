"""Text of a growing answer: in pieces that are never taken back, and without anything from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron_rl.model.text_stream import TextStream
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, Tokenizer

ALPHABET = "ab é€🙂"
END = "<end>"
texts = st.text(ALPHABET, max_size=30)


def whole(backend: Backend) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END))


@cache
def of_bytes() -> Tokenizer:
    """Like GPT-2, Qwen and Llama 3: a character may be split anywhere between its bytes."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary | {"ab": 256, "Ġa": 257, "Ã©": 258}, [("a", "b"), ("Ġ", "a"), ("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return whole(backend)


@cache
def of_pieces() -> Tokenizer:
    """Like SentencePiece: text without a piece becomes bytes, and the first space is not part of the text."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True, unk_token="<0x00>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return whole(backend)


TOKENIZERS = {"bytes": of_bytes, "pieces": of_pieces}


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int], cuts: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    stream = TextStream(tokenizer.decode, stop)
    ends = [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    pieces = [stream.push(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [*pieces, stream.finish()]


cuts = st.lists(st.integers(0, 60), max_size=60)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, cuts=cuts)
@example(text="b" * 35 + " ", cuts=[36, 36])
def test_pieces_join_to_the_text_wherever_the_answer_is_split(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, [*tokens, tokenizer.eos_id], cuts)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(tokens=st.lists(st.integers(0, 258), max_size=40), cuts=cuts)
def test_invalid_bytes_are_shown_as_by_the_tokenizer(tokens: list[int], cuts: list[int]) -> None:
    assert "".join(pieces_of(of_bytes(), tokens, cuts)) == of_bytes().decode(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts, stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3), cuts=cuts)
@example(text="€éa", stop=["é", "€éa"], cuts=[6])
def test_nothing_is_shown_from_the_first_complete_stop_string_on(
    kind: str, text: str, stop: list[str], cuts: list[int]
) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(text)
    text = tokenizer.decode(tokens)
    found = [(place + len(each), place) for each in stop if (place := text.find(each)) >= 0]
    told = text[: min(found)[1]] if found else text
    assert "".join(pieces_of(tokenizer, tokens, cuts, stop)) == told


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    tokenizer = of_bytes()
    stream = TextStream(tokenizer.decode, ["stop"])
    said = [stream.push([token]) for token in tokenizer.encode("x s€sto!sto")]
    assert said == ["x", " ", "", "", "", "s€", "", "", "", "sto!", "", "", ""]
    assert (stream.finish(), stream.stopped) == ("sto", None)


def test_stop_string_that_was_found_is_named() -> None:
    stream = TextStream(of_bytes().decode, ["zz", "ab"])
    assert stream.push(of_bytes().encode("xxabzz")) == "xx"
    assert (stream.stopped, stream.push([5]), stream.finish()) == ("ab", "", "")
