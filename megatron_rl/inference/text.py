"""Stop strings: which token of an answer completes one. They are looked for in the text, so they may begin and end
within tokens, and a character may be several tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens leaving no trace. Bytes that are no character are U+FFFD."""

_WINDOW = 32
"""Tokens from which on those before a whole character are no longer decoded again."""

_PATIENCE = 256
"""Tokens after which bytes that are no character are taken for what they are."""


class IncrementalDecoder:
    """Text of a growing list of tokens, in parts that are never taken back. Each costs decoding a few tokens, however
    many there have been."""

    def __init__(self, decode: Decode, after: Sequence[int] = ()) -> None:
        """after: tokens that come before the first one."""
        self._decode = decode
        self._window = [*after][-_WINDOW // 4 :]
        # Characters of the window's text that have been handed out
        self._given = len(decode(self._window).rstrip("\ufffd")) if after else 0
        self._whole = 0  # tokens of the window after which no character was unfinished

    @property
    def holds_back(self) -> bool:
        """Whether the newest tokens may be part of a character that is not finished."""
        return self._whole < len(self._window)

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text. Characters that may not be finished are held back."""
        if not tokens:
            return ""  # nor are those before them context that is no longer needed
        self._window = [*self._window, *tokens]
        text = self._decode(self._window)
        finished = len(text)
        if len(self._window) < _PATIENCE:
            # Where one byte of it is missing, some decoders make U+FFFD of all bytes that came without a pause.
            finished = max(self._given, len(text.rstrip("\ufffd")))
        new = text[self._given : finished]
        self._given = max(self._given, finished)
        if finished >= len(text):
            if len(self._window) >= _WINDOW:
                # What stays is the context by which some decoders put spaces between words.
                self._window = self._window[self._whole :]
                self._given = len(self._decode(self._window))
            self._whole = len(self._window)
        return new

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        rest = self._decode(self._window)[self._given :]
        self._given += len(rest)
        return rest

    def copy(self) -> IncrementalDecoder:
        """Another one that goes on from here."""
        made = IncrementalDecoder(self._decode)
        made._window, made._given, made._whole = self._window, self._given, self._whole
        return made


def first_complete(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where in the text the stop string begins that is complete first, and which it is; of those that end together the
    longest. So it does not matter in how many pieces the text comes."""
    found = [(place + len(string), place, string) for string in stop if (place := text.find(string)) >= 0]
    return min(found)[1:] if found else None


class StopStrings:
    """Looks for the first token that completes a stop string in one answer."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = stop
        self._decoder = IncrementalDecoder(decode)
        self._reach = max(map(len, stop)) - 1
        self._tail = ""  # the end of the text, in which a stop string may have begun

    def push(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """How many of these next tokens belong to the answer, and the stop string that the last of them completes; None
        where they complete none. Nothing follows a stop string.
        """
        decoder, tail = self._decoder.copy(), self._tail
        found = self._look(tokens)
        # A character that is not finished may hide what stands whole before it.
        if found is None and not self._decoder.holds_back:
            return None
        self._decoder, self._tail = decoder, tail
        for count, token in enumerate(tokens, 1):
            if completed := self._look([token]):
                return count, completed
        return (len(tokens), found) if found else None

    def _look(self, tokens: Sequence[int]) -> str | None:
        text = self._tail + self._decoder.push(tokens)
        self._tail = text[-self._reach :] if self._reach else ""
        found = first_complete(text, self._stop)
        return found[1] if found else None


class TextStream:
    """Turns a growing list of tokens into text, piece by piece. Joined the pieces are the text of the sample, by
    default without the stop string that ended it.

    Held back are the bytes of a character that is not whole yet and what may be the beginning of a stop string.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), *, keep_stop: bool = False, after: Sequence[int] = ()
    ) -> None:
        """
        keep_stop: whether the text has the stop string that ended it.
        after: tokens that the sample continues; some tokenizers give the first token of a text no space.
        """
        self._decoder = IncrementalDecoder(decode, after)
        self._stop, self._keep_stop = stop, keep_stop
        self._held = ""  # perhaps the beginning of a stop string
        self.stopped: str | None = None
        """The stop string that was found; nothing is text that comes after it."""

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens of the sample. Returns the text that has become certain."""
        return "" if self.stopped is not None else self._release(self._decoder.push(tokens))

    def finish(self) -> str:
        """The rest of the text, when the sample has ended."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.finish())
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        """What of the held text and the new cannot be the beginning of a stop string."""
        text = self._held + new
        if found := first_complete(text, self._stop):
            place, self.stopped = found
            self._held = ""
            return text[: place + len(self.stopped)] if self._keep_stop else text[:place]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, marker: str) -> int:
    """Length of the longest beginning of `marker`, but not all of it, with which the text ends."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
