"""Text to tokens and back: single characters for tiny models, Hugging Face tokenizers for real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_rl.model.config import TokenizerConfig
from megatron_rl.model.hub import local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """What agents and the model need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included, before the model pads its embedding."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` as it stands: no special token is added, so a prompt template writes its own."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; special tokens leave no trace."""
        ...

    def chat(self, message: str) -> str | None:
        """The prompt that puts `message` to an assistant as its user would; None without a chat template."""
        ...


class CharacterTokenizer:
    """One token per character of the alphabet, in its order, then end-of-text, then padding."""

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet
        self._ids = {character: index for index, character in enumerate(alphabet)}
        self._text = [*alphabet, "", ""]
        self.eos_id = len(alphabet)
        self.vocab_size = len(alphabet) + 2

    def encode(self, text: str) -> list[int]:
        """Raises ValueError at the first character that is not in the alphabet."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as unknown:
            raise ValueError(
                f"no token for the character {unknown} of {text!r}: "
                f"add it to tokenizer.alphabet, which is {self._alphabet!r}"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._text.__getitem__, tokens))

    def chat(self, message: str) -> None:
        return None


class HuggingFaceTokenizer:
    """A tokenizer of the `transformers` library."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no end-of-text token (eos_token)")
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def chat(self, message: str) -> str | None:
        if self._tokenizer.chat_template is None:
            return None
        messages = [{"role": "user", "content": message}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer a recipe names. Nothing is downloaded.

    Raises ValueError where `tokenizer.path` holds no usable tokenizer or `transformers` is not installed.
    """
    if config.type == "characters":
        return CharacterTokenizer(config.alphabet)
    assert config.path is not None  # Tokenizer._complete
    return _load_hugging_face(config.path)


def _load_hugging_face(path: str) -> HuggingFaceTokenizer:
    try:
        # Imported here because it takes seconds, and a character tokenizer must not need it installed.
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"tokenizer.type huggingface needs `pip install mrl[huggingface]`: {error}") from error
    folder = local_folder(path, "tokenizer.path", "tokenizer.json")
    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer.path {path}: not a Hugging Face tokenizer: {error}") from error
