"""A server of another project takes the trainer's weights, every tensor bit for bit, or keeps those it had."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from weights_server import WeightsServer

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai import OpenAIInference
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.refit.external import ExternalPolicy, ServedFolder
from megatron_rl.refit.reload import Call, ReloadFailed, ServerAway, ServerKind, reload_calls


def tensors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"model.embed_tokens.weight": (15, 8), "model.norm.weight": (8,), "lm_head.weight": (15, 8)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


class Setting:
    def __init__(self, root: Path, kind: ServerKind) -> None:
        published = root / "published"
        published.mkdir()
        (published / "config.json").write_text("{}")
        (published / "tokenizer.json").write_text("{}")
        (root / "token").write_text("s3cret")
        self.served = ServedFolder(root / "shm", published, shard_bytes=300)
        self.server = WeightsServer(self.served.current)
        self.tokens: set[str | None] = set()
        endpoint = Endpoint("http://node:8000/v1", "tiny", "vllm", token_file=root / "token")
        self.inference = OpenAIInference(endpoint)
        transport = httpx.MockTransport(self.reply)
        self.policy = ExternalPolicy(self.inference, endpoint, kind, self.served, transport)

    def reply(self, request: httpx.Request) -> httpx.Response:
        self.tokens.add(request.headers.get("Authorization"))
        return self.server(request)

    def update(self, version: int) -> None:
        asyncio.run(self.policy.update_weights(version, tensors(version).items()))

    @property
    def versions(self) -> list[str]:
        return sorted(path.name for path in self.served.folder.iterdir())


@pytest.fixture(params=["vllm", "sglang"])
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, request.param)


def test_the_server_reads_every_tensor_and_the_next_ones_after_it(setting: Setting) -> None:
    for version in (1, 2):
        setting.update(version)
        assert setting.server.has(tensors(version))
        assert setting.inference.policy_version == version
        assert setting.versions == ["current", f"version-{version:06d}"]
    assert len([*setting.served.version(2).glob("*.safetensors")]) > 1  # in several files
    assert setting.tokens == {"Bearer s3cret"}


def test_vllm_forgets_what_it_cached_and_sglang_is_told_the_version(tmp_path: Path) -> None:
    for kind in ("vllm", "sglang"):
        (tmp_path / kind).mkdir()
        setting = Setting(tmp_path / kind, kind)
        setting.update(3)
        if kind == "vllm":
            assert setting.server.calls == [
                ("/collective_rpc", {"method": "reload_weights"}),
                ("/reset_prefix_cache", None),
            ]
        else:
            path = str(setting.served.version(3))
            content = {"model_path": path, "flush_cache": True, "weight_version": "3"}
            assert setting.server.calls == [("/update_weights_from_disk", content)]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(500, text="CUDA error"), "HTTP 500: CUDA error"),
        (httpx.Response(200, json={"success": False, "message": "no such file"}), "no such file"),
    ],
)
def test_a_server_that_refuses_keeps_its_version(setting: Setting, reply: httpx.Response, message: str) -> None:
    """Also when it is started again."""
    setting.server.refuses = reply
    with pytest.raises(ReloadFailed, match=message):
        setting.update(1)
    assert not setting.served.current.is_symlink()
    setting.server.refuses = None
    setting.update(1)
    setting.server.refuses = reply
    with pytest.raises(ReloadFailed, match=message):
        setting.update(2)
    assert setting.inference.policy_version == 1
    assert setting.server.has(tensors(1))
    assert setting.served.current.resolve() == setting.served.version(1)
    setting.server.refuses = None
    setting.update(3)
    assert setting.server.has(tensors(3))
    assert setting.versions == ["current", "version-000003"]


def test_a_server_that_is_away_reads_the_newest_version_when_it_comes(setting: Setting) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    replies, setting.server = setting.server, away  # type: ignore[assignment]
    with pytest.raises(ServerAway, match="connection refused"):
        setting.update(1)
    assert setting.served.current.resolve() == setting.served.version(1)
    assert setting.inference.policy_version == 0, "nobody has taken it"
    setting.server = replies
    asyncio.run(setting.policy.reload(1))
    assert setting.server.has(tensors(1)) and setting.inference.policy_version == 1


def test_the_server_of_mrl_is_told_the_version_and_knows_the_folder(tmp_path: Path) -> None:
    assert reload_calls("mrl", tmp_path, 12) == (Call("/update_weights", {"version": 12}),)


def test_a_vllm_that_cannot_be_told_is_one_clear_error(tmp_path: Path) -> None:
    setting = Setting(tmp_path, "vllm")
    setting.server.refuses = httpx.Response(404)
    with pytest.raises(ReloadFailed, match="VLLM_SERVER_DEV_MODE=1"):
        setting.update(1)


def test_a_full_disk_leaves_the_version_before(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.update(1)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        setting.update(2)
    assert setting.versions == ["current", "version-000001"]
    assert setting.served.current.resolve() == setting.served.version(1)
    assert setting.server.has(tensors(1))


@pytest.mark.parametrize("whose", ["of another user", "open to all", "behind a link"])
def test_weights_are_written_to_no_folder_that_others_can_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    setting = Setting(tmp_path, "vllm")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if whose == "behind a link":
        setting.served.folder.symlink_to(theirs)
    else:
        setting.served.folder.mkdir()
        setting.served.folder.chmod(0o777 if whose == "open to all" else 0o755)
    if whose == "of another user":
        monkeypatch.setattr("megatron_rl.refit.external.os.geteuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match=str(setting.served.folder)):
        setting.update(1)
    assert not [*setting.served.folder.iterdir()]


def test_a_folder_that_was_not_there_is_for_its_owner_alone(setting: Setting) -> None:
    setting.update(1)
    assert setting.served.folder.stat().st_mode & 0o777 == 0o700
