"""Findings about vLLM: its version in the Python of its replicas. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from launcher.backends.probe.vllm_probe import VllmFacts
from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image
from launcher.doctor.finding import DoctorFinding, error, note, ok, warning
from launcher.documents import documents
from megatron_rl.contract.paths import INFER
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.fixed_models import VLLM_SECTIONS
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_releases import CPU_BUILD, TRIED, distribution_of, nearest, untried

OLDEST_PYTHON = (3, 11)


OF_IMAGES = "torchvision torchaudio torchcodec"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def vllm_findings(facts: VllmFacts, device: str, vllm: VllmConfig | None, kind: str = INFER) -> Iterator[DoctorFinding]:
    """Yield findings about the Python that is to run vLLM.

    Args:
        vllm: settings of the recipe.
        kind: of the replicas that it is for.
    """
    version = (facts.version or TRIED[-1]) + (CPU_BUILD if device == "cpu" else "")
    fix = _install(version, f"{VLLM_SECTIONS[kind]}.python=")
    where = f"{facts.python} {facts.where}"
    if facts.unasked is not None:
        yield note("vllm", f"not checked: {facts.unasked}", "mrl prefetch imports the image")
    elif facts.failure is not None:
        yield error("vllm", f"{where}, which is to run vLLM, does not start: {facts.failure}", fix)
    elif facts.release < OLDEST_PYTHON:
        release = ".".join(map(str, facts.release))
        yield error("vllm", f"{where} is Python {release}, and mrl needs 3.11 or later", fix)
    elif facts.version is None:
        yield error("vllm", f"{where} has no vLLM", fix)
    elif why := untried(version, newer=vllm is not None and vllm.newer):
        yield error("vllm", f"{where}: {why}", fix)
    elif facts.lacking:
        command = shlex.join([facts.python, "-m", "pip", "install", *facts.lacking])
        yield error("vllm", f"{where} lacks {', '.join(facts.lacking)}, which a replica imports", command)
    elif _build(facts.torch) == "cpu" != _build(facts.torchvision) and facts.torchvision is not None:
        text = f"{where} has torch {facts.torch}, and its torchvision {facts.torchvision} cannot be imported beside it"
        yield error("vllm", text, f"{facts.python} -m pip uninstall -y {OF_IMAGES}; answers of text do not need them")
    elif facts.version.partition("+")[0] not in TRIED:
        text = f"{where} has vLLM {facts.version}; {', '.join(TRIED)} are the releases that were tried"
        yield warning("vllm", text, "each swap of weights is checked, so a wrong one shows within a step")
    else:
        yield ok("vllm", f"{facts.version}, {where}")


def _build(version: str | None) -> str:
    """Device that a package is built for, such as cpu or cu130; empty: its version does not say."""
    return (version or "").partition("+")[2]


def quantised_findings(config: RunConfig) -> Iterator[DoctorFinding]:
    """Say whether a vLLM that samples with 8 bits is corrected for."""
    vllm = config.inference.own_vllm
    if vllm is None or not (beyond := vllm.precision.beyond(config.model.dtype)):
        return
    options, importance = " and ".join(beyond), config.grpo.importance
    text = f"inference.vllm.args has {options}, so vLLM samples from a slightly other distribution than the trained one"
    look = "inference_logprob_difference shows by how much"
    if importance is None:
        yield warning("vllm", text, f"leave out grpo.importance: null, since importance weights correct for it; {look}")
    else:
        bounds = {"lower": importance.lower, "upper": importance.upper}
        given = " ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
        yield note("vllm", f"{text}. Importance weights correct for it (grpo.importance: {given}); {look}")


def vllm_later(config: RunConfig, profile: Profile) -> DoctorFinding:
    image = replica_image(config, profile) or rank_image(config, profile)
    text = f"not checked in {image}: each replica checks its version when it starts, and the run ends if none can"
    return note("vllm", text, "--deep starts the container and asks it")


def _install(version: str, named: str) -> str:
    """Command that installs the tried vLLM that is nearest to a version into a separate environment, as README.md does,
    and the option that names its Python. `named`: that option, up to its value."""
    package, release = distribution_of(version), nearest(version)
    on_cpu = version.endswith(CPU_BUILD)
    index = f"--extra-index-url {CPU_INDEX} " if on_cpu else ""
    pins = f"constraints-{package}{'' if release == TRIED[-1] else f'-{release}'}.txt"  # that were tried together
    file = folder / "containers" / pins if (folder := documents()) else None
    constraints = f"-c {shlex.quote(str(file))} " if file and file.is_file() else ""
    commands = [
        f"{shlex.quote(sys.executable)} -m venv $HOME/vllm",
        f"$HOME/vllm/bin/pip install {index}{constraints}{package}=={release}",
    ]
    if on_cpu:  # the index may be out of reach, and PyPI's builds of these are for CUDA
        commands.append(f"$HOME/vllm/bin/pip uninstall -y {OF_IMAGES}")
    return f"`{' && '.join(commands)}`, then add {named}$HOME/vllm/bin/python"
