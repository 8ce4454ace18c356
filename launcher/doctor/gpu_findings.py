"""Findings about the GPUs of this machine: what a run on them lacks, and how to get it. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from launcher.backends.local import LocalMachine
from launcher.backends.probe.gpus import GpuFacts, Version
from launcher.doctor.finding import DoctorFinding, count, error, ok, warning
from launcher.plan.summary import TIGHT
from megatron_rl.contract.text import size
from megatron_rl.recipe.config import RunConfig

LEAST_DRIVER: dict[int, Version] = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Oldest Linux driver that runs programs built for any minor release of a CUDA (CUDA Compatibility, NVIDIA)."""
PIP = f"{sys.executable} -m pip"


def gpu_findings(
    machine: LocalMachine, gpus: GpuFacts, config: RunConfig, needed_bytes: int | None
) -> Iterator[DoctorFinding]:
    """Yield findings about a recipe for GPUs.

    Args:
        needed_bytes: memory that the fullest GPU needs by the plan; None: unknown.
    """
    yield _number(machine, gpus, config)
    yield from shared_gpus(gpus.compute_mode, config)
    if gpus.torch is not None:
        yield from _torch(gpus)
    if machine.gpus and gpus.memory_bytes and needed_bytes:
        yield _memory(gpus, config, gpus.memory_bytes, needed_bytes)


def _number(machine: LocalMachine, gpus: GpuFacts, config: RunConfig) -> DoctorFinding:
    ranks, job = config.job.world_size, config.job
    wanted = f"{config.name} needs {count(ranks, 'GPU')}"
    if job.most_nodes > 1:
        wanted += f" (job.nodes {job.nodes} x job.gpus_per_node {job.gpus_per_node})"
    if ranks <= machine.gpus:
        return ok("gpus", f"{wanted}; this machine has {machine.gpus}" + (f": {gpus.name}" if gpus.name else ""))
    ways = "--cluster NAME submits it to a Slurm cluster, and `mrl plan` shows what it needs there"
    if machine.gpus:
        ways += f"; or use what is here: job.nodes=1 job.gpus_per_node={machine.gpus}"
    else:
        if gpus.driver is None:
            ways += "; if there is a GPU, install NVIDIA's driver, until `nvidia-smi` shows it"
        else:
            ways += "; a driver is there: unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (--gpus all)"
        ways += "; job.device=cpu job.nodes=1 job.gpus_per_node=1 runs a small model without a GPU"
    return error("gpus", f"{wanted}, and this machine has {machine.gpus or 'none'}", ways)


def shared_gpus(compute_mode: str | None, config: RunConfig) -> Iterator[DoctorFinding]:
    """Say that a GPU in this mode refuses processes of the run. compute_mode: see GpuFacts."""
    text = f"a GPU is in compute mode {compute_mode}"
    default = "`nvidia-smi -c DEFAULT` as root changes that; on a cluster, ask its administrators"
    if compute_mode == "Prohibited":
        yield error("gpus", f"{text}, in which no process can use it", default)
    elif compute_mode is not None and config.shares_devices:
        text += f" for one process, and {config.name} has vLLM and a training rank share each GPU"
        yield error("gpus", text, f"{default}. Or take other GPUs for vLLM: placement.mode: partitioned")


def _torch(gpus: GpuFacts) -> Iterator[DoctorFinding]:
    if gpus.torch_cuda is None:
        fix = f"{PIP} install --force-reinstall --index-url https://download.pytorch.org/whl/cu128 torch"
        yield error("torch", f"torch {gpus.torch} is built for processors alone", fix)
        return
    least, built = LEAST_DRIVER.get(gpus.torch_cuda[0]), ".".join(map(str, gpus.torch_cuda))
    if gpus.driver is None or least is None or gpus.driver >= least:
        yield ok("torch", f"{gpus.torch}, for CUDA {built}")
        return
    driver, wanted = (".".join(map(str, each)) for each in (gpus.driver, least))
    yield error(
        "driver",
        f"NVIDIA's driver {driver} is too old for torch {gpus.torch}, which is built for CUDA {built} and needs "
        f"{wanted} or later",
        f"update the driver, or install a torch for an older CUDA: {PIP} install --force-reinstall --index-url "
        "https://download.pytorch.org/whl/cu126 torch",
    )


def _memory(gpus: GpuFacts, config: RunConfig, has: int, needed: int) -> DoctorFinding:
    says = f"one GPU needs about {size(needed)} by the estimate of `mrl plan`, and {gpus.name} has {size(has)}"
    smaller = (
        "lower training.tokens_per_microbatch, inference.max_batch or inference.cache_tokens"
        + ("" if config.offload == "optimizer" else ", set placement.offload: optimizer")
        + ", or use more GPUs"
    )
    if needed > has:
        return error("gpu memory", says, smaller)
    if needed > TIGHT * has:
        return warning("gpu memory", f"{says}: too close for an estimate", smaller)
    return ok("gpu memory", says)
