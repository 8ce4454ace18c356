"""One rollout of a program: its calls, within limits, and the trajectory that they make."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence, Set
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from megatron_rl.agent.endpoint.branches import AnswerNode, AnswerTree
from megatron_rl.agent.endpoint.conversations import KnownConversation
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.reward_value import in_order
from megatron_rl.agent.scoring import CheckedReward, Overtaken, unless
from megatron_rl.agent.server.request_parsing import ParsedRequest
from megatron_rl.agent.server.samples import AnswerPart
from megatron_rl.agent.server.service import error_for_client, parts_of
from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.generate.engine.interface import (
    Completion,
    GenerationRequest,
    InferenceInterface,
    PromptTooLong,
    Unsupported,
)
from megatron_rl.generate.serving.api_errors import ApiError, invalid
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.messages import Message
from megatron_rl.model.text_stream import TextStream
from megatron_rl.recipe.chat_section import EndpointConfig
from megatron_rl.recipe.inference import Sampling

MODEL = "policy"
UNLIMITED = 2**31
"""Tokens, where only the engine's own limit counts."""

T = TypeVar("T")


class RolloutSession:
    """One rollout. Its methods run in the endpoint's loop."""

    model = MODEL

    def __init__(
        self,
        chat: Chat,
        config: EndpointConfig,
        address: str,
        inference: InferenceInterface,
        sampling: Sampling,
        key: int,
        ordinal: int | None,
    ) -> None:
        """
        address: URL of the endpoint.
        key: 64-bit key of the rollout's random numbers.
        ordinal: see `GenerationRequest.ordinal`.
        """
        self.api_key = secrets.token_urlsafe(32)
        self.base_url = f"{address}/sessions/{self.api_key}/v1"
        self.calls = 0
        self.failure: str | None = None
        """The first limit that was exceeded, as a reason for the record."""
        self.broken: Exception | None = None
        """Error of the engine, which is not the program's."""
        self.stopped = asyncio.Event()
        """Set with `failure` or `broken`: the rollout need not go on."""
        self._chat, self._tokenizer = chat, chat.tokenizer
        self._config, self._inference, self._sampling = config, inference, sampling
        self._key, self._ordinal = key, ordinal
        self._branches = AnswerTree()
        self._conversations: list[tuple[KnownConversation, AnswerNode]] = []
        self._texts: list[tuple[str, AnswerNode]] = []
        self._responses: dict[str, Sequence[Message]] = {}
        self._asked: Counter[bytes] = Counter()  # how often each prompt was asked
        self._numbered = 0  # answers that the model was asked for
        self._coming = 0  # branches that unfinished calls will add
        self._extended: Counter[AnswerNode] = Counter()  # by unfinished calls
        self._tool_calls: int | None = None
        self._cut_off = False
        self._over = asyncio.Event()

    # Prompts

    def prompt_of(self, conversation: KnownConversation) -> tuple[list[int], KnownConversation]:
        """Return the prompt of a conversation, and the conversation as it is known. A conversation that continues a
        known one continues its tokens. Raises ValueError for messages that the chat template refuses."""
        chat = self._chat.with_variables(conversation.variables)
        known, turn = max(
            ((known, turn) for known, turn in self._conversations if conversation.continues(known)),
            key=lambda each: (len(each[0]), not each[1].children),
            default=(None, None),
        )
        if known is not None and turn is not None:
            conversation = conversation.after(known)
            new = conversation.said[len(known) :]
            prompt = chat.extend(turn.prompt, turn.completion.tokens, new, keep_reasoning=True)
            if prompt is not None:
                return prompt, conversation
        return chat.prompt(conversation.said), conversation

    def prompt_of_text(self, text: str) -> list[int] | None:
        known, turn = max(
            ((known, turn) for known, turn in self._texts if text.startswith(known)),
            key=lambda each: (len(each[0]), not each[1].children),
            default=("", None),
        )
        return None if turn is None else turn.tokens + self._tokenizer.encode(text[len(known) :])

    def messages_of(self, response: str | None) -> Sequence[Message]:
        """Return the messages up to the end of a response of /v1/responses. Raises ApiError."""
        if response is None:
            return ()
        if response not in self._responses:
            raise ApiError(
                400,
                f"previous_response_id: this session has no response {response[:80]!r}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._responses[response]

    def keep_response(self, id: str, messages: Sequence[Message]) -> None:
        self._responses[id] = messages

    # Calls

    async def ask(
        self, asked: ParsedRequest, conversation: KnownConversation | None = None, texts: Sequence[str] = ()
    ) -> dict[int, AnswerPart]:
        """Answer a request of the program, and keep the answers. Raises ApiError.

        conversation: the prompt's conversation, for a chat.
        texts: text of each prompt, for completions of texts.
        """
        extra, extended = self._admit(asked)
        requests = [self._request(asked, request) for request in asked.requests]
        first, self._numbered = self._numbered, self._numbered + sum(each.num_samples for each in requests)
        self._coming += extra
        self._extended.update(extended)
        try:
            answers = await self._generated(requests)
        finally:
            self._coming -= extra
            self._extended.subtract(extended)
        parts = parts_of(asked, answers, self._tokenizer)
        if not asked.reading.drops_answer:
            self._keep(asked, answers, parts, conversation, texts, first)
        return parts

    async def while_open(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which the end of the session cancels. Raises ApiError then."""
        try:
            return await unless(self._over.wait(), work)
        except Overtaken:
            raise session_ended() from None

    def end(self) -> None:
        self._over.set()

    def _admit(self, asked: ParsedRequest) -> tuple[int, list[AnswerNode]]:
        """Check the limits of the rollout. Return the number of branches that the call adds, and the answers that it
        continues. Raises ApiError."""
        config = self._config
        if self.calls >= config.max_calls:
            raise self._fail(f"more than {config.max_calls} calls (environment.args.max_calls)")
        # An answer that continues the last answer of a branch extends this branch; any other begins a new one. Say that
        # the conversation 1-2 is known. A call that continues 2 adds no branch, and with n=3 it adds two. But when two
        # calls that continue 2 run at the same time, only one of them can extend the branch: `_extended` remembers
        # which answers unfinished calls have claimed, and `_coming` the branches that they will add, so that parallel
        # calls cannot pass the limit together although each alone is within it.
        extra, extended = 0, []
        for request in asked.requests:
            parent = self._branches.continued_by(request.prompt_tokens)
            extra += request.num_samples
            if parent is not None and not parent.children and not self._extended[parent] and parent not in extended:
                extra -= 1
                extended.append(parent)
        if len(self._branches.leaves()) + self._coming + extra > config.max_branches:
            raise self._fail(f"more than {config.max_branches} branches (environment.args.max_branches)")
        self.calls += 1
        return extra, extended

    def _fail(self, reason: str) -> ApiError:
        if self.failure is None:
            self.failure = reason
            self.stopped.set()
        return ApiError(403, f"the rollout has reached its limit: {reason}", code="limit_exceeded")

    def _room(self, request: GenerationRequest) -> int:
        """Return the number of tokens that each answer may have. Raises ApiError if there is no room for one."""
        most = self._config.max_tokens
        if most is None:
            return UNLIMITED
        known = self._branches.continued_by(request.prompt_tokens)
        new = len(request.prompt_tokens) - (0 if known is None else known.length)
        room = (most - self._branches.tokens - new) // request.num_samples
        if room < 1:
            raise self._fail(f"more than {most} tokens (environment.args.max_tokens)")
        return room

    def _request(self, asked: ParsedRequest, request: GenerationRequest) -> GenerationRequest:
        """Return a request of the program as one of the run: under its sampling, and with a key that depends only on
        the prompt and on how often it was asked before. So parallel calls may come in any order."""
        body, by = asked.body, self._config.sampling
        most = 1 if asked.reading.drops_answer else min(self._room(request), body.answer_limit or UNLIMITED)
        if by == "program":
            body.refuse_other_logits()
        end_ids = self._tokenizer.end_ids
        sampling = narrowed(self._sampling, request.sampling, body.model_fields_set, by, most=most, end_ids=end_ids)
        if request.grammar:  # the form says where the answer ends
            sampling = sampling.model_copy(update={"min_new_tokens": 0})
        if by == "program" and body.seed is not None:
            return replace(request, sampling=sampling, ordinal=self._ordinal)
        said = array("q", request.prompt_tokens).tobytes() + request.grammar.encode()
        prompt = blake2b(said, digest_size=8).digest()
        key = stable_key("call", self._key, int.from_bytes(prompt, "little"), self._asked[prompt])
        self._asked[prompt] += 1
        return replace(request, sampling=sampling, ordinal=self._ordinal, key=key)

    async def _generated(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        tasks = [asyncio.ensure_future(self._inference.generate(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except PromptTooLong as error:
            self._cut_off = True
            raise error_for_client(error) from error
        except Unsupported as error:
            raise error_for_client(error) from error
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except Exception as error:  # of any kind: the engine, not the program, has failed, which ends the run
            self.broken = error
            self.stopped.set()
            raise ApiError(500, "the engine of the run has failed", code="engine_failed") from error
        finally:
            for task in tasks:
                task.cancel()

    def _keep(
        self,
        asked: ParsedRequest,
        answers: Sequence[Sequence[Completion]],
        parts: Mapping[int, AnswerPart],
        conversation: KnownConversation | None,
        texts: Sequence[str],
        first: int,
    ) -> None:
        """first: number of the first answer, see `AnswerNode`."""
        for number, (prompt, completions) in enumerate(zip(asked.prompts, answers, strict=True)):
            turns = self._branches.add(prompt.tokens, completions, first)
            first += len(completions)
            if texts:
                self._keep_texts(texts[number], prompt.tokens, turns)
            if conversation is None:
                continue
            for index, turn in enumerate(turns):
                answer = asked.form.whole(index, parts[index], prompt)["message"]
                self._conversations.append((conversation.answered(answer), turn))
                if conversation.said.tools:
                    self._tool_calls = (self._tool_calls or 0) + len(answer.get("tool_calls") or ())

    def _keep_texts(self, text: str, prompt: list[int], turns: Sequence[AnswerNode]) -> None:
        """Keep the texts of answers, so that a later prompt can continue them. A text lacks special tokens, so a
        prompt that begins with the text of an answer that contains some does not continue its tokens."""
        tokenizer = self._tokenizer
        for turn in turns:
            if not any(map(tokenizer.is_special, turn.completion.tokens)):
                stream = TextStream(tokenizer.decode, after=prompt)
                answer = stream.push(turn.completion.tokens) + stream.finish()
                self._texts.append((text + answer, turn))

    # Results

    def trajectory(self, score: CheckedReward, output: str = "") -> Trajectory:
        """Return the rollout with its reward. Raises ValueError with the reason if it is lost: a limit was exceeded,
        the model has given no answer, or other answers than those that are scored."""
        if self.failure is not None:
            raise ValueError(self.failure)
        found = self._branches.sequences()
        if not found:
            why = "the prompt is too long" if self._cut_off else "the program has asked the model for nothing"
            raise ValueError(why)
        turns = [turn for each in found for turn in each.leaf.path]
        texts = [self._tokenizer.decode(turn.completion.tokens) for turn in dict.fromkeys(turns)]
        numbers = [turn.number for each in found for turn in each.trained]
        cut_off = self._cut_off or any(each.leaf.completion.finish_reason == "length" for each in found)
        made = Trajectory.of_sequences(
            [each.branch for each in found],
            "\n".join(texts),
            score.reward,
            "length" if cut_off else "stop",
            tool_calls=self._tool_calls,
            components=score.components,
            output=output,
        )
        return made.with_turn_scores(in_order(score.turns, numbers)) if score.turns else made


def session_ended() -> ApiError:
    return ApiError(410, "this session has ended: its rollout is over", code="session_ended")


CHOSEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
}
"""Parameters of a request that have an effect if the program may choose, and our names of them."""


def narrowed(
    run: Sampling, asked: Sampling, given: Set[str], by: Literal["run", "program"], *, most: int, end_ids: Set[int]
) -> Sampling:
    """Return the sampling of a call. Raises ApiError.

    Args:
        asked: sampling that the request asks for.
        given: parameters of `asked` that the request sets itself; the others are defaults.
        by: who chooses, see `EndpointConfig.sampling`.
        most: largest number of tokens of the answer.
        end_ids: tokens that end an answer anyway.
    """
    longest = min(run.max_new_tokens, most)
    kind = type(asked) if by == "program" else Sampling
    chosen = {ours for theirs, ours in CHOSEN.items() if theirs in given} if by == "program" else set[str]()
    values: dict[str, Any] = run.model_dump()
    stop_tokens = [each for each in asked.stop_tokens if each not in end_ids]
    values |= {name: getattr(asked, name) for name in chosen & kind.model_fields.keys()}
    values |= {
        "max_new_tokens": longest,
        "min_new_tokens": min(values["min_new_tokens"], longest),
        "stop": tuple(dict.fromkeys((*run.stop, *asked.stop))),
        "stop_tokens": tuple(dict.fromkeys((*run.stop_tokens, *stop_tokens))),
    }
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid(error, {"stop_tokens": "stop_token_ids"}) from error
