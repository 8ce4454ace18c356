"""Findings about the GPUs of this machine say what a run lacks, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.backends.local import LocalMachine
from launcher.backends.probe import gpus as probe
from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.gpus import GpuFacts, inspect_gpus
from launcher.doctor.finding import DoctorFinding
from launcher.doctor.gpu_findings import gpu_findings
from launcher.plan.summary import fullest_gpu, make_plan
from launcher.recipe.load import load_recipe

GIB = 2**30
ONE, NONE = (LocalMachine(cpus=16, gpus=count, memory_bytes=64 * GIB, free_bytes=60 * GIB) for count in (1, 0))
L4 = GpuFacts("NVIDIA L4", 23034 * 2**20, (550, 54, 15), "2.8.0+cu128", (12, 8))


def found(
    machine: LocalMachine,
    gpus: GpuFacts,
    needed: float | None = None,
    recipe: str = "qwen3-0.6b-gsm8k",
    engine: str = "auto",
) -> list[DoctorFinding]:
    of_plan = None if needed is None else int(needed * GIB)
    config = load_recipe(recipe, [f"inference.engine={engine}"]).config
    return list(gpu_findings(machine, gpus, config, of_plan))


def errors(*arguments: object, **further: object) -> str:
    return "\n".join(f"{one.text}; {one.fix}" for one in found(*arguments, **further) if one.level == "error")  # type: ignore[arg-type]


def test_a_machine_with_what_a_recipe_needs_has_nothing_against_it() -> None:
    recipe = load_recipe("qwen3-0.6b-gsm8k")
    needed = fullest_gpu(recipe.config, make_plan(recipe, None).sizes)
    assert needed is not None and needed < 23034 * 2**20
    assert {one.level for one in found(ONE, L4, needed / GIB)} == {"ok"}


def test_a_gpu_that_is_not_seen_is_one_without_a_driver_or_hidden() -> None:
    assert "this machine has none" in errors(NONE, GpuFacts())
    assert "install NVIDIA's driver" in errors(NONE, GpuFacts())
    assert "unset CUDA_VISIBLE_DEVICES" in errors(NONE, L4)
    assert "job.nodes=1 job.gpus_per_node=1" in errors(ONE, L4, recipe="qwen2.5-7b-gsm8k")


def test_a_torch_for_processors_is_replaced() -> None:
    said = errors(ONE, GpuFacts("NVIDIA L4", 23034 * 2**20, (550, 54, 15), "2.8.0+cpu", None))
    assert "torch 2.8.0+cpu is built for processors alone" in said
    assert "--index-url https://download.pytorch.org/whl/cu128 torch" in said


@pytest.mark.parametrize(
    ("driver", "cuda", "fits"), [((525, 60, 13), (12, 8), True), ((470, 1), (12, 8), False), ((570, 1), (13, 0), False)]
)
def test_a_driver_is_as_new_as_the_cuda_of_torch_needs(
    driver: tuple[int, ...], cuda: tuple[int, ...], fits: bool
) -> None:
    said = errors(ONE, GpuFacts("NVIDIA L4", 23034 * 2**20, driver, "2.13.0", cuda))
    assert ("is too old for torch 2.13.0" in said) is not fits


def test_a_gpu_for_one_process_is_an_error_where_vllm_and_a_rank_share_it() -> None:
    exclusive = replace(L4, compute_mode="Exclusive_Process")
    said = errors(ONE, exclusive, engine="vllm")
    assert (
        "in compute mode Exclusive_Process for one process, and qwen3-0.6b-gsm8k has vLLM and a training rank share"
        in said
    )
    assert "`nvidia-smi -c DEFAULT`" in said
    assert "placement.mode: partitioned" in said
    assert "compute mode" not in errors(ONE, exclusive, engine="native")
    assert "no process can use it" in errors(ONE, replace(L4, compute_mode="Prohibited"), engine="native")


def test_too_little_memory_is_an_error_and_hardly_enough_a_warning() -> None:
    assert "one GPU needs about 30 GiB" in errors(ONE, L4, 30)
    (close,) = (one for one in found(ONE, L4, 22) if one.topic == "gpu memory")
    assert close.level == "warning"


def test_driver_torch_and_the_smallest_gpu_are_read_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "NVIDIA H100 80GB HBM3, 81559, Default\nNVIDIA L4, 23034, Exclusive_Process\n"
    monkeypatch.setattr(probe, "ask", lambda command, limit_s: CommandAnswer(said))
    driver = tmp_path / "proc" / "driver" / "nvidia" / "version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "version.py").write_text(
        "__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    facts = inspect_gpus(tmp_path, torch)
    assert (facts.name, facts.memory_bytes) == ("NVIDIA L4", 23034 * 2**20)
    assert facts.compute_mode == "Exclusive_Process"
    assert (facts.driver, facts.torch_cuda) == ((535, 104, 5), (12, 8))
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert inspect_gpus(tmp_path, torch).torch_cuda is None


def test_without_a_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ask", lambda command, limit_s: CommandAnswer(failure="no such command", there=False))
    facts = inspect_gpus(tmp_path, tmp_path)
    assert (facts.name, facts.memory_bytes, facts.driver, facts.torch_cuda) == (None, None, None, None)
