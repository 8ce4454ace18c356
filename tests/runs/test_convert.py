"""`mrl convert` as its users see it: messages, exit codes, and no partial output that looks complete."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from hf_helpers import PUBLISHED, publish, saved_run
from run_helpers import make_run
from safetensors.torch import load_file
from waiting import until

from megatron_rl.contract.codes import EXIT_INTERRUPTED, EXIT_USAGE

WIDE = PUBLISHED["Qwen2"] | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}  # 0.25 GB


def start(*arguments: str | Path, direction: str = "megatron-to-hf") -> Command:
    return Command(["mrl", "convert", direction, *arguments])


def convert(*arguments: str | Path, direction: str = "megatron-to-hf") -> tuple[int, str, str]:
    """Return exit code, stdout and stderr."""
    process = start(*arguments, direction=direction)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "hf"
    publish(folder, PUBLISHED["Qwen2"])
    return folder


@pytest.fixture(scope="module")
def checkpoint(published: Path, platform: Any, groups: Any) -> Path:
    return saved_run(published, published.parent / "run", platform)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, platform: Any, groups: Any) -> Path:
    folder = tmp_path_factory.mktemp("large")
    publish(folder / "hf", WIDE, shard="200MB")
    return saved_run(folder / "hf", folder / "run", platform)


@pytest.mark.slow
def test_weights_converted_to_a_checkpoint_and_back_are_unchanged(tmp_path: Path, published: Path) -> None:
    code, out, err = convert(published, tmp_path / "m", direction="hf-to-megatron")
    assert (code, err) == (0, "") and out.startswith(f"{tmp_path / 'm'}: ")
    code, out, _ = convert(tmp_path / "m", tmp_path / "back", "--shard-size", "20KB", "--json")
    assert code == 0
    said = json.loads(out)
    assert (said["source"], said["target"]) == (str(tmp_path / "m"), str(tmp_path / "back"))
    before, after = tensors_of(published), tensors_of(tmp_path / "back")
    assert said["bytes"] == sum(tensor.nbytes for tensor in before.values())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    error = f"error: SRC {tmp_path / 'none'}: no such directory; give one that holds config.json\n"
    assert convert(tmp_path / "none", tmp_path / "n", direction="hf-to-megatron") == (EXIT_USAGE, "", error)


@pytest.mark.slow
def test_weights_of_a_run_are_those_of_its_checkpoint(tmp_path: Path, published: Path, checkpoint: Path) -> None:
    code, out, err = convert(checkpoint.parent.parent, tmp_path / "of-run")
    assert (code, err) == (0, "") and out.startswith(f"{tmp_path / 'of-run'}: ")
    assert out.rstrip().endswith(f", from {checkpoint}")
    assert tensors_of(tmp_path / "of-run").keys() == tensors_of(published).keys()
    young = make_run(tmp_path / "run")
    code, _, err = convert(young.root, tmp_path / "of-young")
    assert (code, "run has no checkpoint yet" in err) == (EXIT_USAGE, True)


def test_missing_size_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code, _, err = convert(tmp_path / "run", tmp_path / "m", "--shard-size", "5")
    assert code == EXIT_USAGE and "'5' is not a size such as 5GB" in err
    assert not list(tmp_path.iterdir())


def wait_for_writing(folder: Path, process: Command) -> None:
    def writes() -> bool:
        assert process.poll() is None, process.communicate()
        return any(path.is_file() and path.stat().st_size > 10**6 for path in folder.rglob("*.safetensors"))

    until(writes, "weights are written", 120.0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "TERM", "KILL"])
def test_interrupted_conversion_leaves_no_output(
    tmp_path: Path, large: Path, checkpoint: Path, number: signal.Signals
) -> None:
    process = start(large, tmp_path / "m", "--shard-size", "50MB")
    wait_for_writing(tmp_path, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    wait_for_the_end_of_converters(tmp_path)
    left = [path.name for path in tmp_path.iterdir()]
    if number == signal.SIGINT:
        assert (process.returncode, err.strip(), left) == (EXIT_INTERRUPTED, "interrupted", [])
    assert all(name.endswith(".tmp") for name in left)
    if number == signal.SIGKILL:
        code, _, err = convert(checkpoint, tmp_path / "m")
        assert (code, err.count("warning: "), str(tmp_path / left[0]) in err) == (0, 1, True), err
        assert {path.name for path in tmp_path.iterdir()} == {"m", *left}, "it left files of its own"


def wait_for_the_end_of_converters(folder: Path) -> None:
    """Wait until no converter process is left: it ends with the command, even if that is killed."""
    until(
        lambda: not any(str(folder).encode() in command_of(process) for process in Path("/proc").glob("[0-9]*")),
        "the converter ends with its command",
    )


def command_of(process: Path) -> bytes:
    with suppress(OSError):  # it has ended
        return (process / "cmdline").read_bytes()
    return b""
