"""Messages to tokens, and tokens to messages: the only place where either happens.

    chat = Chat(tokenizer, {"enable_thinking": False})
    prompt = chat.prompt(conversation_of(messages, tools))
    answer = ...                                            # sampled by the model
    parsed = chat.parse(answer, prompt, tools)
    prompt = chat.extend(prompt, answer, conversation_of([{"role": "tool", "content": "4"}], tools))

The model's chat template writes the first prompt. Later ones begin with the tokens that the model saw and sampled; only
what the template writes behind them is encoded. The library `renderers` does that for the model families that it knows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from megatron_rl.model.chat.messages import Conversation, ConversationError, Example, ParsedAnswer
from megatron_rl.model.chat.proof import Proof, Rendering
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.extras import needed

if TYPE_CHECKING:  # imports of the library take time, which conversations of one turn do not need
    from megatron_rl.model.chat.answer_stream import AnswerStream
    from megatron_rl.model.chat.formats import ConversationFormat, Extension

logger = logging.getLogger(__name__)

TEMPLATE = "the chat template"
VARIANTS = 32


class Chat:
    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        """variables: of the chat template; default: the template's own."""
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._variant = lru_cache(maxsize=VARIANTS)(self._with_variables)

    def check(self, *, continues: bool = False) -> Chat:
        """Choose the renderer now, which takes a while, instead of when it is needed first, and return the chat.

        continues: whether conversations go on behind answers; then warn if the template would change earlier turns.

        Raises ConfigurationError if the recipe names a renderer that does not fit the tokenizer.
        """
        try:
            why_not = self.format.why_not if self.has_template else None
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if why_not and continues:
            logger.warning(
                "conversations cannot be continued token for token as the model knows them: %s; tokenizer.renderer can "
                "name a renderer that fits the model",
                why_not,
            )
        return self

    def with_variables(self, variables: Mapping[str, Any]) -> Chat:
        """Return the same with further template variables. The last ones that were asked for are kept ready."""
        return self._variant(json.dumps(variables, sort_keys=True)) if variables else self

    def _with_variables(self, text: str) -> Chat:
        return Chat(self.tokenizer, {**self._variables, **json.loads(text)})

    @property
    def variables(self) -> Mapping[str, Any]:
        return self._variables

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def renderer(self) -> str:
        """Name of the library's renderer, or "template" for the chat template itself, or "" without one."""
        return self.format.name if self.has_template else ""

    @property
    def why_not(self) -> str | None:
        """Reason why no next turn can be appended token for token; None if it can."""
        return self.format.why_not if self.has_template else "the model has no chat template"

    @property
    def has_tools(self) -> bool:
        return self.has_template and self.format.calls is not None

    @cached_property
    def format(self) -> ConversationFormat:
        """How the model writes conversations. Raises ValueError if the recipe names a renderer that does not fit."""
        try:
            from megatron_rl.model.chat.resolve import format_of
        except ImportError as error:
            raise ValueError(f"conversations need {needed('train')}: {error}") from error
        return format_of(self.tokenizer, self._variables)

    def text(self, conversation: Conversation) -> str:
        """Return the prompt for the next answer as text; the tokenizer's `encode` gives its tokens. Control tokens
        spelled out in a message are marked, and stay text.

        Raises ValueError if the model has no chat template, or if the template refuses the conversation;
        ConversationError if it does not write a part of it.
        """
        text = self._text(conversation)
        self._proof.check(conversation, Rendering(text), lambda sample: Rendering(self._text(sample)))
        return text

    def _text(self, conversation: Conversation) -> str:
        text = self.tokenizer.conversation(conversation.messages, conversation.tools or None, self._variables)
        if text is None:
            raise ValueError("the model has no chat template")
        return text

    @cached_property
    def _proof(self) -> Proof:
        return _proof_of(self.tokenizer, str(self.tokenizer.chat_template), str(sorted(self._variables.items())))

    def prompt(self, conversation: Conversation) -> list[int]:
        return self.tokenizer.encode(self.text(conversation))

    @cached_property
    def _proof_of_extensions(self) -> Proof:
        return Proof(self.writer)

    @property
    def writer(self) -> str:
        return TEMPLATE if self.renderer == "template" else f"the renderer {self.renderer}"

    def extend(
        self,
        prompt: list[int],
        answer: list[int],
        new: Conversation,
        *,
        keep_reasoning: bool = False,
    ) -> list[int] | None:
        """Return the next prompt: `prompt`, `answer`, and what the template writes up to the next answer. None if the
        template would change what stands before, for example drop earlier reasoning at a new question.

        new: the messages behind the answer. A tool's result needs the `name` of its tool where the template writes it.
        keep_reasoning: whether earlier turns and their reasoning stay in any case, so that a conversation is one
            sequence.

        Raises ValueError if the template refuses the messages.
        """
        if not self.has_template or not prompt or not new.messages:
            return None
        found = self._extension(prompt, answer, new, keep_reasoning)
        if found is None:
            return None

        def rendered(sample: Conversation) -> Rendering:
            extension = self._extension(prompt, answer, sample, keep_reasoning)
            if extension is None:
                raise ValueError("nothing can be appended")
            return Rendering(extension.text)

        self._proof_of_extensions.check(replace(new, tools=()), Rendering(found.text), rendered)
        return found.tokens

    def _extension(
        self, prompt: list[int], answer: list[int], new: Conversation, keep_reasoning: bool
    ) -> Extension | None:
        return self.format.extend(prompt, answer, [*new.messages], new.tools, keep_reasoning=keep_reasoning)

    def parse(
        self, answer: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ParsedAnswer:
        """Divide an answer into reasoning, content and calls. Without tools, and without a chat template, calls are
        content. Calls within reasoning are none."""
        if not self.has_template:
            return ParsedAnswer(self.tokenizer.decode(answer))
        from megatron_rl.model.chat.answer_parser import AnswerParser

        return AnswerParser(self.format, self.tokenizer, [*prompt], tools).read(answer)

    def stream(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()) -> AnswerStream:
        """Return a reader of an answer that grows: its pieces together are what `parse` returns."""
        from megatron_rl.model.chat.answer_stream import AnswerStream

        form = self.format if self.has_template else None
        return AnswerStream(form, self.tokenizer, [*prompt], tools)


@lru_cache(maxsize=VARIANTS)
def _proof_of(tokenizer: Tokenizer, template: str, variables: str) -> Proof:
    """Return the proof of prompts by a template, which prompts of many `Chat`s share."""
    return Proof(TEMPLATE)


class ExampleWriter:
    """Whole conversations to learn from: their tokens, and which of them the model would sample."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._warned = False

    def example(self, conversation: Conversation) -> Example:
        """Return a whole conversation as tokens, with a mask of those that the model would sample: the learned
        messages, each with its end.

        Where the template writes earlier answers in other words than the model gives them, or without their thoughts,
        the last answer alone is learned; a warning says so once.

        Raises ValueError if the model has no chat template, or if the template refuses the conversation;
        ConversationError if it does not write a part of it, or if a learned message is empty.
        """
        if not self._chat.has_template:
            raise ValueError("the model has no chat template")
        learned = [index for index, is_learned in enumerate(conversation.learned) if is_learned]
        _check_learned(conversation, learned)
        try:
            return self._proven_example(conversation)
        except ConversationError as error:
            lost = next((n for n in learned if f"{error.field}.".startswith(f"{conversation.places[n]}.")), learned[-1])
            if lost == learned[-1] == len(conversation.messages) - 1 and len(learned) == 1:
                raise
            try:
                self._proven_example(_last_alone(conversation, lost))  # it could be learned if it were the last one
                found = self._proven_example(_last_alone(conversation, learned[-1]))
            except ConversationError:
                raise error from None
            self._warn_of_last_answer(error)
            return found

    def _warn_of_last_answer(self, error: ConversationError) -> None:
        if not self._warned:
            logger.warning(
                "of a conversation with several answers only the last one is learned if an earlier one cannot be (%s). "
                "To learn all of them, divide the row so that each answer is the last one of a row, or name a renderer "
                "that fits the model (tokenizer.renderer)",
                error,
            )
        self._warned = True

    def _proven_example(self, conversation: Conversation) -> Example:
        found, rendering = self._chat.format.example(conversation)
        self._proof.check(conversation, rendering, lambda sample: self._chat.format.example(sample)[1])
        return found

    @cached_property
    def _proof(self) -> Proof:
        return Proof(self._chat.writer)


def _check_learned(conversation: Conversation, learned: Sequence[int]) -> None:
    """Raise ConversationError if nothing is learned, or an answer without a word."""
    if not learned:
        place = conversation.places[0].rpartition(".")[0] if conversation.places else "messages"
        raise ConversationError(place, "no token to learn: no message is the assistant's, or all have weight 0")
    for index in learned:
        message = conversation.messages[index]
        if not (message["content"].strip() or message.keys() & {"reasoning_content", "tool_calls"}):
            raise ConversationError(
                f"{conversation.places[index]}.content", "is empty, so that an end alone is learned; give it weight 0"
            )


def _last_alone(conversation: Conversation, index: int) -> Conversation:
    return replace(conversation[: index + 1], learned=(False,) * index + (True,))
