"""Stand-in for servers that reload their weights as vLLM, SGLang and `mrl serve` do, and keep what they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
PLAIN = {"/pause", "/resume", "/reset_prefix_cache", "/pause_generation", "/continue_generation"}


class WeightsServer:
    """Replies to the calls of `refit/external.py`."""

    def __init__(self, folder: Path) -> None:
        """folder: directory of weights that the server was started with."""
        self.folder = folder
        self.calls: list[tuple[str, object]] = []
        self.read: dict[str, Tensor] = {}
        self.refuses: httpx.Response | None = None
        self.refuses_path: str | None = None
        """Path of requests to which it replies that they failed."""
        self.logprobs: list[float] = []
        """Log-probs that it reports of every probe."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content) if request.content and request.content != b"null" else None
        path = request.url.raw_path.decode()
        if path in ("/v1/completions", "/generate"):
            return httpx.Response(200, json=self._scored(path, content))
        self.calls.append((path, content))
        if self.refuses is not None:
            return self.refuses
        if path in ("/collective_rpc", "/update_weights", "/update_weights_from_disk"):
            self.read = self.load(self.folder)
            return httpx.Response(200, json={"success": True})
        if (plain := path.partition("?")[0]) in PLAIN:
            return httpx.Response(200, json={"success": plain != self.refuses_path})
        return httpx.Response(404, json={"detail": "Not Found"})

    def _scored(self, path: str, content: Any) -> Any:
        """Response with the log-probs of a prompt, as vLLM or SGLang has it."""
        if path == "/generate":
            pairs = zip([None, *self.logprobs], content["input_ids"], strict=True)
            return {"meta_info": {"input_token_logprobs": [[logprob, token, None] for logprob, token in pairs]}}
        pairs = zip(content["prompt"][1:], self.logprobs, strict=True)
        scores = [{str(token): {"logprob": logprob, "rank": 1}} for token, logprob in pairs]
        return {"choices": [{"index": 0, "prompt_logprobs": [None, *scores]}]}

    @staticmethod
    def load(folder: Path) -> dict[str, Tensor]:
        """Load all tensors of a directory by its index, which must name every tensor of every file once."""
        assert (folder / "config.json").is_file()
        listed = json.loads((folder / INDEX).read_text())["weight_map"]
        found: dict[str, Tensor] = {}
        for file in sorted({*listed.values()}):
            for name, tensor in load_file(folder / file).items():
                assert listed[name] == file
                assert name not in found
                found[name] = tensor
        assert found.keys() == listed.keys()
        assert {file.name for file in folder.glob("*.safetensors")} == {*listed.values()}
        return found

    def has(self, expected: dict[str, Tensor]) -> bool:
        """Whether it read these tensors, bit for bit."""
        return self.read.keys() == expected.keys() and all(
            tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
            for name, tensor in self.read.items()
        )
