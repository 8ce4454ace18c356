"""Stop strings: an answer ends with the first token that completes one, however the text is split into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.model.text_stream import IncrementalDecoder, StopStrings

LETTERS = "ab\n é€😀"
TEXTS = st.text(alphabet=LETTERS, max_size=60)


class Pieces:
    """A tokenizer of bytes: token i is pieces[i]."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


class ByteFallback(Pieces):
    """Like SentencePiece for characters without a token: one token per byte. If any of several adjacent bytes is
    invalid, all of them are U+FFFD."""

    def decode(self, tokens: Sequence[int]) -> str:
        text, pieces = "", [self.pieces[token] for token in tokens]
        for is_bytes, run in groupby(pieces, key=lambda piece: len(piece) == 1 and piece[0] > 127):
            whole = b"".join(run)
            try:
                text += whole.decode()
            except UnicodeDecodeError:
                assert is_bytes
                text += "\ufffd" * len(whole)
        return text


@st.composite
def tokenizers(draw: st.DrawFn, text: str) -> Pieces:
    """Split the text into tokens anywhere; some are empty, like special tokens."""
    if draw(st.booleans()):
        encoded = text.encode()
        cuts = sorted(draw(st.lists(st.integers(0, len(encoded)), max_size=len(encoded) + 3)))
        return Pieces([encoded[start:end] for start, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True)])
    pieces: list[bytes] = []
    for character in text:
        whole = character.encode()
        pieces += [bytes([byte]) for byte in whole] if draw(st.booleans()) else [whole]
    return ByteFallback(pieces)


def looks(tokens: int, sizes: Sequence[int]) -> list[range]:
    """Yield the tokens in the order in which the host sees them, some at a time."""
    found, first = [], 0
    for size in [*sizes, tokens]:
        found.append(range(first, min(tokens, first + size)))
        first = found[-1].stop
    return found


def by_definition(pieces: Sequence[bytes], stop: Sequence[str]) -> tuple[int, str] | None:
    for count in range(1, len(pieces) + 1):
        text = b"".join(pieces[:count]).decode(errors="ignore")
        if present := [(text.index(string) + len(string), -len(string), string) for string in stop if string in text]:
            return count, min(present)[-1]
    return None


@examples(150)
@given(data=st.data(), text=TEXTS, stop=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3))
def test_answer_ends_with_the_first_token_that_completes_one(data: st.DataObject, text: str, stop: list[str]) -> None:
    tokenizer = data.draw(tokenizers(text))
    pieces = tokenizer.pieces
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=30))
    stops, taken, found = StopStrings(stop, tokenizer.decode), 0, None
    for seen in looks(len(pieces), sizes):
        if found := stops.push(seen):
            break
        taken += len(seen)
    expected = by_definition(pieces, stop)
    assert (found and (taken + found[0], found[1])) == expected


def test_incomplete_character_hides_no_stop_string_before_it() -> None:
    """Decoding all tokens together would hide it."""
    pieces = ByteFallback([b"a", *(bytes([byte]) for byte in "\u20ac\u00e9".encode())])
    stops = StopStrings(["\u20ac"], pieces.decode)
    assert stops.push(range(5)) == (4, "\u20ac")


def test_each_part_decodes_few_tokens_however_long_the_text() -> None:
    asked = []

    def decode(tokens: Sequence[int]) -> str:
        asked.append(len(tokens))
        return "\ufffd" * len(tokens) if tokens[-1] % 1000 < 500 else "x" * len(tokens)

    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.push([token]) for token in range(5000))
    assert max(asked) < 300
    assert len(text) > 4000  # invalid bytes are shown in the end
