"""vLLM's /inference/v1/generate: token ids in, token ids and log-probs out."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from megatron_rl.server.bodies import CompletionBody
from megatron_rl.server.body_types import Body, Items, TokenId
from megatron_rl.server.errors import ApiError, unsupported
from megatron_rl.server.response_bodies import Format, Part, Prompt

FIELDS = CompletionBody.model_fields.keys() - {"model", "prompt", "echo", "stream", "stream_options", "logprobs"}
"""Names in `sampling_params` that mean here what they mean in a request for completions. Others are ignored, since
clients send all of vLLM's."""


class GenerateBody(Body):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    token_ids: Items[TokenId]
    """The prompt."""
    sampling_params: dict[str, Any] = {}
    stream: bool = False

    def completion(self) -> CompletionBody:
        """Return the same request for completions. Raises ApiError, and pydantic's ValidationError."""
        if self.stream:
            raise unsupported("stream")
        if not self.token_ids:
            raise ApiError(400, "token_ids: is empty: there is nothing to answer", param="token_ids")
        params = {name: value for name, value in self.sampling_params.items() if name in FIELDS}
        return CompletionBody(model=self.model, prompt=self.token_ids, logprobs=0, **params)


class GenerateFormat(Format):
    """/inference/v1/generate."""

    def head(self, streamed: bool) -> dict[str, Any]:
        return {"request_id": self.id, "created": self.created, "model": self.model}

    def whole(self, index: int, part: Part, prompt: Prompt) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": part.tokens,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                    for token, logprob in zip(part.tokens, part.logprobs, strict=True)
                ]
            },
            "finish_reason": part.finish_reason,
            "policy_versions": part.versions,
        }
