"""Recipe keys of the tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_rl.recipe.section import (
    Day,
    HubPath,
    Section,
)


class TokenizerConfig(Section):
    """Tokenizer of prompts and answers."""

    type: Literal["characters", "huggingface"] = "huggingface"
    """huggingface: a tokenizer of the transformers library. characters: one token per character of `alphabet`."""
    alphabet: str = ""
    """Characters that are tokens (`type: characters`); end-of-text and padding are added."""
    path: HubPath | None = None
    """Name on the hub, directory, or package:NAME as in `model.huggingface` (`type: huggingface`); default:
    model.huggingface."""
    end_tokens: list[str] = []
    """Names of further tokens that end an answer, such as <|im_end|> for a base model with a chat template (`type:
    huggingface`). Default: the end-of-text token of the tokenizer, and those in generation_config.json."""
    date: Day | None = None
    """Day, as YYYY-MM-DD, that chat templates use as today, for example in the system message of Llama 3. Default: the
    day of the first submission, so that prompts stay the same for the whole run."""
    renderer: str = "auto"
    """Code that continues conversations token for token and reads tool calls and reasoning from answers. auto: the
    renderer of the library `renderers` that reproduces the model's chat template, else template. template: the chat
    template itself. Any other value names a renderer of the library, such as qwen3 or llama-3."""

    @model_validator(mode="after")
    def _complete(self) -> TokenizerConfig:
        if self.type == "characters" and (not self.alphabet or len(set(self.alphabet)) != len(self.alphabet)):
            raise ValueError("type: characters needs alphabet, a string of distinct characters")
        if self.type == "characters" and self.end_tokens:
            raise ValueError("end_tokens: a tokenizer of characters has one end token")
        if self.type == "huggingface" and self.path is None:
            raise ValueError("type: huggingface needs path, the tokenizer's name on the hub or directory")
        return self
