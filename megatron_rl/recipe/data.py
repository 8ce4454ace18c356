"""Recipe keys of the data of supervised training."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megatron_rl.recipe.chat_section import ChatConfig
from megatron_rl.recipe.section import HubPath, PositiveInt


class DataConfig(ChatConfig):
    """Rows that `training.objective: supervised` trains on: conversations, or prompts with answers. Only tokens that
    the model would write itself carry loss: those of the assistant's messages, or of the answers, each with its
    end."""

    path: HubPath | None = None
    """Name on the hub, or a local file or directory, relative to the recipe's file: JSON lines, Parquet, CSV, Arrow, or
    the output of `save_to_disk` of `datasets`. Default: the worked examples of the environment, or else its training
    problems with a right response to each."""
    split: str = "train"
    """Split to read."""
    subset: str | None = None
    """Configuration to read, if the data set has several."""
    messages: str | None = None
    """Column of the conversations, each a list of messages; a.0.b is the field b of the first element of the list in
    column a. Default: the columns are recognised by their names, such as messages, conversations, or prompt and
    completion."""
    tools: str | None = None
    """Column of the tools that a conversation offers, as in OpenAI's API; default: `tools` or `functions`, if there is
    one."""
    prompt: str | None = None
    """Column of the prompt, a text or a list of messages, in place of `messages` and together with `answer`."""
    answer: str | None = None
    """Column of the answer to the prompt, a text or a list of messages."""
    chat: Literal["always", "auto", "never"] = "auto"
    """Prompts and answers as messages in the tokenizer's chat template. always: do so. auto: do so if the tokenizer has
    a template. never: the plain texts follow each other. Lists of messages need the template."""
    system: str | None = None
    """System message of the rows that have none, in their messages or in a column `system`; default: the chat
    template's own."""
    examples_per_step: PositiveInt = 32
    """Rows per step, which is one update. The loss is the mean over all their tokens that carry loss. A pass over N
    rows takes N / examples_per_step steps."""

    @model_validator(mode="after")
    def _columns_fit(self) -> DataConfig:
        if (self.prompt is None) != (self.answer is None):
            raise ValueError("prompt and answer belong together: give both columns, or neither for conversations")
        if self.prompt is not None and self.messages is not None:
            raise ValueError("messages and prompt are both given: keep the columns of one form")
        if self.chat == "never" and (self.system is not None or self.chat_template):
            name = "system" if self.system is not None else "chat_template"
            raise ValueError(f"{name}: with chat: never the chat template is not used")
        return self
