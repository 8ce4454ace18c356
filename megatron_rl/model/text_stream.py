"""Text of growing token lists: decoding in parts, and stop strings.

Stop strings are found in the text, so they may start and end within tokens; a character may span several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, without special tokens. Bytes that form no character become U+FFFD."""

_WINDOW = 32
"""Tokens of the window from which on tokens before the last complete character leave it."""

_INCOMPLETE = 256
"""Tokens after which bytes that form no character are no longer expected to be completed."""


class IncrementalDecoder:
    """Text of a growing list of tokens, in parts that are never taken back. A part costs decoding a small window of
    tokens, independent of the length of the list."""

    def __init__(self, decode: Decode, after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = [*after][-_WINDOW // 4 :]
        self._given = len(decode(self._window).rstrip("\ufffd")) if after else 0  # characters that were handed out
        self._whole = 0  # tokens of the window after which no character was incomplete

    @property
    def holds_back(self) -> bool:
        """Whether the newest tokens may be part of an incomplete character."""
        return self._whole < len(self._window)

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add. Characters that may be incomplete are held back."""
        if not tokens:
            return ""  # otherwise the window could lose context that is still needed
        self._window = [*self._window, *tokens]
        text = self._decode(self._window)
        finished = len(text)
        if len(self._window) < _INCOMPLETE:
            # If one byte is missing, some decoders turn all adjacent bytes into U+FFFD.
            finished = max(self._given, len(text.rstrip("\ufffd")))
        new = text[self._given : finished]
        self._given = max(self._given, finished)
        if finished >= len(text):
            if len(self._window) >= _WINDOW:
                # The rest of the window is context: some decoders put spaces between words.
                self._window = self._window[self._whole :]
                self._given = len(self._decode(self._window))
            self._whole = len(self._window)
        return new

    def finish(self) -> str:
        rest = self._decode(self._window)[self._given :]
        self._given += len(rest)
        return rest

    def copy(self) -> IncrementalDecoder:
        copy = IncrementalDecoder(self._decode)
        copy._window, copy._given, copy._whole = self._window, self._given, self._whole
        return copy


def first_complete(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return the start of the stop string that is complete first, and that string; of strings that end together, the
    longest. So the result does not depend on how the text is split. Example: "xab" with stops b and ab -> (1, "ab")."""
    found = [(start + len(string), start, string) for string in stop if (start := text.find(string)) >= 0]
    return min(found)[1:] if found else None


class StopStrings:
    """Finds the first token of one answer that completes a stop string."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = stop
        self._decoder = IncrementalDecoder(decode)
        self._reach = max(map(len, stop)) - 1
        self._tail = ""  # the end of the text, in which a stop string may have started

    def push(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Return how many of these tokens belong to the answer, and the stop string that the last of them completes;
        None if they complete none. Tokens after a stop string are not part of the answer."""
        # Tokens come in batches, and only the first token that completes a stop string counts. One look at the text of
        # the batch is the usual case. It is repeated token by token where a stop string was found, and where the batch
        # ends within a character: some decoders then turn the complete bytes before it into U+FFFD too, so that a stop
        # string there is seen only if the batch is cut before the broken character.
        decoder, tail = self._decoder.copy(), self._tail
        found = self._search(tokens)
        if found is None and not self._decoder.holds_back:
            return None
        self._decoder, self._tail = decoder, tail
        for count, token in enumerate(tokens, 1):
            if completed := self._search([token]):
                return count, completed
        return (len(tokens), found) if found else None

    def _search(self, tokens: Sequence[int]) -> str | None:
        text = self._tail + self._decoder.push(tokens)
        self._tail = text[-self._reach :] if self._reach else ""
        found = first_complete(text, self._stop)
        return found[1] if found else None


class StopFilter:
    """Ends a text that comes in pieces at the first stop string. Text that may be the start of one is held back."""

    def __init__(self, stop: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self._stop, self._keep_stop = stop, keep_stop
        self._held = ""  # may be the start of a stop string
        self.stopped: str | None = None

    def push(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        if found := first_complete(text, self._stop):
            start, self.stopped = found
            self._held = ""
            return text[: start + len(self.stopped)] if self._keep_stop else text[:start]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class TextStream:
    """Turns a growing list of tokens into text, piece by piece. The joined pieces are the sample's text, by default
    without the stop string that ended it.

    Bytes of an incomplete character are held back, and so is text that may be the start of a stop string.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), *, keep_stop: bool = False, after: Sequence[int] = ()
    ) -> None:
        """
        keep_stop: whether the text includes the stop string that ended it.
        after: tokens before the sample; without them some tokenizers drop the space before its first word.
        """
        self._decoder = IncrementalDecoder(decode, after)
        self._filter = StopFilter(stop, keep_stop=keep_stop)

    @property
    def stopped(self) -> str | None:
        return self._filter.stopped

    def push(self, tokens: Sequence[int]) -> str:
        return "" if self.stopped is not None else self._filter.push(self._decoder.push(tokens))

    def finish(self) -> str:
        if self.stopped is not None:
            return ""
        return self._filter.push(self._decoder.finish()) + self._filter.finish()


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of `marker` with which the text ends."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
