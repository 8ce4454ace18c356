"""Software of the login node and a compute node: Slurm, containers, Python, accounting. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.node import NodeFacts
from launcher.backends.probe.rank import RankFacts
from launcher.backends.slurm.cluster_facts import SlurmFacts, number
from launcher.cluster.profile import Profile
from launcher.doctor.cluster import Cluster
from launcher.doctor.demand import Demand
from launcher.doctor.finding import DoctorFinding, count, error, note, ok, span, warning
from launcher.host.image.reference import is_path
from megatron_rl.recipe.cards import without_fp8
from megatron_rl.recipe.config import RunConfig

OLDEST_SLURM = (20, 11)  # srun --overlap, --exact
OLDEST_PYTHON = (3, 9)
NEEDED = ("--container-image", "--container-mounts", "--container-workdir", "--container-env")
MIN_JOB_AGE_S = 300


def controller(facts: SlurmFacts, cluster: Cluster) -> Iterator[DoctorFinding]:
    if not facts.version.there:
        yield error(
            "slurm",
            f"{facts.version.failure}; this machine has no Slurm commands",
            "run mrl doctor on a login node, or add Slurm's commands to PATH; --cluster local needs no Slurm",
        )
    elif not facts.version.known:
        text = f"its commands are installed but do not work: {facts.version.failure}"
        yield error("slurm", text, "correct SLURM_CONF, or unset it if the cluster needs none")
    elif not facts.config.known:
        text = f"its controller does not answer: {facts.config.failure}"
        yield error("slurm", text, "try again later; scontrol ping shows more")
    else:
        shown = cluster.config.get("SLURM_VERSION", "of an unknown version")
        name = cluster.config.get("ClusterName", "without a name")
        if cluster.before(*OLDEST_SLURM):
            yield error("slurm", f"{shown} is too old: concurrent steps need 20.11 or later", "ask for a newer Slurm")
        else:
            yield ok("slurm", f"{shown}, cluster {name}")


def containers(facts: SlurmFacts, demand: Demand) -> Iterator[DoctorFinding]:
    if not demand.images:
        yield ok("containers", "none: the ranks run on the nodes as they are")
        return
    missing = [flag for flag in NEEDED if flag not in facts.srun_help.text]
    if not facts.srun_help.known or NEEDED[0] in missing:
        images = " and ".join(demand.images)
        text = (
            f"srun has no option --container-image here, and {demand.who} needs {images}: sbatch would accept the job, "
            "and every step would fail"
        )
        yield error("pyxis", text, "ask the administrators for pyxis, or set container: null in the profile")
        return
    if missing:
        text = f"this version lacks {', '.join(missing)}"
        yield error("pyxis", text, "ask the administrators for pyxis 0.15 or later")
    else:
        yield ok("pyxis", "srun has its options")


def host_python(here: CommandAnswer, node: NodeFacts | None, profile: Profile) -> Iterator[DoctorFinding]:
    fix = "set host_python: in the profile to a Python 3.9 or later, or load one in prolog:"
    name = profile.host_pythons()[0]
    if node is not None and node.failure is None:
        if node.python is None or _release(node.python) < OLDEST_PYTHON:
            tried = node.interpreter or " or ".join(profile.host_pythons())
            yield error("python", f"{tried} on {node.host}: {node.python or 'not found'}; the host side needs 3.9", fix)
        else:
            yield ok("python", f"{node.interpreter} is {node.python} on {node.host}, for the host side of a run")
        return
    later = "it may differ on the compute nodes: --deep tests that"
    if not here.known:
        if profile.prolog:
            yield note("python", f"{here.failure}; the profile's prolog may load it in a job: --deep tests that")
        else:
            yield error("python", f"{here.failure}; the host side of a run needs it", fix)
    elif _release(here.text) < OLDEST_PYTHON:
        yield error("python", f"{name} is {here.text.strip()}, the host side needs 3.9", fix)
    else:
        yield ok("python", f"{name} is {here.text.strip()} on this machine; {later}")


def compute_node(node: NodeFacts, profile: Profile, demand: Demand) -> Iterator[DoctorFinding]:
    if node.failure:
        text = f"none could be tested: {node.failure}"
        yield warning("compute node", text, "try again when a node of the partition is free, or without --deep")
        return
    driver = f", NVIDIA driver {node.driver}" if node.driver else ""
    yield ok("compute node", f"a step ran on {node.host}{driver}")
    if demand.gpus and not node.driver and profile.health_check:
        yield note("compute node", "it has no nvidia-smi, so the health check cannot see the state of the GPUs")
    if node.enroot is None and not all(map(is_path, demand.images)):
        text = f"not found on {node.host}, and {demand.who} needs containers"
        yield error("enroot", text, "install it there, or load it in prolog: of the profile")
    elif demand.images and node.enroot is not None:
        yield ok("enroot", f"{node.enroot or 'there'} on {node.host}")


def first_rank(rank: RankFacts, demand: Demand) -> DoctorFinding:
    """Finding about a rank in the container that imported torch, formed a communicator and wrote to the run root."""
    if rank.unasked:
        return note("container", f"not started: {rank.unasked}", "mrl prefetch imports the image")
    if rank.failure:
        fix = "see containers/README.md for building the image and for enroot's errors"
        return error("container", f"a rank in it failed: {rank.failure}", fix)
    if demand.gpus and not rank.gpus:
        return error("container", f"{rank.versions}, and torch sees no GPU", "enroot's hook 98-nvidia.sh provides it")
    gpus = f", {count(rank.gpus, 'GPU')}" if rank.gpus else ""
    return ok("container", f"a rank in it communicates and writes to run_root: {rank.versions}{gpus}, CPUs {rank.cpus}")


def kernels(rank: RankFacts, config: RunConfig | None) -> Iterator[DoctorFinding]:
    for fits, text in rank.packages:
        if fits:
            yield ok("kernels", text)
        else:
            yield warning(
                "kernels", text, "containers/README.md builds an image that has it; without it steps are slower"
            )
    fp8 = config.training.fp8 if config else "none"
    if rank.capability and fp8 != "none" and (against := without_fp8("its GPU", rank.capability)):
        yield error("kernels", f"training.fp8 is {fp8}, but {against}", "training.fp8=none")


def accounting(facts: SlurmFacts, cluster: Cluster) -> DoctorFinding:
    if facts.sacct.known:
        return ok("accounting", "sacct works, so mrl status knows jobs that have ended")
    age = number(cluster.config.get("MinJobAge"), MIN_JOB_AGE_S)
    return note(
        "accounting",
        f"sacct does not work here ({facts.sacct.failure}): Slurm forgets a job {span(age)} after its end (MinJobAge); "
        "mrl status then relies on the run directory alone",
    )


def _release(text: str) -> tuple[int, ...]:
    return tuple(number(part) for part in text.strip().split(".")[:2])
