"""A server outside the run reads the trainer's weights bit for bit, or keeps its previous version."""

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

from megatron_rl.checkpoint.hf.staging import staged
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.refit.external import ServerReload, reload_all
from megatron_rl.refit.probe import Probe
from megatron_rl.refit.served_folder import ReloadFailed, ServedFolder, ServerAway


def tensors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"model.embed_tokens.weight": (15, 8), "model.norm.weight": (8,), "lm_head.weight": (15, 8)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


class Setting:
    def __init__(self, root: Path, kind: Any) -> None:
        published = root / "published"
        published.mkdir()
        (published / "config.json").write_text("{}")
        (published / "tokenizer.json").write_text("{}")
        (root / "token").write_text("s3cret")
        self.served = ServedFolder(root / "shm", published, shard_bytes=300)
        self.server, self.other = (WeightsServer(self.served.current) for _ in range(2))
        self.tokens: set[str | None] = set()
        transport = httpx.MockTransport(self.reply)
        self.reloads = [
            ServerReload(
                Endpoint(f"http://{node}:8000/v1", "tiny", kind, token_file=root / "token"), self.served, transport
            )
            for node in ("node", "other")
        ]

    def reply(self, request: httpx.Request) -> httpx.Response:
        self.tokens.add(request.headers.get("Authorization"))
        return (self.server if request.url.host == "node" else self.other)(request)

    def update(self, version: int, probe: Probe | None = None) -> None:
        self.served.own()
        with staged(self.served.version(version), 0, replace=True) as folder:
            self.served.describe(folder, self.served.write(folder, 0, tensors(version).items()), version)
        self.reload(version, probe)

    def reload(self, version: int, probe: Probe | None = None) -> None:
        asyncio.run(reload_all(self.reloads, self.served, version, probe))

    @property
    def versions(self) -> list[str]:
        return sorted(path.name for path in self.served.folder.iterdir())


@pytest.fixture(params=["vllm", "sglang", "mrl"])
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    return Setting(tmp_path, request.param)


def test_every_server_reads_every_tensor_of_each_version(setting: Setting) -> None:
    for version in (1, 2):
        setting.update(version)
        assert setting.server.has(tensors(version)) and setting.other.has(tensors(version))
        assert setting.versions == ["current", f"version-{version:06d}"]
    assert len([*setting.served.version(2).glob("*.safetensors")]) > 1  # in several files
    assert setting.tokens == {"Bearer s3cret"}


def test_servers_pause_and_clear_their_cache_and_mrl_learns_the_version(tmp_path: Path) -> None:
    for kind in ("vllm", "sglang", "mrl"):
        (tmp_path / kind).mkdir()
        setting = Setting(tmp_path / kind, kind)
        setting.update(3)
        current = str(setting.served.current)
        expected: dict[str, list[Any]] = {
            "vllm": [
                ("/pause?mode=keep", None),
                ("/collective_rpc", {"method": "reload_weights"}),
                ("/reset_prefix_cache?reset_running_requests=true", None),
                ("/resume", None),
            ],
            "sglang": [
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", {"model_path": current, "weight_version": "3", "flush_cache": True}),
                ("/continue_generation", {}),
            ],
            "mrl": [("/update_weights", {"version": 3})],
        }
        assert setting.server.calls == expected[kind]


def test_a_server_that_fails_to_reload_resumes_its_requests(tmp_path: Path) -> None:
    setting = Setting(tmp_path, "vllm")
    setting.server.refuses_path = "/reset_prefix_cache"
    with pytest.raises(ReloadFailed, match=r"/reset_prefix_cache\?reset_running_requests=true: .*false"):
        setting.update(1)
    assert setting.server.calls[-1] == ("/resume", None)


PROBE = Probe((1, 2, 3), (-1.0, -2.0), 0.1)


def test_a_server_that_samples_by_other_weights_is_named(setting: Setting) -> None:
    setting.server.logprobs = setting.other.logprobs = [-1.0, -2.01]
    setting.update(1, PROBE)
    setting.other.logprobs = [-1.0, -2.5]
    with pytest.raises(
        ReloadFailed, match=r"http://other:8000/v1 has read version 2, but samples by other weights.* 0\.25"
    ):
        setting.update(2, PROBE)
    assert setting.served.current.resolve() == setting.served.version(1)


def test_a_server_that_refuses_keeps_its_version_even_after_a_restart(setting: Setting) -> None:
    reply, message = httpx.Response(500, text="CUDA error"), "HTTP 500: CUDA error"
    setting.server.refuses = reply
    with pytest.raises(ReloadFailed, match=message):
        setting.update(1)
    assert not setting.served.current.is_symlink()
    setting.server.refuses = None
    setting.update(1)
    setting.server.refuses = reply
    with pytest.raises(ReloadFailed, match=message):
        setting.update(2)
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
    assert setting.other.has(tensors(1))
    setting.server = replies
    calls = [*setting.other.calls]
    setting.reload(1)
    assert setting.server.has(tensors(1))
    assert setting.other.calls == calls, "it has the version"


def test_a_vllm_without_development_mode_is_one_clear_error(tmp_path: Path) -> None:
    setting = Setting(tmp_path, "vllm")
    setting.server.refuses = httpx.Response(404)
    with pytest.raises(ReloadFailed, match="VLLM_SERVER_DEV_MODE=1"):
        setting.update(1)


def test_a_full_disk_keeps_the_previous_version(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_weights_are_not_written_to_a_folder_that_others_can_change(
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
        monkeypatch.setattr("megatron_rl.refit.served_folder.os.geteuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match=str(setting.served.folder)):
        setting.update(1)
    assert not [*setting.served.folder.iterdir()]


def test_a_new_folder_is_private(setting: Setting) -> None:
    setting.update(1)
    assert setting.served.folder.stat().st_mode & 0o777 == 0o700
