"""Whole conversations to learn from: their tokens, and which of them the model would sample."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.messages import Conversation, ConversationError, Example
from megatron_rl.model.chat.proof import Proof

logger = logging.getLogger(__name__)


class ExampleWriter:
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
