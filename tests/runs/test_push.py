"""`mrl push` brings a run's weights and a card to the hub: with huggingface_hub's own client, to a stand-in of the
hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from hf_helpers import PUBLISHED, publish, saved_run
from hub_server import READ, WRITE, Hub, Repository
from run_helpers import make_run
from safetensors.torch import load

from launcher.push import hub_upload
from launcher.push.card import MARK
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:httpx2"),  # huggingface_hub's use of it
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    with Hub().serving() as served:
        monkeypatch.setenv("HF_TOKEN", WRITE)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        address = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield served


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(f"{MARK}\n# mine\n")
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 1000)
    return folder


class Said(dict[str, Any]):
    code = 0


def child(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """Return the result of the process of `mrl push`, with its exit code."""
    capsys.readouterr()
    code = hub_upload.main(words)
    said = Said(json.loads(capsys.readouterr().out))
    said.code = code
    return said


def check(capsys: pytest.CaptureFixture[str], repo: str, private: str = "no", revision: str = "main") -> Said:
    return child(capsys, "check", repo, "--private", private, "--revision", revision)


def upload(capsys: pytest.CaptureFixture[str], folder: Path, revision: str = "main") -> Said:
    return child(capsys, "upload", "me/x", "--revision", revision, "--folder", str(folder), "--message", "Step 3")


def test_interrupted_push_continues_and_a_repeated_one_changes_nothing(
    hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(capsys, "x", private="yes") == {"repo": "me/x", "created": True}
    assert hub.models["me/x"].private and hub.models["me/x"].commits == []
    hub.room = 1
    said = upload(capsys, export)
    assert (said.code, hub.models["me/x"].branches["main"]) == (EXIT_CRASHED, {})
    assert "Error while uploading 'model-0000" in said["error"]
    assert said["error"].endswith("the same command continues where this one stopped")
    hub.room = 1  # the other file
    assert upload(capsys, export)["changed"]
    assert hub.models["me/x"].branches["main"] == {
        str(file.relative_to(export)): file.read_bytes() for file in export.rglob("*")
    }
    again = upload(capsys, export)
    assert (again.code, again["changed"], len(hub.models["me/x"].commits)) == (EXIT_FINISHED, False, 1)


def test_second_set_of_weights_is_removed_and_a_card_of_the_user_stays(
    hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"model-00001-of-00001.safetensors": b"old", "notes.txt": b"mine", "README.md": b"# Written by me"}
    hub.models["me/x"] = Repository(branches={"main": dict(old)})
    said = upload(capsys, export)
    assert said["card_kept"]
    files = hub.models["me/x"].branches["main"]
    assert "model-00001-of-00001.safetensors" not in files
    assert (files["notes.txt"], files["README.md"]) == (b"mine", b"# Written by me")
    assert sum(name.endswith(".safetensors") for name in files) == 2


def test_revision_is_a_branch(hub: Hub, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert check(capsys, "me/x", revision="step-3").code == EXIT_FINISHED
    upload(capsys, export, revision="step-3")
    assert hub.models["me/x"].branches["main"] == {} and "config.json" in hub.models["me/x"].branches["step-3"]


@pytest.mark.parametrize(
    ("repo", "private", "token", "error"),
    [
        ("me/x", "no", "", "the hub needs a token: export HF_TOKEN, or run `hf auth login`"),
        ("me/x", "no", "hf_old", "the hub does not accept your token"),
        ("me/public", "no", READ, "your token may not write to me/public: it needs the right to write"),
        ("you/x", "no", WRITE, "you must be a member of you"),
        ("me/data", "no", WRITE, "me/data is a data set of the hub, and mrl push uploads models"),
        ("me/public", "yes", WRITE, "--private: me/public exists and is public"),
    ],
)
def test_what_may_not_be_uploaded_is_refused_before_the_conversion(
    repo: str,
    private: str,
    token: str,
    error: str,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.models["me/public"] = Repository()
    hub.repositories["datasets"]["me/data"] = Repository()
    monkeypatch.setenv("HF_TOKEN", token)
    said = check(capsys, repo, private)
    assert said.code == EXIT_USAGE and error in said["error"]
    assert hub.models.keys() == {"me/public"} and hub.models["me/public"].commits == []


def mrl_push(hub: Hub, home: Path, *words: str | Path) -> tuple[int, str, str]:
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITE, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    process = Command(["mrl", "push", *words], env=env)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


@pytest.mark.slow
def test_run_is_converted_once_and_pushed_with_a_card_of_its_record(
    hub: Hub, tmp_path: Path, platform: Any, groups: Any
) -> None:
    publish(tmp_path / "hf", PUBLISHED["Qwen2"])
    (tmp_path / "hf" / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    checkpoint = saved_run(tmp_path / "hf", tmp_path / "run", platform)
    run = RunDir(tmp_path / "run")
    append(run.metrics, MetricsLine(1, {"mean_reward": 0.25}))
    code, out, err = mrl_push(hub, tmp_path, run.root, "me/x")
    assert code == EXIT_FINISHED, err
    assert out.splitlines()[-1].startswith(f"{hub.url}/me/x/commit/")
    files = hub.models["me/x"].branches["main"]
    card = files["README.md"].decode()
    assert card.startswith("---\nlicense: mit\n") and "| 1 | 0.25 |" in card and str(tmp_path) not in card
    weights = {name for file, text in files.items() if file.endswith(".safetensors") for name in load(text)}
    assert "model.embed_tokens.weight" in weights and "tokenizer.json" in files
    code, out, err = mrl_push(hub, tmp_path, f"{run.root}@{int(checkpoint.name[5:])}", "me/x", "--json")
    assert code == EXIT_FINISHED and "converting" not in err
    assert (json.loads(out)["changed"], len(hub.models["me/x"].commits)) == (False, 1)


@pytest.mark.slow
def test_run_without_a_checkpoint_and_a_name_of_another_type_are_refused(hub: Hub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code, _, err = mrl_push(hub, tmp_path, run.root, "me/x")
    assert (code, err) == (EXIT_USAGE, f"error: {run.root}: has no checkpoint yet\n")
    code, _, err = mrl_push(hub, tmp_path, run.root, "https://huggingface.co/datasets/me/x")
    assert code == EXIT_USAGE and "datasets/ is not part of the name of a model" in err


@pytest.mark.slow
def test_adapters_are_pushed_alone(hub: Hub, tmp_path: Path) -> None:
    short = ["training.steps=1", "model.supervised.steps=1", "evaluation.every=0", "model.lora.rank=4"]
    process = Command(["mrl-submit", "demo", *short, "--run-dir", tmp_path / "run"])
    process.communicate(timeout=240)
    code, _, err = mrl_push(hub, tmp_path, tmp_path / "run", "me/x", "--adapters", "--license", "mit")
    assert code == EXIT_FINISHED, err
    files = hub.models["me/x"].branches["main"]
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert b"license: mit\nlibrary_name: peft" in files["README.md"]
