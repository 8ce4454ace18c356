"""Checks before anything starts on this machine: packages, GPUs, memory, files. `mrl doctor` shows all of them; a
command that starts something refuses all errors at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.backends.local import LocalMachine, inspect
from launcher.backends.probe.gpus import GpuFacts, inspect_gpus
from launcher.backends.probe.vllm_probe import Unasked, VllmFacts, probe, refused_options
from launcher.cluster.profile import Profile
from launcher.cluster.software import replica_python
from launcher.doctor.finding import DoctorFinding, count, error, note, ok, warning
from launcher.doctor.gpu_findings import gpu_findings
from launcher.doctor.vllm_python import quantised_findings, vllm_findings
from launcher.errors import BadInput
from launcher.fetch.needs import Cache, Need, needs, only_begins
from launcher.plan.gpu_memory import least_host_bytes
from launcher.plan.summary import fullest_gpu, make_plan
from launcher.recipe.load import Recipe, place_of
from launcher.recipe.paths import NamedPath, read_paths
from megatron_rl.contract.manifest import MANIFEST, CheckpointError, read_manifest
from megatron_rl.contract.text import size
from megatron_rl.recipe.adapters import check_whole
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.data_files import is_text_file
from megatron_rl.recipe.extras import OF_RANKS, install_command, is_installed, missing, names
from megatron_rl.recipe.fixed_models import VLLM_SECTIONS
from megatron_rl.recipe.hf_config import CONFIG_FILE
from megatron_rl.recipe.hub import package_of
from megatron_rl.recipe.registry import required_extras
from megatron_rl.recipe.vllm import VllmConfig


@dataclass(frozen=True, slots=True)
class Packages:
    names: tuple[str, ...]
    install: str


@dataclass(frozen=True, slots=True)
class LocalFacts:
    machine: LocalMachine
    packages: Packages
    refusals: tuple[str, ...]
    absent: tuple[DoctorFinding, ...]
    least_bytes: int
    vllms: Mapping[str, VllmFacts] = field(default_factory=dict)
    vllm_options: tuple[DoctorFinding, ...] = ()
    gpus: GpuFacts = field(default_factory=GpuFacts)
    gpu_bytes: int | None = None
    """Memory that the fullest GPU needs by the plan; None: unknown, or no GPU is asked for."""


def collect_local(recipe: Recipe | None, resumes: bool = False) -> LocalFacts:
    """Inspect this machine for a recipe, or for any run. Imports none of the packages and uses no network."""
    if recipe is None:
        return LocalFacts(inspect(), _missing([OF_RANKS]), (), (), 0)
    refusals: tuple[str, ...] = ()
    bytes_needed, of_gpu = 0, None
    try:
        plan = make_plan(recipe, None)
        bytes_needed = least_host_bytes(recipe.config, plan.sizes)
        of_gpu = fullest_gpu(recipe.config, plan.sizes)
    except BadInput as refused:
        refusals = tuple(refused.problems)
    config = recipe.config
    vllms = [*vllm_of(config, None)]
    return LocalFacts(
        inspect(),
        missing_packages(config),
        refusals,
        tuple(absent_files(recipe, resumes)),
        bytes_needed,
        {kind: facts for kind, facts, _ in vllms},
        tuple(finding for *_, found in vllms for finding in found),
        inspect_gpus() if config.job.device == "cuda" else GpuFacts(),
        of_gpu,
    )


def vllm_of(config: RunConfig, profile: Profile | None) -> Iterator[tuple[str, VllmFacts, tuple[DoctorFinding, ...]]]:
    """Yield each kind of replicas that have vLLM, with the facts about its Python on this machine and errors for
    options that vLLM's own parser refuses."""
    for kind, vllm in config.started_vllms.items():
        python = replica_python(config, profile, kind)
        facts = probe(python)
        usable = facts.version is not None and not facts.lacking
        yield kind, facts, tuple(refused_by_vllm(kind, vllm, python)) if usable else ()


def refused_by_vllm(kind: str, vllm: VllmConfig, python: str) -> Iterator[DoctorFinding]:
    section = VLLM_SECTIONS[kind]
    try:
        refused = refused_options(python, vllm.args)
    except Unasked as why:
        yield note("vllm", f"{section}.args: not checked, because {python} gave no answer: {why}")
        return
    for name, reason in refused.items():
        yield error("vllm", f"{section}.args.{name}: vLLM refuses it: {reason}", SERVE_HELP)


SERVE_HELP = "leave it out or correct it; `vllm serve --help=all` lists the options"


def extras_of(config: RunConfig) -> list[str]:
    found = [OF_RANKS, *(required_extras(config.task) if config.generates else [])]
    if config.data and not all(map(is_text_file, config.data.paths)):
        found.append("data")
    if config.tokenizer.type == "huggingface" or config.model.init == "huggingface":
        found.append("huggingface")
    return [*found, *config.logging.trackers]


def missing_packages(config: RunConfig) -> Packages:
    cache = Cache.of(None)
    brought = [need.package for need in needs(config, None) if need.package and not cache.holds(need)]
    of_weights = [name for name in brought if name in names("smollm2")]
    found = _missing([*extras_of(config), *(["smollm2"] if of_weights else [])])
    others = [name for name in brought if name not in of_weights and not is_installed(name)]
    if not others:
        return found
    commands = [found.install, shlex.join(["pip", "install", *others])]
    return Packages((*found.names, *others), " && ".join(filter(None, commands)))


def _missing(extras: Iterable[str]) -> Packages:
    wanted = [extra for extra in dict.fromkeys(extras) if missing([extra])]
    return Packages(tuple(missing(wanted)), install_command(*wanted) if wanted else "")


def absent_files(recipe: Recipe, resumes: bool = False) -> Iterator[DoctorFinding]:
    for named in read_paths(recipe.config, resumes):
        if named.path is not None and (found := file_error(recipe, named, named.path)):
            yield found
    cache = Cache.of(None)
    for need in needs(recipe.config, None):
        if not need.package and not cache.holds(need) and not (resumes and only_begins(need, recipe.config)):
            fetch = f"`{shlex.join(['mrl', 'prefetch', recipe.asked, *recipe.overrides])}` fetches it from the hub"
            yield error("files", f"{need} is neither a file nor a repository in {cache.huggingface}", fetch)


def file_error(recipe: Recipe, named: NamedPath, path: Path) -> DoctorFinding | None:
    key = ".".join(named.key)
    place = f"{place_of(recipe, key)}: "
    if why := unreadable(path):
        return error("files", f"{place}{key}: {named.path}: {why}", "correct the path")
    if why := _no_initial_weights(recipe, key, path):
        return DoctorFinding("error", "files", f"{place}{why}")
    return None


def unreadable(path: Path) -> str | None:
    try:
        path.stat()
    except OSError as refused:
        return (refused.strerror or str(refused)).lower()
    return None if os.access(path, os.R_OK) else "no permission to read it"


def _no_initial_weights(recipe: Recipe, key: str, path: Path) -> str | None:
    """Return why a model cannot start from a checkpoint; None if it can, or if the key names something else."""
    starts = key == "model.checkpoint" and recipe.config.model.init == "checkpoint"
    if not starts and not (key == "distill.teacher" and (path / MANIFEST).is_file()):
        return None
    try:
        check_whole(path, read_manifest(path).meta, key)
    except CheckpointError as unusable:
        return f"{key}: {unusable}"
    except ValueError as refused:
        return str(refused)
    return None


def findings(facts: LocalFacts, config: RunConfig | None) -> Iterator[DoctorFinding]:
    for refusal in facts.refusals:
        yield DoctorFinding("error", "recipe", refusal)  # the text says what to change
    yield packages(facts.packages)
    if config is not None:
        for kind, vllm in facts.vllms.items():
            yield from vllm_findings(vllm, config.job.device, config.started_vllms[kind], kind)
        yield from facts.vllm_options
        yield from quantised_findings(config)
    if config is not None and config.job.device == "cuda":
        yield from gpu_findings(facts.machine, facts.gpus, config, facts.gpu_bytes)
    else:
        yield from processors(facts.machine, config)
    if config is not None:
        yield from arithmetic(facts.machine, config)
        yield from memory(facts.machine, config, facts.least_bytes)
    yield from facts.absent


def packages(found: Packages) -> DoctorFinding:
    if found.names:
        return error("packages", f"not installed: {', '.join(found.names)}", found.install)
    return ok("packages", "all packages of the ranks are installed")


def processors(machine: LocalMachine, config: RunConfig | None) -> Iterator[DoctorFinding]:
    if config is None:
        yield ok("processors", f"{count(machine.cpus, 'CPU')}, {count(machine.gpus, 'GPU')}")
        return
    ranks, job = config.job.world_size, config.job
    threads = ranks * job.threads_per_rank
    if threads > machine.cpus:
        yield note(
            "cpus",
            f"{count(ranks, 'rank')} of {count(job.threads_per_rank, 'thread')} share {count(machine.cpus, 'CPU')}: "
            "it runs more slowly, with the same result",
        )
    else:
        yield ok("cpus", f"{count(threads, 'thread')} for {count(machine.cpus, 'CPU')}")


def arithmetic(machine: LocalMachine, config: RunConfig) -> Iterator[DoctorFinding]:
    if config.job.device == "cpu" and config.model.dtype == "bf16" and machine.multiplies_bf16 is False:
        yield warning(
            "arithmetic",
            "model.dtype is bf16, for which the processors of this machine have no instructions: steps take up to "
            "twenty times as long as in fp32",
            "model.dtype=fp32 is faster here; it needs up to twice the memory (job.memory_gib)",
        )


def memory(machine: LocalMachine, config: RunConfig, least: int) -> Iterator[DoctorFinding]:
    measured = config.job.memory_gib
    needed = int(measured * 2**30) if measured else least
    if config.job.device != "cpu" or machine.memory_bytes is None or not needed:
        return
    says = f"{config.name} needs {'' if measured else 'at least '}{size(needed)}" + (
        " (job.memory_gib)"
        if measured
        else f" for {'vLLM, ' * bool(config.started_vllms)}weights, gradients and Adam's state"
    )
    smaller = "use a machine with more memory, a smaller model or fewer ranks (job.gpus_per_node)"
    if needed > machine.memory_bytes:
        yield error("memory", f"{says}, and this machine has {size(machine.memory_bytes)}", smaller)
    elif machine.free_bytes is not None and needed > machine.free_bytes:
        text = f"{says}, and {size(machine.free_bytes)} of {size(machine.memory_bytes)} are free: it may be killed"
        yield warning("memory", text, "end other work first")
    else:
        yield ok("memory", f"{says}, of {size(machine.free_bytes or machine.memory_bytes)} free")


def _extras_of_policy(path: str) -> list[str]:
    """Extras needed to read a policy and its tokenizer, judged by its path. Published weights need Hugging Face's
    libraries for their tokenizer."""
    package = package_of(path)
    if package in names("smollm2") and not Cache.of(None).holds(Need("model", path)):
        return ["huggingface", "smollm2"]
    try:
        # Names on the hub have a slash; names of runs have none.
        published = (Path(path) / CONFIG_FILE).is_file() or ("/" in path and not Path(path).exists())
    except (OSError, ValueError):  # the process that opens it reports the error
        return []
    return ["huggingface"] if package or published else []


def problems(found: Iterable[DoctorFinding]) -> list[str]:
    return ["; ".join(filter(None, [one.text, one.fix])) for one in found if one.level == "error"]


def refuse_unready(extras: Sequence[str] = (), device: str = "cpu", ranks: int = 1, policy: str | None = None) -> None:
    """Refuse to compute with a model on this machine if packages or GPUs are missing: extras besides OF_RANKS, and
    those of the tokenizer of `policy`, a path or name. Raises BadInput with every problem."""
    found = [packages(_missing([OF_RANKS, *extras, *(_extras_of_policy(policy) if policy else ())]))]
    if device == "cuda" and (gpus := inspect().gpus) < ranks:
        fix = "--device cpu runs on processors"
        found.append(error("gpus", f"--device cuda: {count(ranks, 'GPU')} needed, and this machine has {gpus}", fix))
    if errors := problems(found):
        raise BadInput(errors)
