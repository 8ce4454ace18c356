"""A server that reads the weights of a run on request."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hf_helpers import PUBLISHED, publish
from server_helpers import SayingEngine, ask
from torch import Tensor

from megatron_rl.inference.weights import WrongWeights
from megatron_rl.server.weights import WrittenWeights


class Taking:
    """An engine that records the weights it is given, or has another shape."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: tuple[int, dict[str, Tensor]] | None = None
        self._error = error

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._error:
            raise self._error
        self.taken = version, dict(tensors)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("policy")
    return folder, publish(folder / "version-000012", PUBLISHED["Qwen2"])


def tell(folder: Path | None, engine: Taking, body: dict[str, Any]) -> httpx.Response:
    weights = None if folder is None else WrittenWeights(folder, engine)
    return ask(SayingEngine(), "/update_weights", body, weights=weights)


def test_every_tensor_of_the_version_is_read(written: tuple[Path, Any]) -> None:
    folder, model = written
    engine = Taking()
    response = tell(folder, engine, {"version": 12})
    assert (response.status_code, response.json()) == (200, {"version": 12})
    assert engine.taken is not None
    version, tensors = engine.taken
    expected = model.state_dict()
    assert version == 12 and tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"version": 13}, 409, "version-000013"),
        ({"version": -1}, 400, "version"),
        ({"version": "../../etc"}, 400, "version"),
        ({}, 400, "version"),
    ],
)
def test_missing_or_invalid_version_is_refused(
    written: tuple[Path, Any], body: dict[str, Any], status: int, why: str
) -> None:
    engine = Taking()
    response = tell(written[0], engine, body)
    assert response.status_code == status and why in response.json()["error"]["message"]
    assert engine.taken is None


def test_weights_of_another_model_are_refused_with_the_difference(written: tuple[Path, Any]) -> None:
    response = tell(written[0], Taking(WrongWeights("the model has no tensor x")), {"version": 12})
    assert response.status_code == 409 and "the model has no tensor x" in response.json()["error"]["message"]


def test_server_without_the_option_keeps_its_weights() -> None:
    response = tell(None, Taking(), {"version": 12})
    assert response.status_code == 404 and "--weights-from" in response.json()["error"]["message"]
