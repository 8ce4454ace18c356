"""`mrl prefetch` fetches the inputs of a recipe completely and once, and a dry run says what is missing.

huggingface_hub is the real one; the hub is a loopback server that answers the few requests it makes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from launcher.cli.main import main
from launcher.cli.prefetch import _fetch_all
from launcher.cluster.profile import Profile
from launcher.doctor.fetched import fetched
from launcher.errors import BadInput, Failed
from launcher.fetch.hub import explain, patterns
from launcher.fetch.needs import (
    Cache,
    Need,
    export_packages,
    fetch,
    import_image_on_login,
    needs,
    record_of,
    unreachable,
)
from launcher.recipe.load import load_recipe

pytestmark = pytest.mark.slow

pytest.importorskip("huggingface_hub", reason="an extra of mrl")

SMALL = "smollm2-135m-chain-sum"
"""A recipe that gives the shape of its model itself."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {  # of Qwen2.5-32B, as far as it matters
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
}
MODEL = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": b"weights" * 1000,
    "pytorch_model.bin": b"the same once more",
    "original/consolidated.pth": b"and again",
    "tokenizer.json": b'{"tokens": []}',
    "tokenizer_config.json": b"{}",
}
DATA = {"data/train.parquet": b"rows", "README.md": b"about"}


class Hub(ThreadingHTTPServer):
    """Repositories by `models/NAME` or `datasets/NAME`, and what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        self.server.tokens.add(self.headers.get("Authorization"))
        name = next((name for name in self.server.repositories if f"{name.removeprefix('models/')}/" in path), "")
        files = self.server.repositories.get(name, {})
        file = path.partition(f"/resolve/{COMMIT}/")[2]
        if path.startswith(f"api/{name}/revision/"):
            siblings = [{"rfilename": file} for file in files]
            self.say({"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"api/{name}/tree/"):
            self.say([self.entry(file, data) for file, data in files.items()])
        elif file in files:
            self.give(name, file, files[file])
        else:
            self.refuse(404, "RepoNotFound")

    def entry(self, file: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def give(self, name: str, file: str, data: bytes) -> None:
        self.server.asked.append(f"{self.command} {file}")
        if name in self.server.gated:
            self.refuse(403, "GatedRepo")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if file in self.server.broken else data)
            if file in self.server.broken:
                self.connection.close()

    def say(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("X-Error-Message", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving() -> Iterator[Hub]:
    server = Hub()
    server.repositories = {"models/org/model": MODEL, "datasets/org/data": DATA}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        environment.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        environment.setenv("HF_HUB_OFFLINE", "1")  # as a user may have it, for the job
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN"):
            environment.delenv(name, raising=False)
        yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@dataclass(frozen=True)
class Stock:
    """A run root that has org/data, fetched with a token, and what that left behind."""

    root: Path
    tokens: set[str | None]

    @property
    def cache(self) -> Cache:
        return Cache(self.root / "cache" / "images", self.root / "cache" / "huggingface")


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Stock:
    folder = tmp_path_factory.mktemp("stock")
    (folder / "own").mkdir()
    (folder / "own" / "token").write_text("hf_hunter2")
    with serving() as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(folder / "own"))
        made = Stock(folder / "root", server.tokens)
        assert fetch(Need("dataset", "org/data"), made.cache)
    return made


@pytest.fixture
def profile(tmp_path) -> Profile:
    return Profile.model_validate(
        {"gpus_per_node": 8, "run_root": str(tmp_path / "root"), "container": {"image": "org/image:1"}}
    )


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_model_is_fetched_once_without_its_copies_in_other_formats(hub, profile):
    cache, need = Cache.of(profile), Need("model", "org/model")
    assert cache.find(need) is None
    assert fetch(need, cache)
    assert names(cache.find(need)) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert cache.find(need).is_relative_to(profile.run_root)
    assert (cache.find(need) / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    hub.asked.clear()
    assert fetch(need, cache)
    assert not [request for request in hub.asked if request.startswith("GET")]


def test_without_internet_the_first_missing_item_is_one_error_at_once(profile, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        cache = Cache.of(profile)
        with pytest.raises(Failed) as failed:
            _fetch_all([Need("model", "acme/tiny"), Need("dataset", "acme/rows")], cache)
    text = str(failed.value)
    assert "cannot be reached from here: Connection refused; run mrl prefetch on a machine with internet" in text
    assert text.endswith("Missing: model acme/tiny, dataset acme/rows")


def test_a_hub_that_refuses_is_reached(hub):
    assert unreachable() == ""


def test_job_finds_fetched_data_offline(stock):
    from huggingface_hub import snapshot_download

    hub = stock.cache.huggingface / "hub"
    path = snapshot_download("org/data", repo_type="dataset", cache_dir=hub, local_files_only=True)
    assert names(Path(path)) == set(DATA)


def test_tokenizer_is_fetched_without_weights(hub, profile):
    cache, need = Cache.of(profile), Need("tokenizer", "org/model")
    assert fetch(need, cache)
    assert names(cache.find(need)) == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert cache.find(Need("model", "org/model")) is None


def test_partial_download_does_not_count(hub, profile, capfd):
    cache, need = Cache.of(profile), Need("model", "org/model")
    hub.broken.add("model.safetensors")
    assert not fetch(need, cache)
    assert cache.find(need) is None
    assert capfd.readouterr().err.count("error: model org/model:") == 1
    hub.broken.clear()
    assert fetch(need, cache)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nowhere", "the hub has no repository of this name, or it is private: export HF_TOKEN"),
        ("org/model", "accept its terms at https://huggingface.co/org/model"),
        ("not a name", "not a name on the hub"),
    ],
)
def test_refusal_is_one_line_with_a_remedy(hub, profile, capfd, name, words):
    hub.gated.add("models/org/model")
    assert not fetch(Need("model", name), Cache.of(profile))
    said = capfd.readouterr().err
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert words in error
    assert "Traceback" not in said


def test_token_of_the_user_is_used_and_not_stored(stock):
    assert "Bearer hf_hunter2" in stock.tokens
    written = [path.read_bytes() for path in stock.root.rglob("*") if path.is_file()]
    assert written
    assert not [text for text in written if b"hunter2" in text]


def test_record_moves_with_the_cache(stock, tmp_path):
    moved = Stock(tmp_path / "moved", set())
    shutil.copytree(stock.root, moved.root, symlinks=True)
    assert names(moved.cache.find(Need("dataset", "org/data"))) == set(DATA)
    shutil.rmtree(moved.cache.huggingface / "hub")
    assert moved.cache.find(Need("dataset", "org/data")) is None


def test_recipe_needs_each_image_model_and_dataset_once(profile):
    config = load_recipe("qwen2.5-32b-dapo").config
    assert needs(config, profile) == [
        Need("image", "org/image:1"),
        Need("model", "Qwen/Qwen2.5-32B"),
        Need("dataset", "BytedTsinghua-SIA/DAPO-Math-17k"),
        Need("dataset", "Maxwell-Jia/AIME_2024"),
    ]
    other = load_recipe("qwen2.5-32b-dapo", ["tokenizer.path=Qwen/Qwen2.5-7B", "image.reference=/images/a.sqsh"]).config
    assert Need("tokenizer", "Qwen/Qwen2.5-7B") in needs(other, profile)
    assert Need("image", "/images/a.sqsh") in needs(other, profile)
    local = load_recipe(SMALL, ["tokenizer.path=/models/qwen", "model.huggingface=/models/qwen"]).config
    assert needs(local, None) == []
    assert needs(load_recipe("demo").config, None) == []


def test_image_for_the_login_node_is_imported_before_submitting_or_nothing_is_submitted(profile, capfd, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    import_image_on_login(load_recipe("demo").config, profile)
    with pytest.raises(BadInput, match=r"image org/image:1 could not be imported here \(image\.import_on: login\)"):
        import_image_on_login(load_recipe("demo", ["image.import_on=login"]).config, profile)
    assert "enroot is not on PATH" in capfd.readouterr().err


PACKAGED = ["model.huggingface=package:no-such-weights", "tokenizer.path=package:no-such-weights"]


def test_files_of_a_package_are_exported_and_not_fetched(profile, capfd):
    config = load_recipe(SMALL, PACKAGED).config
    cache, need = Cache.of(profile), Need("model", "package:no-such-weights")
    assert [each for each in needs(config, profile) if each.package] == [need]
    notes = [one.text for one in fetched(load_recipe(SMALL, PACKAGED), profile) if one.level == "note"]
    assert "model package:no-such-weights is not in" in notes[-1] and "mrl-submit will export it first" in notes[-1]
    with pytest.raises(BadInput, match="model package:no-such-weights could not be exported here"):
        export_packages(config, profile)
    assert "error: the Python package no-such-weights is not installed here" in capfd.readouterr().err
    folder = cache.huggingface / "mrl" / "packages" / "no-such-weights"
    folder.mkdir(parents=True)
    assert cache.find(need) == folder
    export_packages(config, profile)
    assert capfd.readouterr().err == ""


def test_prefetch_fetches_everything_and_reports_it(hub, profile, tmp_path, monkeypatch):
    clusters = tmp_path / "clusters.yaml"
    lab = {"gpus_per_node": 8, "run_root": profile.run_root, "partition": "gpu", "container": None}
    clusters.write_text(yaml.safe_dump({"clusters": {"lab": lab}}))
    monkeypatch.setenv("MRL_CLUSTERS", str(clusters))
    monkeypatch.delenv("MRL_CLUSTER", raising=False)
    model = load_recipe("qwen2.5-32b-dapo").config.model.model_dump() | {"huggingface": "org/model"}
    asked = ["prefetch", "qwen2.5-32b-dapo", f"model={json.dumps(model)}"]
    asked += ["environment.args.train.path=org/data", "environment.args.evaluate.aime_2024.path=org/data"]
    before = CliRunner().invoke(main, [*asked, "--check"])
    assert before.exit_code == 1
    assert before.stdout.splitlines() == ["model org/model   missing", "dataset org/data  missing"]
    assert CliRunner().invoke(main, asked).exit_code == 0
    after = CliRunner().invoke(main, [*asked, "--check", "--json"])
    assert after.exit_code == 0
    rows = json.loads(after.stdout)["needs"]
    assert [row["kind"] for row in rows] == ["model", "dataset"]
    assert all(Path(row["path"]).is_dir() for row in rows)


def test_pickles_are_fetched_only_without_safetensors():
    assert "*.bin" in (patterns("model", ["a.safetensors", "a.bin"])[1] or [])
    assert "*.bin" not in (patterns("model", ["a.bin"])[1] or [])
    assert patterns("dataset", ["a.bin"]) == (None, None)


def test_missing_internet_is_reported():
    error = ConnectionError("[Errno 111] Connection refused")
    said = explain("model", "a/b", error)
    assert said.startswith("model a/b: [Errno 111] Connection refused; is there internet here?")


def test_unwritable_cache_is_named():
    error = PermissionError(13, "Permission denied", "/cache/hub")
    assert explain("model", "a/b", error) == "model a/b: /cache/hub: Permission denied"


def test_each_name_has_a_record_of_its_own(tmp_path):
    found = {record_of(tmp_path, kind, name) for kind in ("model", "tokenizer") for name in ("a/b", "a--c", "a")}
    assert len(found) == 6


def test_recipe_may_take_its_shape_from_a_model_not_fetched_yet(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    values = yaml.safe_load(load_recipe("demo").text) | {"model": {"init": "huggingface", "huggingface": "org/model"}}
    recipe = tmp_path / "my.yaml"
    recipe.write_text(yaml.safe_dump(values))
    for command in (["plan", str(recipe)], ["prefetch", str(recipe), "--check"]):
        refused = CliRunner().invoke(main, command)
        assert refused.exit_code == 2 and "`mrl prefetch RECIPE` fetches it" in refused.output
    assert CliRunner().invoke(main, ["prefetch", str(recipe)]).exit_code == 0
    assert CliRunner().invoke(main, ["prefetch", str(recipe), "--check"]).exit_code == 0
    planned = CliRunner().invoke(main, ["plan", str(recipe), "--json"])
    assert planned.exit_code == 0 and json.loads(planned.stdout)["model"]["vocabulary"] == 152064
