"""Text to tokens and back: single characters for tiny models, Hugging Face tokenizers for real ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.contract.files import check_regular, read_bytes
from megatron_rl.extras import install_command
from megatron_rl.model.config import TokenizerConfig
from megatron_rl.model.control_tokens import MARK, ControlTokens
from megatron_rl.model.hub import local_folder
from megatron_rl.model.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

BEGINNING = "\ufdd1"
"""First character of a text that is a prompt by itself. A noncharacter of Unicode, which no text is meant to hold."""


class Tokenizer(Protocol):
    """What agents and the model need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included, before the model pads its embedding."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends an answer in what a model is taught."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end an answer, `eos_id` among them: many chat models end a turn by one of their own."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` as it stands: no special token is added, so a prompt template writes its own. Control tokens
        that `conversation` has marked are text, and a text that `as_prompt` has marked begins like any text."""
        ...

    def as_prompt(self, text: str) -> str:
        """The prompt that `text` is by itself, without a chat template: `encode` treats it as `encode_prompt` does."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt that no chat template wrote: those of `text` behind the ones, such as BOS, with which the
        tokenizer begins any text. A text that already begins with them gets no second ones."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`; special tokens leave no trace, or with `special` their names."""
        ...

    def show(self, token: int) -> str:
        """One token as it reads in the middle of a text, also a special one."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of that, which may be a part of a character."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether the token leaves no trace in a text."""
        ...

    @property
    def chat_template(self) -> str | None:
        """What makes a prompt of a conversation (Jinja2); None: the model knows no conversations."""
        ...

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """The prompt for what an assistant says next in a conversation; None without a chat template. Control tokens
        that a message spells out are marked, and `encode` takes them for text.

        messages, tools: as OpenAI's API has them, but the arguments of a tool call as an object.
        variables: further ones of the template, such as `enable_thinking`.

        Raises ValueError where the template refuses them.
        """
        ...


class CharacterTokenizer:
    """One token per character of the alphabet, in its order, then end-of-text, then padding."""

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet
        self._ids = {character: index for index, character in enumerate(alphabet)}
        self._text = [*alphabet, "", ""]
        self.eos_id = len(alphabet)
        self.end_ids = frozenset({self.eos_id})
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

    encode_prompt = encode

    def as_prompt(self, text: str) -> str:
        return text

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(map(self.show if special else self._text.__getitem__, tokens))

    def show(self, token: int) -> str:
        return self._text[token] or ("<end>" if token == self.eos_id else "<padding>")

    def token_bytes(self, token: int) -> bytes:
        return self.show(token).encode()

    def is_special(self, token: int) -> bool:
        return token >= self.eos_id

    chat_template = None

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        return None


class HuggingFaceTokenizer:
    """A tokenizer of the `transformers` library."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int] = (), today: str | None = None
    ) -> None:
        """Wrap a tokenizer that has been read.

        Args:
            end_ids: tokens that end an answer beside the tokenizer's own.
            today: YYYY-MM-DD that a chat template takes for today; None: the clock's.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no end-of-text token (eos_token)")
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.eos_id: int = tokenizer.eos_token_id
        self.end_ids = frozenset({self.eos_id, *end_ids})
        self._control_tokens = ControlTokens(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        self._beginning = _beginning(tokenizer)
        self._today = None if today is None else datetime.fromisoformat(today)
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(token for token, name in added.items() if name.special)
        self.token_bytes = TokenBytes(tokenizer)

    def encode(self, text: str) -> list[int]:
        if text.startswith(BEGINNING):
            return self.encode_prompt(text.removeprefix(BEGINNING))
        if MARK in text and self._control_tokens:
            return self._control_tokens.encode(text)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        tokens = self.encode(text)
        return tokens if tokens[: len(self._beginning)] == self._beginning else self._beginning + tokens

    def as_prompt(self, text: str) -> str:
        return BEGINNING + text if self._beginning else text

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def show(self, token: int) -> str:
        found = self.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def is_special(self, token: int) -> bool:
        return token in self._special

    @property
    def chat_template(self) -> str | None:
        template: str | None = self._tokenizer.chat_template
        return template

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        if self.chat_template is None:
            return None
        render = self._tokenizer.apply_chat_template
        # Its own parameters are no variables: chat_template, for one, is a program.
        if taken := sorted(signature(render).parameters.keys() & (variables or {}).keys()):
            raise ValueError(f"{taken[0]} is no variable of a chat template")
        given: list[Any] = [messages, tools, dict(variables or {})]
        if self._control_tokens:
            given = [self._control_tokens.mark(each) for each in given]
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if self._today is not None and "strftime_now" in template:
                template = _clock_stopped(self._today) + template
            text: str = render(
                given[0],
                tools=given[1],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **given[2],
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            raise ValueError(f"the model's chat template refuses them: {error}") from error
        return text


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens with which a tokenizer begins any text."""
    whole: list[int] = tokenizer.encode("a")
    text: list[int] = tokenizer.encode("a", add_special_tokens=False)
    places = range(len(whole) - len(text) + 1)
    return next((whole[:place] for place in places if whole[place : place + len(text)] == text), [])


@cache
def _clock_stopped(now: datetime) -> str:
    """A beginning of a chat template in which `strftime_now`, which `transformers` has ask the clock, says `now`.

    `transformers` lets no function into a template, so this is a macro that replaces each directive by its text.
    """
    texts = {f"%{flag}{letter}": now.strftime(f"%{flag}{letter}") for flag in ("", "-") for letter in _DIRECTIVES}
    return (
        "{% macro strftime_now(format) %}{% set said = namespace(text=format) %}"
        f"{{% for directive, text in {json.dumps(texts)}.items() %}}"
        "{% set said.text = said.text | replace(directive, text) %}{% endfor %}{{ said.text }}{% endmacro %}\n"
    )


_DIRECTIVES = "aAbBcdDeFgGhHIjmMpRSTuUVwWxXyY"
"""Letters of strftime's format that say something of a day or a time of it, all but the zone."""


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer a recipe names. Nothing is downloaded.

    Raises ValueError where `tokenizer.path` holds no usable tokenizer or `transformers` is not installed.
    """
    if config.type == "characters":
        return CharacterTokenizer(config.alphabet)
    assert config.path is not None  # Tokenizer._complete
    return _load_hugging_face(config.path, config.date)


def _load_hugging_face(path: str, today: str | None) -> HuggingFaceTokenizer:
    folder = local_folder(path, "tokenizer.path", "tokenizer.json")
    try:
        tokenizer = load_pretrained_tokenizer(folder)
    except ImportError as error:
        raise ValueError(f"tokenizer.type huggingface needs `{install_command('huggingface')}`: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer.path {path}: not a Hugging Face tokenizer: {error}") from error
    _check_blanks(tokenizer, path)
    return HuggingFaceTokenizer(tokenizer, _end_ids(folder, len(tokenizer)), today)


def _check_blanks(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer whose answers would lose the blanks between words, as every reward would be of another text.

    transformers 5.0 to 5.10 decode a byte-level tokenizer so that is labelled LlamaTokenizerFast (seen).
    """
    text = "How are you"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if decoded == text.replace(" ", ""):
        import transformers

        raise ValueError(
            f"tokenizer.path {path}: transformers {transformers.__version__} decodes the tokens of {text!r} to "
            f"{decoded!r}: it reads this tokenizer by another class than the one that it was made for. Install another "
            "release, such as transformers 5.23, or correct tokenizer_class in tokenizer_config.json"
        )


def _end_ids(folder: Path, vocab_size: int) -> list[int]:
    """The end tokens of `generation_config.json`; none where there is no such file, or it names none."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        found = json.loads(read_bytes(file)).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not a generation config: {error}") from error
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for each in ids:
        if type(each) is not int or not 0 <= each < vocab_size:
            raise ValueError(f"{file}: eos_token_id {each!r} is none of the tokenizer's {vocab_size} tokens")
    return ids


def load_pretrained_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory of Hugging Face's.

    Raises:
        ImportError: `transformers` is not installed.
        OSError, ValueError: there is none that can be used, or a pipe or a device among its files, which would be
            waited for.
    """
    # Imported here because it takes seconds, and a character tokenizer must not need it installed.
    from transformers import AutoTokenizer

    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if path.exists() and not path.is_dir():
            check_regular(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds, by what is wrong with its files
        raise ValueError(error) from error
    return tokenizer
