"""Text to tokens and back: single characters for tiny models, Hugging Face tokenizers for real ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.files import check_regular, read_bytes
from megatron_rl.model.control_tokens import MARK, ControlTokens
from megatron_rl.model.template_limits import bound_templates
from megatron_rl.model.token_bytes import TokenBytes
from megatron_rl.recipe.extras import needed
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.tokenizer_section import TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

PROMPT_MARK = "\ufdd1"
"""First character of a text that is a prompt by itself. A noncharacter of Unicode, so no text should contain it."""


class Tokenizer(Protocol):
    def __hash__(self) -> int:
        """Hash by identity: results for one tokenizer are kept."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including special ones, before the model pads its embedding."""

    @property
    def eos_id(self) -> int:
        """Token that ends an answer in training examples."""

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end an answer, including `eos_id`: many chat models end a turn by another one."""

    def encode(self, text: str) -> list[int]:
        """Encode `text` without adding special tokens, since a prompt template writes its own. Control tokens marked by
        `conversation` are text, and a text marked by `as_prompt` gets the tokenizer's prefix."""

    def as_prompt(self, text: str) -> str:
        """Mark a text as a prompt without a chat template: `encode` then treats it as `encode_prompt` does."""

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt without a chat template, behind the tokenizer's prefix, such as BOS. A text that already
        starts with the prefix does not get a second one."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Decode tokens. Special tokens are dropped, or with `special` replaced by their names."""

    def show(self, token: int) -> str:
        """Text of one token, possibly special, in the middle of a text."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes of that text, possibly a part of a character."""

    def is_special(self, token: int) -> bool:
        """Whether decoding drops the token."""

    @property
    def chat_template(self) -> str | None:
        """Jinja2 template that turns a conversation into a prompt; None if the model has none."""

    @property
    def renderer(self) -> str:
        """Renderer of conversations that the recipe asks for: see `TokenizerConfig.renderer`."""

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        """Return the prompt for the next assistant message of a conversation; None without a chat template. Control
        tokens spelled out in a message are marked, so that `encode` treats them as text.

        messages, tools: as in OpenAI's API, except that the arguments of a tool call are an object.
        variables: further template variables, such as `enable_thinking`.
        add_generation_prompt: whether the text ends where the next answer begins, instead of after the last message.

        Raises ValueError if the template refuses them.
        """

    def mark(self, value: Any) -> Any:
        """Return messages, or a part of one, with the control tokens in their texts marked, as `conversation` does."""


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
    renderer = "auto"

    def conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> None:
        return None

    def mark(self, value: Any) -> Any:
        return value


class HuggingFaceTokenizer:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Iterable[int] = (),
        today: str | None = None,
        renderer: str = "auto",
    ) -> None:
        """Wrap a loaded tokenizer.

        Args:
            end_ids: tokens that end an answer, other than the tokenizer's own.
            today: YYYY-MM-DD, the current day for chat templates; None reads the clock.
            renderer: see `Tokenizer.renderer`.
        """
        bound_templates()
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no end-of-text token (eos_token)")
        self._tokenizer = tokenizer
        self.renderer = renderer
        self.folder: str = tokenizer.name_or_path
        self.vocab_size = len(tokenizer)
        self.eos_id: int = tokenizer.eos_token_id
        self.end_ids = frozenset({self.eos_id, *end_ids})
        self._control_tokens = ControlTokens(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        self._prefix = _prefix(tokenizer)
        self._today = None if today is None else datetime.fromisoformat(today)
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(token for token, name in added.items() if name.special)
        self.token_bytes = TokenBytes(tokenizer)

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer. Raises OSError."""
        self._tokenizer.save_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        if not text.isascii():
            text.encode()  # half a character is a UnicodeEncodeError, a ValueError; for tokenizers it is a TypeError
        if text.startswith(PROMPT_MARK):
            return self.encode_prompt(text.removeprefix(PROMPT_MARK))
        if MARK in text and self._control_tokens:
            return self._control_tokens.encode(text)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        tokens = self.encode(text)
        return tokens if tokens[: len(self._prefix)] == self._prefix else self._prefix + tokens

    def as_prompt(self, text: str) -> str:
        return PROMPT_MARK + text if self._prefix else text

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
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        if self.chat_template is None:
            return None
        render = self._tokenizer.apply_chat_template
        # Parameters of `render` are not variables: chat_template, for one, is a program.
        if variables and (taken := sorted(signature(render).parameters.keys() & variables.keys())):
            raise ValueError(f"{taken[0]} is not a variable of a chat template")
        given = [self.mark(each) for each in (messages, tools, dict(variables or {}))]
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            if self._today is not None and "strftime_now" in template:
                template = _clock_stopped(self._today) + template
            text: str = render(
                given[0],
                tools=given[1],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **given[2],
            )
        except Exception as error:  # a template is a program that comes with the model: it may raise anything
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return text

    def mark(self, value: Any) -> Any:
        return self._control_tokens.mark(value) if self._control_tokens else value


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    whole: list[int] = tokenizer.encode("a")
    text: list[int] = tokenizer.encode("a", add_special_tokens=False)
    starts = range(len(whole) - len(text) + 1)
    return next((whole[:start] for start in starts if whole[start : start + len(text)] == text), [])


@cache
def _clock_stopped(now: datetime) -> str:
    """Beginning of a chat template that makes `strftime_now` return `now`; `transformers` would read the clock.

    `transformers` passes no functions to a template, so this is a macro that replaces each directive by its text.
    """
    texts = {f"%{flag}{letter}": now.strftime(f"%{flag}{letter}") for flag in ("", "-") for letter in _DIRECTIVES}
    return (
        "{% macro strftime_now(format) %}{% set said = namespace(text=format) %}"
        f"{{% for directive, text in {json.dumps(texts)}.items() %}}"
        "{% set said.text = said.text | replace(directive, text) %}{% endfor %}{{ said.text }}{% endmacro %}\n"
    )


_DIRECTIVES = "aAbBcdDeFgGhHIjmMpRSTuUVwWxXyY"
"""Directives of strftime about the day or the time, without the time zone."""


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer of a recipe. Downloads nothing.

    Raises ValueError if `tokenizer.path` holds no usable tokenizer, or `transformers` is not installed.
    """
    if config.type == "characters":
        return CharacterTokenizer(config.alphabet)
    path = config.path
    assert path is not None  # TokenizerConfig._complete
    folder = local_folder(path, "tokenizer.path", "tokenizer.json")
    try:
        tokenizer = load_pretrained_tokenizer(folder)
    except ImportError as error:
        raise ValueError(f"tokenizer.type huggingface needs {needed('huggingface')}: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer.path {path}: not a Hugging Face tokenizer: {error}") from error
    with _value_errors(f"tokenizer.path {path}: the tokenizer cannot be used"):
        _check_blanks(tokenizer, path)
        known = tokenizer.get_vocab()
        for name in config.end_tokens:
            if name not in known:
                raise ValueError(f"tokenizer.end_tokens: the tokenizer has no token {name!r}")
        end_ids = [*_end_ids(folder, len(tokenizer)), *(known[name] for name in config.end_tokens)]
        return HuggingFaceTokenizer(tokenizer, end_ids, config.date, config.renderer)


@contextmanager
def _value_errors(what: str) -> Iterator[None]:
    """Turn errors of the libraries about a tokenizer's files, of many kinds, into ValueErrors. what: failed."""
    try:
        yield
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _check_blanks(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a tokenizer that loses the blanks between words, as every reward would then score another text.

    transformers 5.0 to 5.10 decode a byte-level tokenizer that way if it is labelled LlamaTokenizerFast (seen).
    """
    text = "How are you"
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if decoded == text.replace(" ", ""):
        import transformers

        raise ValueError(
            f"tokenizer.path {path}: transformers {transformers.__version__} decodes the tokens of {text!r} to "
            f"{decoded!r}: it loads another class than the tokenizer was made for. Install another release, such as "
            "transformers 5.23, or correct tokenizer_class in tokenizer_config.json"
        )


def _end_ids(folder: Path, vocab_size: int) -> list[int]:
    """End tokens in `generation_config.json`; none if the file is missing or names none."""
    file = folder / "generation_config.json"
    if not file.exists():
        return []
    try:
        found = bounded_json(read_bytes(file)).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not a generation config: {error}") from error
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for each in ids:
        if type(each) is not int or not 0 <= each < vocab_size:
            raise ValueError(f"{file}: eos_token_id {each!r} is none of the tokenizer's {vocab_size} tokens")
    return ids


def load_pretrained_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a Hugging Face directory.

    Raises:
        ImportError: `transformers` is not installed.
        OSError, ValueError: the directory has no usable tokenizer, or a pipe or device among its files, which would
            block.
    """
    # Imported here because it takes seconds, and character tokenizers do not need it.
    from transformers import AutoTokenizer

    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if path.exists() and not path.is_dir():
            check_regular(path)
    with _value_errors("its files are damaged"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,  # the default asks at a terminal
        )
    return tokenizer
