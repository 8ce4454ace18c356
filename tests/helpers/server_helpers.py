"""An inference server within the test: its application, an engine with given answers, and a client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import httpx
from streams import joined
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron_rl.agent.server.application import Application
from megatron_rl.generate.engine.interface import Completion, Delta, EngineLoad, GenerationRequest, PromptScores
from megatron_rl.generate.serving.access import ServerLimits
from megatron_rl.model.tokenizer import HuggingFaceTokenizer

TOKEN = "a-token-of-the-tests"
END = "<end>"
MAX_LENGTH = 400
PAGES = 64
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\nCall: <tool_call>...</tool_call>\n{% endif %}"
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)


@cache
def byte_backend() -> Backend:
    """Like GPT-2, Qwen and Llama 3: a character may be split anywhere between its bytes."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary | {"ab": 256, "Ġa": 257, "Ã©": 258}, [("a", "b"), ("Ġ", "a"), ("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return backend


@cache
def byte_tokenizer(template: str | None = TEMPLATE) -> HuggingFaceTokenizer:
    # slow; tests that need no tokenizer do without
    from transformers import PreTrainedTokenizerFast

    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token=END, chat_template=template)
    )


EOS = byte_backend().get_vocab_size()
"""Token of END: the last one."""


def encode(text: str) -> list[int]:
    tokens: list[int] = byte_backend().encode(text).ids
    return tokens


@dataclass
class _Saying:
    request: GenerationRequest
    streamed: bool
    answers: list[list[int]]
    said: int = 0
    """Number of tokens of each sample."""


class SayingEngine:
    """Answers every request with the given text, one token per step and sample, and then ends."""

    def __init__(self, text: str | Callable[[GenerationRequest, int], str] = "hello") -> None:
        self._text = text
        self._under_way: dict[str, _Saying] = {}
        self._answered: dict[str, list[Completion]] = {}
        self._deltas: list[tuple[str, Delta]] = []
        self.asked: list[GenerationRequest] = []
        self.holds_at: int | None = None
        """Number of tokens of each sample after which it pauses."""
        self.fails: Exception | None = None
        """Error of each step."""

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    @property
    def running(self) -> int:
        return sum(saying.request.num_samples for saying in self._under_way.values())

    @property
    def load(self) -> EngineLoad:
        waiting = sum(saying.request.num_samples for saying in self._under_way.values() if not saying.said)
        return EngineLoad(self.running - waiting, waiting, PAGES - self.running, PAGES)

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        self.asked.append(request)
        answers = [self._tokens(request, sample) for sample in range(request.num_samples)]
        self._under_way[request.id] = _Saying(request, streamed, answers)
        return request.id

    def cancel(self, request_id: str) -> None:
        self._under_way.pop(request_id, None)
        self._answered.pop(request_id, None)

    def step(self) -> None:
        if self.fails:
            self._under_way.clear()
            raise self.fails
        if self.holds_at is not None:
            time.sleep(0.001)  # so that the other thread can run
        for name, saying in list(self._under_way.items()):
            if self.holds_at is None or saying.said < self.holds_at:
                self._say(name, saying)

    def _say(self, name: str, saying: _Saying) -> None:
        for sample, tokens in enumerate(saying.answers):
            if saying.streamed and saying.said < len(tokens):
                self._deltas.append((name, self._delta(saying.request, sample, tokens, saying.said)))
        saying.said += 1
        if saying.said == max(map(len, saying.answers)):
            del self._under_way[name]
            if not saying.streamed:
                each = enumerate(saying.answers)
                deltas = (
                    [self._delta(saying.request, i, tokens, at) for at in range(len(tokens))] for i, tokens in each
                )
                self._answered[name] = joined(chain.from_iterable(deltas))

    @property
    def answered(self) -> list[str]:
        return list(self._answered)

    def take(self, request_id: str) -> list[Completion] | None:
        return self._answered.pop(request_id, None)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _tokens(self, request: GenerationRequest, sample: int) -> list[int]:
        text = self._text if isinstance(self._text, str) else self._text(request, sample)
        tokens = [*encode(text), byte_tokenizer().eos_id][: request.sampling.max_new_tokens]
        for count in range(1, len(tokens) + 1):
            if any(stop in byte_tokenizer().decode(tokens[:count]) for stop in request.sampling.stop):
                return tokens[:count]
        return tokens

    def _delta(self, request: GenerationRequest, sample: int, tokens: Sequence[int], step: int) -> Delta:
        token = tokens[step]
        last, stopped = step == len(tokens) - 1, byte_tokenizer().decode(tokens)
        stop = next((each for each in request.sampling.stop if each in stopped), None)
        ended = token == byte_tokenizer().eos_id or stop
        top = {token + place: logprob(token) - place for place in range(request.top_logprobs)}
        return Delta(
            sample,
            [token],
            [logprob(token)],
            [7],
            [top] if request.top_logprobs else None,
            ("stop" if ended else "length") if last else None,
            stop if last else None,
            scores(request) if step == 0 and request.prompt_logprobs is not None else None,
        )


def logprob(token: int) -> float:
    return -token / 100


def scores(request: GenerationRequest) -> PromptScores:
    """Scores of a prompt by SayingEngine: each token is the likeliest at its position, the next numbers follow."""
    tokens, most = request.prompt_tokens[1:], request.prompt_logprobs or 0
    top = [{token + place: logprob(token) - place for place in range(most)} for token in tokens]
    return PromptScores([*map(logprob, tokens)], [1] * len(tokens), top)


@asynccontextmanager
async def running(engine: Any, **options: Any) -> AsyncIterator[Application]:
    """Run a server. options: arguments of Application."""
    given: dict[str, Any] = {
        "tokenizer": byte_tokenizer(),
        "model": "tiny",
        "max_length": MAX_LENGTH,
        "tokens": [TOKEN],
        "limits": ServerLimits(),
    }
    application = Application(engine, **given | options)
    application.thread.start()
    try:
        yield application
    finally:
        application.thread.stop("the test is over")
        assert await asyncio.to_thread(application.thread.join)


def client_of(application: Application, token: str = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(application, raise_app_exceptions=False),
        base_url="http://server",
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
    )


def ask(
    engine: Any, route: str, body: Any, *, method: str = "POST", token: str = TOKEN, **options: Any
) -> httpx.Response:
    """Send one request to a server with this engine. body: bytes, or a value that becomes JSON. options: of
    Application."""

    async def asked() -> httpx.Response:
        async with running(engine, **options) as application, client_of(application, token) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await asyncio.wait_for(client.request(method, route, content=content), 60)

    return asyncio.run(asked())


def completion(engine: Any, **body: Any) -> dict[str, Any]:
    return _good(ask(engine, "/v1/completions", {"prompt": "ask", "max_tokens": 100} | body))


def chat(engine: Any, *messages: Any, options: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    """Return the response of /v1/chat/completions to these messages."""
    given = list(messages) or [{"role": "user", "content": "hi"}]
    return _good(ask(engine, "/v1/chat/completions", {"messages": given} | body, **options or {}))


def events(engine: Any, route: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream."""
    response = ask(engine, route, body | {"stream": True}, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def _good(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
