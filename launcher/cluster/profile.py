"""Profile of a cluster: its hardware, and how jobs are submitted."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megatron_rl.recipe.job import TimeLimit
from megatron_rl.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"words": "one line of text"})]
Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", json_schema_extra={"words": "the name of an environment variable"})
]

_SECRET = re.compile(r"(TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY|(^|_)(PASS|PWD|PW|KEY|AUTH))$", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")


RUN_MODES = {"me": 0o700, "group": 0o750, "all": 0o755}
"""Mode of a run directory, by Profile.readable_by."""


class Container(Section):
    """Container of the ranks, started by pyxis."""

    image: Line
    """[REGISTRY#]IMAGE[:TAG], or path of a squashfs file."""
    mounts: list[Line] = []
    """SRC:DST[:FLAGS], flags joined by `+`. The run root is always mounted."""
    workdir: Line | None = None
    """Directory where the ranks start; default: the run directory's snapshot of the code."""
    named: bool = True
    """Each node unpacks the image once per attempt, for all its steps, and `mrl attach` enters the ranks' own
    container. Set false where pyxis mounts squashfs files (its use_squashfuse), which it does only for unnamed
    containers."""
    writable: bool = False
    """Let the ranks write to the container's root."""

    @field_validator("mounts")
    @classmethod
    def _have_two_sides(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            if not 1 <= mount.count(":") <= 2 or not all(mount.split(":")[:2]):
                raise ValueError(f"{mount!r} is not SRC:DST or SRC:DST:FLAGS, such as /data:/data:ro")
        return mounts


class Wrapper(Section):
    """Command in front of the command of training and inference ranks."""

    command: Annotated[list[Line], Field(min_length=1)]
    """Words of the command, such as [numactl, --localalloc] or [nsys, profile, -o, /shared/trace]; found on PATH of the
    container."""
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    """Training ranks to wrap; default: all ranks, those of inference too."""


class ClusterVllm(Section):
    """vLLM of a cluster."""

    image: Line | None = None
    """Container image with vLLM; default: that of the ranks."""
    python: Line | None = None
    """Python that has vLLM, as a path in the image or on the nodes; default: that of the ranks, in an image of its own
    python3."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> ClusterVllm:
        if self.image is None and self.python is None:
            raise ValueError("name the image or the python that has vLLM, or set vllm to null")
        return self


class Mail(Section):
    """Mail sent by Slurm."""

    to: Line
    """Address."""
    when: list[Literal["BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80"]] = [
        "END",
        "FAIL",
    ]
    """Slurm's --mail-type."""


class Profile(Section):
    """One cluster. In `run_root`, `container.mounts` and paths of `container.image`, ~, $NAME and ${NAME} are expanded
    for the user who submits; every other value is literal."""

    partition: Line | None = None
    """Default: that of the cluster."""
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    """Node features, as for --constraint."""
    reservation: Line | None = None
    mail: Mail | None = None
    gpus_per_node: PositiveInt
    """GPUs of a node."""
    gres: Annotated[str, Field(pattern=r"^(gres/gpu(:[A-Za-z0-9_.-]+)?|[A-Za-z0-9_.-]+)$")] | None = "gpu"
    """How jobs request GPUs: `gpu` is --gpus-per-node=8 and `h100` --gpus-per-node=h100:8; where Slurm knows only
    --gres, `gres/gpu` and `gres/gpu:h100`; null where Slurm does not manage GPUs."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU, in GiB; `mrl plan` warns above it."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of one attempt if the recipe gives none: minutes or 4:00:00; default: that of the partition."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of each rank; default: an equal share of the exclusive node."""
    distribution: Line | None = "block:block"
    """Slurm's --distribution of the ranks. Slurm's default deals them out to the sockets in turn, so that half of them
    compute beside another socket's GPUs."""
    cpu_bind: Line | None = None
    """Slurm's --cpu-bind of the ranks, such as cores; default: that of the cluster."""
    srun: list[Line] = []
    """Further flags of srun for the ranks' steps, such as --mpi=pmix, --network=... or --no-container-entrypoint."""
    wrapper: Wrapper | None = None
    """Command in front of the ranks; default: none."""
    container: Container | None = None
    """Container of the ranks; null: they run directly on the nodes."""
    vllm: ClusterVllm | None = None
    """Place of vLLM: default of a recipe's inference.vllm.image and inference.vllm.python, and a reason for
    `inference.engine: auto` to choose it. null: the recipe says where it is."""
    environment: dict[str, str] = {}
    """Environment variables of every rank. Values are literal: nothing in them is expanded."""
    secrets: list[Variable] = []
    """Environment variables passed from your shell to the ranks; their values are never written anywhere."""
    run_root: str
    """Absolute directory of runs, images and caches that all nodes see."""
    readable_by: Literal["me", "group", "all"] = "me"
    """Users who may read the directories of new runs, with their code and logs."""
    prolog: list[str] = []
    """Commands at the start of the batch script, such as `module load enroot`."""
    sbatch: list[Line] = []
    """Further flags of sbatch, such as --switches=1."""
    python: Line | None = None
    """Python of the ranks; default: python3 in a container, else the one that runs mrl-submit."""
    host_python: Line | None = None
    """Python 3.9 or later of the batch host, for what runs beside the ranks; default: the one that runs mrl-submit, or
    python3 where the host does not have it."""
    signal_s: PositiveInt = 120
    """Seconds before the time limit at which the run is asked to save; a save must fit in."""
    fs_bandwidth: PositiveFloat | None = None
    """Write bandwidth of one job to `run_root`, in GB/s; `mrl plan` estimates the time of a checkpoint from it."""
    health_check: bool = True
    """Test every node before ranks start on it."""
    all_reduce_gbps: PositiveFloat | None = None
    """Bandwidth of an all-reduce between nodes, in GB/s, below which it counts as slow; default: no check."""

    def host_pythons(self) -> tuple[str, ...]:
        """Interpreters of the host side, in the order in which a job tries them."""
        return (self.host_python,) if self.host_python else (sys.executable, "python3")

    def gpus(self, count: int) -> dict[str, str]:
        """Option of sbatch and srun that requests this number of GPUs per node; empty without Slurm's management."""
        if self.gres is None:
            return {}
        if self.gres.startswith("gres/"):
            return {"gres": f"{self.gres.removeprefix('gres/')}:{count}"}
        return {"gpus-per-node": f"{count}" if self.gres == "gpu" else f"{self.gres}:{count}"}

    @property
    def gpu_type(self) -> str:
        """GPU type in Slurm's terms; `gpu` for any."""
        return (self.gres or "gpu").removeprefix("gres/").removeprefix("gpu:")

    @field_validator("sbatch", "srun")
    @classmethod
    def _are_flags(cls, flags: list[str], info: ValidationInfo) -> list[str]:
        for flag in flags:
            if not flag.startswith("--" if info.field_name == "srun" else "-"):
                raise ValueError(f"{flag!r} is not a flag of {info.field_name}: write --name=value, one per line")
            if info.field_name == "sbatch" and re.match(r"--array\b|-a", flag):
                raise ValueError(f"{flag!r}: a run is one job, not an array; mrl-submit makes sweeps of a=1,2")
        return flags

    @field_validator("environment", mode="before")
    @classmethod
    def _has_no_secrets(cls, environment: object) -> object:
        """Runs before validation, whose messages would show the value."""
        for name, value in environment.items() if isinstance(environment, dict) else ():
            advice = f"and others can read the script; list {name} under secrets: and export its value in your shell"
            if _SECRET.search(str(name)):
                raise ValueError(f"environment.{name}: is the name of a secret, {advice}")
            if _PASSWORD_IN_URL.search(str(value)):
                raise ValueError(f"environment.{name}: contains a password in a URL, {advice}")
        return environment

    @model_validator(mode="after")
    def _environment_is_fit(self) -> Profile:
        for name, value in self.environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"environment: {name!r} is not the name of an environment variable")
            if name in self.secrets:
                raise ValueError(
                    f"environment.{name}: is also under secrets:, which takes the value of your shell; keep one of them"
                )
            if "\0" in value:
                raise ValueError(f"environment.{name}: contains a zero byte, which no variable can")
        for key, values in (("prolog", self.prolog), ("environment", self.environment.values())):
            if any("\r" in value for value in values):
                raise ValueError(f"{key}: contains a carriage return (\\r), which sbatch rejects")
        return self
