"""Requests to `vllm serve` over its socket: generation by tokens, and control of its weights."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.generate.engine.interface import LOWEST_LOGPROB, PromptTooLong, TokenScore
from megatron_rl.generate.engine.openai import LARGEST, token_scores
from megatron_rl.generate.vllm.process import VllmClosed, VllmGone, VllmRefused
from megatron_rl.generate.vllm.returned_choices import choices_in
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.recipe.inference import Sampling

MODEL_NAME = "policy"
FIRST = -1
"""Priority of a request that precedes the others, whose priority is 0."""
CONNECT_S = 10.0
"""Seconds to connect to the socket, and for an answer that needs no computation."""
CONTROL_S = 300.0
"""Seconds that a change of weights may take."""
MOST_TOKENS = 2**31
"""Tokens of a vocabulary, and of an answer."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    sample: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None = None
    """Policy version of each token that vLLM sampled for the answer; only in the last piece."""
    choices: Choices = field(default_factory=list)
    """Choices of experts for all tokens that vLLM computed, those of the prompt first; only in the last piece."""


@dataclass(frozen=True, slots=True)
class VllmStats:
    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0
    """Share of the cache of keys and values that is used, from 0 to 1."""
    pages: int = 0
    preemptions: int = 0
    """Answers that lost their cache to others so far, and were computed again."""
    drafted: int = 0
    """Tokens that speculative decoding has drafted so far."""
    accepted: int = 0


class VllmClient:
    """All methods belong to one asyncio loop. They raise VllmGone if vLLM does not answer, or not as agreed, and
    VllmRefused if it answers with an error."""

    def __init__(self, socket: Path) -> None:
        # No connection is used twice: after a call that fails, vLLM's server answers and then closes the connection,
        # and a next call that already uses it would break off.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url="http://vllm",
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=limits),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def healthy(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=CONNECT_S)).is_success
        except httpx.HTTPError:
            return False

    async def reach_workers(self) -> None:
        """Return once all processes that compute have reacted, which they do between two steps of the model, and which
        `/health` does not ask. Raises VllmGone if that takes longer than CONNECT_S."""
        try:
            await self.post("/collective_rpc", {"method": "check_health"}, limit_s=CONNECT_S)
        except VllmClosed:
            raise
        except (VllmGone, VllmRefused) as error:
            raise VllmGone(f"vLLM has nothing to do, and its workers do not react: {error}") from error

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        ends: Sequence[int],
        samples: int = 1,
        known: int = 0,
        form: ChoiceForm | None = None,
        grammar: str = "",
    ) -> AsyncGenerator[NewTokens, None]:
        """Yield the tokens of answers to a prompt. Closing the iterator cancels the request.

        Args:
            ends: tokens that end an answer.
            samples: number of answers.
            known: tokens at the end of the prompt that belong to each answer.
            form: of the choices of experts that it returns; None: it returns none.
            grammar: of the answers, from their first token on.

        Raises PromptTooLong if the request does not fit; ValueError if vLLM refuses it for another reason.
        """
        left = {*range(samples)}  # answers that have not ended
        params, limit = sampling_params(sampling, ends, samples, known), httpx.Timeout(None, connect=CONNECT_S)
        if grammar:
            params["structured_outputs"] = {"grammar": grammar}
        content = {"model": MODEL_NAME, "token_ids": [*prompt], "sampling_params": params, "stream": True}
        try:
            async with self._client.stream("POST", "/inference/v1/generate", json=content, timeout=limit) as response:
                if not response.is_success:
                    raise await _refusal(response)
                async for line in response.aiter_lines():
                    field, _, data = line.partition(":")
                    if field != "data" or data.strip() == "[DONE]":
                        continue
                    event = _json(data)
                    if "error" in event:
                        raise VllmGone(f"vLLM gave up an answer: {event['error']}")
                    for choice in _choices(event):
                        piece = piece_of(choice, form)
                        if piece.sample not in left:
                            raise VllmGone(f"vLLM answers {samples} times, and also number {piece.sample}")
                        left -= {piece.sample} if choice.get("finish_reason") is not None else set()
                        yield piece
        except httpx.HTTPError as error:  # also in the middle of an answer
            raise _gone("/inference/v1/generate", error) from error
        if left:  # releases before 0.32 end the stream of an answer that they give up
            raise VllmGone(f"vLLM gave up {len(left)} of {samples} answers")

    async def score(self, tokens: Sequence[int], top: int = 0, limit_s: float = CONTROL_S) -> list[TokenScore]:
        """Score all tokens but the first, given those before each. The request precedes all waiting answers.

        top: likeliest tokens to return at each position. limit_s: seconds that it may take.
        """
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top, "detokenize": False}
        content = await self.post(
            "/inference/v1/generate",
            {"model": MODEL_NAME, "token_ids": [*tokens], "sampling_params": sampling, "priority": FIRST},
            limit_s=limit_s,
        )
        try:
            return token_scores(content["prompt_logprobs"], tokens, top)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise VllmGone(f"vLLM has scored no prompt: {error!r}") from error

    async def pause(self) -> None:
        """Freeze generation between two tokens; answers stay where they are."""
        await self.post("/pause", params={"mode": "keep"})

    async def resume(self) -> None:
        await self.post("/resume")

    async def sleep(self) -> None:
        """Pause as `pause` does, and give up the memory of weights and cache. No-op for what was given up before, and
        in releases before 0.31 also for the rest."""
        await self.post("/sleep", params={"level": "2", "mode": "keep"})

    async def wake(self, tag: Literal["weights", "kv_cache"]) -> bool:
        """Take memory for weights, which have no values yet, or for the cache. Returns whether it has both, and has
        resumed."""
        await self.post("/wake_up", params={"tags": tag})  # whose answer says so from 0.32 on
        return (await self._call("GET", "/is_sleeping")).get("is_sleeping") is False

    async def begin_receive(self, version: int, epoch: dict[str, Any] | None, setting: dict[str, Any]) -> None:
        asked = {"version": version, "epoch": epoch, "setting": setting}
        await self.post("/init_weight_transfer_engine", {"init_info": asked})

    async def start_update(self) -> None:
        await self.post("/start_weight_update")

    async def update(self, version: int, *, load: bool) -> None:
        try:
            await self.post("/update_weights", {"update_info": {"version": version, "load": load}})
        except VllmRefused:
            # The worker that reports a failed transfer has ended its update with it, and the others have not. That one
            # refuses this call, as expected.
            with suppress(VllmRefused):
                await self.post("/finish_weight_update")
            raise

    async def finish_update(self, version: int) -> None:
        await self.post("/finish_weight_update", {"weight_version": str(version)})

    async def forget_prefixes(self) -> None:
        """Drop all cached keys and values, also those of unfinished answers, which are computed again."""
        await self.post("/reset_prefix_cache", params={"reset_running_requests": "true"})

    async def start_profile(self, name: str) -> None:
        """Begin traces of the workers, which end by themselves, see profiler_config. name: first part of theirs."""
        # By `/start_profile`, which calls the same, releases before 0.32 pass on no name.
        arguments = {"is_start": True, "profile_prefix": name}
        await self.post("/collective_rpc", {"method": "profile", "kwargs": arguments})

    async def stop_profile(self) -> None:
        """End traces that have not ended. No-op if there are none."""
        await self.post("/collective_rpc", {"method": "profile", "kwargs": {"is_start": False}})

    async def stats(self) -> VllmStats:
        try:
            response = await self._client.get("/metrics", timeout=CONNECT_S)
        except httpx.HTTPError as error:
            raise _gone("/metrics", error) from error
        return stats_in(response.text)

    async def post(
        self,
        path: str,
        content: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        limit_s: float = CONTROL_S,
    ) -> dict[str, Any]:
        """Response to a request. limit_s: seconds that it may take."""
        return await self._call("POST", path, content, params, limit_s)

    async def _call(
        self,
        method: str,
        path: str,
        content: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        limit_s: float = CONTROL_S,
    ) -> dict[str, Any]:
        limit = httpx.Timeout(limit_s, connect=CONNECT_S, pool=None)
        try:
            response = await self._client.request(method, path, json=content, params=params, timeout=limit)
        except httpx.HTTPError as error:
            raise _gone(path, error) from error
        if not response.is_success:
            message = f"vLLM fails at {path}: HTTP {response.status_code}: {_message(response.text)}"
            raise VllmRefused(message, response.status_code)
        return _json(response.text) if response.text else {}


def sampling_params(sampling: Sampling, ends: Sequence[int], samples: int, known: int) -> dict[str, Any]:
    """vLLM's sampling parameters. All are sent, because vLLM takes what is left out from defaults of the model. It gets
    no stop strings: they are found in the text by the same code as in the other engines.

    Args:
        ends: tokens that end an answer; the model's own end tokens do not count besides.
        samples: number of answers.
        known: tokens of each answer that are part of the prompt.
    """
    return {
        "n": samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_new_tokens - known,
        "min_tokens": max(0, sampling.min_new_tokens - known),
        "stop_token_ids": list(ends),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def piece_of(choice: dict[str, Any], form: ChoiceForm | None = None) -> NewTokens:
    """Parse a choice of `/inference/v1/generate`. form: of the experts that it may contain. Raises VllmGone."""
    try:
        sample, tokens = _whole(choice["index"]), [_whole(token) for token in choice["token_ids"] or ()]
        scored = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [_logprob(_number(each["logprob"])) for each in scored]
        spans = choice.get("weight_versions")
        versions = None if spans is None else versions_in(spans)
        reason = choice.get("finish_reason")
        routed = choice.get("routed_experts")
        choices = choices_in(routed, form) if routed and form else []
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise VllmGone(f"vLLM's answer has no tokens or log-probs: {error!r}") from error
    if len(tokens) != len(logprobs):
        raise VllmGone(f"vLLM's answer has {len(tokens)} tokens and {len(logprobs)} log-probs")
    if reason not in (None, "stop", "length"):
        raise VllmGone(f"vLLM gave up an answer: finish_reason {reason!r}")
    return NewTokens(sample, tokens, logprobs, versions, choices)


def versions_in(spans: Sequence[dict[str, Any]]) -> list[int]:
    """Version of each token, from vLLM's spans [{"version": "7", "start": 0, "end": 10}]. Raises LookupError, TypeError
    or ValueError."""
    found: list[int] = []
    for span in spans:
        version = -1 if span["version"] == "default" else int(span["version"])
        length = _whole(span["end"]) - _whole(span["start"])
        if not 0 <= length <= MOST_TOKENS - len(found):
            raise ValueError(f"a version of {length} tokens")
        found += [version] * length
    return found


def stats_in(text: str) -> VllmStats:
    """Read vLLM's figures in the text of `/metrics` (Prometheus). There is a line for each data-parallel part, and all
    parts have a cache of the same size."""
    found: dict[str, float] = {}
    pages = re.findall(r'^vllm:cache_config_info\{.*\bnum_gpu_blocks="(\d+)"', text, re.MULTILINE)
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].removeprefix("vllm:")
        if name and not line.startswith("#"):
            with suppress(ValueError, OverflowError):
                found[name] = found.get(name, 0.0) + _number(float(value))
    return VllmStats(
        int(found.get("num_requests_running", 0)),
        int(found.get("num_requests_waiting", 0)),
        found.get("kv_cache_usage_perc", 0.0) / max(1, len(pages)),
        sum(map(int, pages)),
        int(found.get("num_preemptions_total", 0)),
        int(found.get("spec_decode_num_draft_tokens_total", 0)),
        int(found.get("spec_decode_num_accepted_tokens_total", 0)),
    )


def _gone(path: str, error: httpx.HTTPError) -> VllmGone:
    if isinstance(error, httpx.ConnectError):
        return VllmClosed("vLLM has closed its socket")
    return VllmGone(f"vLLM does not answer {path}: {error!r}")


async def _refusal(response: httpx.Response) -> Exception:
    message = _message((await response.aread()).decode("utf-8", "replace"))
    if response.status_code == 400:
        too_long = "context length" in message or "max_model_len" in message or "longer than" in message
        return (PromptTooLong if too_long else ValueError)(f"vLLM refuses the request: {message}")
    return VllmGone(f"vLLM answers HTTP {response.status_code}: {message}")


def _choices(event: dict[str, Any]) -> list[dict[str, Any]]:
    found = event.get("choices", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise VllmGone("vLLM's answer has no list of choices")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_TOKENS:
        raise ValueError(f"{value!r:.50} is not the number of a token or an answer")
    return value


def _number(value: Any) -> float:
    """Return a finite number; NaN is one of JSON for Python. Raises TypeError or ValueError."""
    if not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"{value!r:.50} is not a number")
    return float(value)


def _logprob(value: float) -> float:
    return float("-inf") if value <= LOWEST_LOGPROB else value


def _json(text: str) -> dict[str, Any]:
    try:
        found = bounded_json(text)
    except ValueError as error:
        raise VllmGone(f"vLLM does not answer in JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise VllmGone(f"vLLM answers no JSON object: {text[:200]!r}")
    return found


def _message(text: str) -> str:
    """The message in the body of an error, in OpenAI's format or another."""
    try:
        found = bounded_json(text)
        error = found.get("error", found.get("detail", text))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    except (ValueError, AttributeError):
        return text[:500]
