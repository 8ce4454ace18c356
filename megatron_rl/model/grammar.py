"""Grammars into which answers are forced: whether one is usable, and the tokens that it allows at each place.

A grammar is a text in the dialect of Lark that the library llguidance reads. The engine draws a token among those that
the grammar allows. Training computes the same sets again from the grammar and the tokens, and so normalises log-probs
over them too. Both use this file, so they agree in every bit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.extras import needed

if TYPE_CHECKING:  # a login node, which checks recipes, has neither
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MOST_CHARACTERS = 100_000
"""Characters of a grammar. Larger ones are refused unread."""
MOST_COMPILED = 64
"""Compiled grammars that are kept. A program asks with the same ones again and again."""
_SPECIAL = b"\xff"
"""First byte of a token that no text of a grammar matches, in llguidance's convention."""


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why."""


class NoGrammars(RuntimeError):
    """The library is not installed."""


class Grammars:
    """Grammars over the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = lru_cache(maxsize=MOST_COMPILED)(self._compile)
        self._vocabulary: LLTokenizer | None = None  # built when it is first needed: it takes a second for 150k tokens

    def check(self, grammar: str) -> None:
        """Compile a grammar, within limits of time and memory. Raises GrammarError and NoGrammars."""
        self._compiled(grammar)

    def begin(self, grammar: str, tokens: Sequence[int] = ()) -> AnswerState:
        """Return the state of an answer behind these tokens. Raises as `check`."""
        state = AnswerState(self._compiled(grammar).deep_copy(), self._tokenizer)
        for token in tokens:
            state.take(token)
        return state

    def allowed(self, grammar: str, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """Return the tokens that were allowed where each token of an answer was drawn, [tokens, bytes], as
        `AnswerState.allowed`."""
        import numpy as np

        state = self.begin(grammar)
        found = np.empty((len(tokens), state.allowed.size), dtype=np.uint8)
        for row, token in zip(found, tokens, strict=True):
            row[:] = state.allowed
            state.take(token)
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > MOST_CHARACTERS:
            raise GrammarError(f"it has {len(grammar)} characters; at most {MOST_CHARACTERS} are read")
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_in_a_line(matcher.get_error()))
        if not AnswerState(matcher.deep_copy(), self._tokenizer).can_begin:
            raise GrammarError("no token of the model can begin such an answer")
        return matcher


class AnswerState:
    """Place in a grammar behind the tokens of one answer."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        import numpy as np

        self._matcher, self._end = matcher, tokenizer.eos_id
        words = -(-tokenizer.vocab_size // 32)
        self._bits = np.zeros(words, dtype=np.int32)
        self.can_begin = self._fill()

    @property
    def allowed(self) -> NDArray[np.uint8]:
        """Tokens that may follow, [bytes]: token t is bit t % 8 of byte t // 8. Never none: where the grammar has no
        way out that the vocabulary can spell, or one that takes too long to find, the answer ends."""
        return self._bits.view("uint8")

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._fill()

    def _fill(self) -> bool:
        """Compute what may follow. Return whether the grammar allows a token."""
        # Also writes a mask, of the end token alone, for a matcher that has ended or failed.
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        alive = bool(self._bits.any()) and not self._matcher.is_error()
        if not alive:
            self._bits[:] = 0
            self.allowed[self._end // 8] = 1 << self._end % 8
        return alive


class _Spelling:
    """A tokenizer as llguidance reads it. No text of a grammar matches a control token, so a grammar names it by its
    number."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [token for token in ids if tokenizer.is_special(token)]
        self.eos_token_id = tokenizer.eos_id
        special = {*self.special_token_ids}
        self.tokens = [(_SPECIAL if token in special else b"") + tokenizer.token_bytes(token) for token in ids]

    def __call__(self, text: bytes | str) -> list[int]:
        try:
            return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)
        except ValueError:  # a tokenizer of few characters
            return []


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise NoGrammars(f"forms of answers need {needed('train')}: {error}") from error
    return LLTokenizer(TokenizerWrapper(_Spelling(tokenizer)))


def _limits() -> Any:
    """Limits of work for one grammar. Those that act while an answer is drawn are the library's, as in vLLM: about
    20 ms of work for a token. Where they are reached, the answer ends."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=100_000, verbose_errors=False)


def _in_a_line(message: str) -> str:
    """Leave out the place, and the quoted grammar."""
    said = re.split(r"\n\s*\d* *\|", message)[0].removeprefix("failed to compile JSON schema: ")
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said).split())[:300]
