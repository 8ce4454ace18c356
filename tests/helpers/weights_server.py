"""Stand-in for a server that reloads its weights as vLLM does, and keeps what it read."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


class WeightsServer:
    """Replies to the calls of `refit/reload.py`."""

    def __init__(self, folder: Path) -> None:
        """folder: directory of weights that the server was started with."""
        self.folder = folder
        self.calls: list[tuple[str, object]] = []
        self.read: dict[str, Tensor] = {}
        self.refuses: httpx.Response | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content) if request.content and request.content != b"null" else None
        self.calls.append((request.url.path, content))
        if self.refuses is not None:
            return self.refuses
        if request.url.path == "/collective_rpc" and content == {"method": "reload_weights"}:
            self.read = self.load(self.folder)
            return httpx.Response(200)
        if request.url.path == "/reset_prefix_cache":
            return httpx.Response(200)
        if request.url.path == "/update_weights":
            self.read = self.load(self.folder)
            return httpx.Response(200)
        return httpx.Response(404, json={"detail": "Not Found"})

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
