"""From the tokens of one sample, as they come, to text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.inference.stops import Decode, IncrementalDecoder, first_complete


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
