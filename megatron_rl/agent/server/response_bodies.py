"""Choices of OpenAI's response bodies, whole or in chunks, from parts of samples."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from megatron_rl.agent.server.samples import AnswerPart, Prompt, TokenNames


@dataclass(frozen=True)
class ChoiceFormat:
    model: str
    names: TokenNames
    likeliest: int | None
    token_ids: bool
    prompt_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid4().hex)

    def head(self, streamed: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, name: str, kind: str) -> dict[str, Any]:
        # Answers to one seed may differ between machines and batches, so no fingerprint promises that they are equal.
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": None}

    def whole(self, index: int, part: AnswerPart, prompt: Prompt) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a chunk before the first one with output; None if there is no such chunk."""
        return None

    def chunk(self, index: int, part: AnswerPart, calls: int, prompt: Prompt | None) -> dict[str, Any]:
        """Return a choice of a chunk. calls: number of calls in earlier chunks. prompt: only with the first chunk."""
        raise NotImplementedError

    def _choice(
        self, index: int, part: AnswerPart, prompt: Prompt | None, content: dict[str, Any], logprobs: Any
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs}
        choice |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.token_ids:
            choice |= {} if prompt is None else {"prompt_token_ids": prompt.tokens}
            choice |= {"token_ids": part.tokens, "policy_versions": part.versions}
        return choice

    def scored(self, part: AnswerPart, prompt: Prompt | None) -> dict[str, Any]:
        """Return vLLM's `prompt_logprobs`: at each position its token and the likeliest ones, by their ids."""
        if self.prompt_logprobs is None or prompt is None or part.prompt is None:
            return {}
        positions: list[dict[str, Any] | None] = [None]  # nothing precedes the first token
        scores = part.prompt
        for token, logprob, rank, top in zip(
            prompt.tokens[1:], scores.logprobs, scores.ranks, scores.top_logprobs, strict=True
        ):
            likeliest = enumerate([*top.items()][: self.prompt_logprobs], 1)
            ranked = {each: (value, at) for at, (each, value) in likeliest} | {token: (logprob, rank)}
            positions.append(
                {
                    str(each): {"logprob": value, "rank": at, "decoded_token": self.names.name(each)}
                    for each, (value, at) in ranked.items()
                }
            )
        return {"prompt_logprobs": positions}


class CompletionFormat(ChoiceFormat):
    def head(self, streamed: bool) -> dict[str, Any]:
        return self._head(f"cmpl-{self.id}", "text_completion")

    def chunk(self, index: int, part: AnswerPart, calls: int, prompt: Prompt | None) -> dict[str, Any]:
        return self.whole(index, part, prompt)

    def whole(self, index: int, part: AnswerPart, prompt: Prompt | None) -> dict[str, Any]:
        content = {"text": (prompt.text if prompt else "") + part.content}
        choice = self._choice(index, part, prompt, content, self._logprobs(part, prompt))
        return choice | self.scored(part, prompt)

    def _logprobs(self, part: AnswerPart, prompt: Prompt | None) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        tokens, logprobs, top = part.tokens, list[float | None](part.logprobs), part.top_logprobs
        if prompt and prompt.text and part.prompt:
            tokens = prompt.tokens + tokens
            logprobs = [None, *part.prompt.logprobs, *logprobs]
            of_prompt = part.prompt.top_logprobs
            top = [{}, *(dict([*place.items()][: self.likeliest]) for place in of_prompt), *top]
        return {
            "tokens": [*map(self.names.name, tokens)],
            "token_logprobs": logprobs,
            "top_logprobs": [
                None if logprob is None else self.names.by_name(place, token, logprob)
                for place, token, logprob in zip(top, tokens, logprobs, strict=True)
            ]
            if self.likeliest
            else None,
        }


class ChatFormat(ChoiceFormat):
    def head(self, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return self._head(f"chatcmpl-{self.id}", kind)

    def whole(self, index: int, part: AnswerPart, prompt: Prompt) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message |= {"content": part.content or None, "tool_calls": [call.message for call in part.calls]}
        return self._choice(index, part, prompt, {"message": message}, self._logprobs(part))

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, part: AnswerPart, calls: int, prompt: Prompt | None) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.calls:
            delta["tool_calls"] = [{"index": n, **call.message} for n, call in enumerate(part.calls, calls)]
        return self._choice(index, part, prompt, {"delta": delta}, self._logprobs(part))

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        top = part.top_logprobs or [{}] * len(part.tokens)
        return {
            "content": [
                {
                    **self._token(token, value),
                    "top_logprobs": [self._token(other, its) for other, its in place.items()] if self.likeliest else [],
                }
                for token, value, place in zip(part.tokens, part.logprobs, top, strict=True)
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.names.name(token), "logprob": logprob, "bytes": list(self.names.bytes(token))}


def event(content: dict[str, Any] | str) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
