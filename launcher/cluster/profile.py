"""What a cluster has and how jobs are sent there: one profile."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megatron_rl.rank.config import TimeLimit
from megatron_rl.section import NonNegativeInt, PositiveFloat, PositiveInt, Section

Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", json_schema_extra={"words": "one line of text"})]
Variable = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", json_schema_extra={"words": "the name of an environment variable"})
]

_SECRET = re.compile(r"(TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY|(^|_)(PASS|PWD|PW|KEY|AUTH))$", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")


RUN_MODES = {"me": 0o700, "group": 0o750, "all": 0o755}
"""Mode of a run directory by Profile.readable_by."""


class Container(Section):
    """How pyxis starts the ranks."""

    image: Line
    """[REGISTRY#]IMAGE[:TAG], or the path of a squashfs file."""
    mounts: list[Line] = []
    """SRC:DST[:FLAGS], flags joined by `+`. The run root is always mounted."""
    workdir: Line | None = None
    """Directory the ranks start in; default: the run directory's snapshot of the code."""
    named: bool = True
    """Each node unpacks the image once an attempt, for all its steps, and `mrl attach` enters the ranks' own container.
    false where pyxis mounts squashfs files (its use_squashfuse), which it does for unnamed containers only."""
    writable: bool = False
    """Let the ranks write to the container's own root."""

    @field_validator("mounts")
    @classmethod
    def _have_two_sides(cls, mounts: list[str]) -> list[str]:
        for mount in mounts:
            if not 1 <= mount.count(":") <= 2 or not all(mount.split(":")[:2]):
                raise ValueError(f"{mount!r} is not SRC:DST or SRC:DST:FLAGS, such as /data:/data:ro")
        return mounts


class Wrapper(Section):
    """A command that starts the ranks of training and inference, after which their own command stands."""

    command: Annotated[list[Line], Field(min_length=1)]
    """Its words, such as [numactl, --localalloc] or [nsys, profile, -o, /shared/trace]; on PATH of the container."""
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    """Only these ranks of the training; default: all ranks, those of inference too."""


class Mail(Section):
    """Mail that Slurm sends."""

    to: Line
    """Address."""
    when: list[Literal["BEGIN", "END", "FAIL", "REQUEUE", "ALL", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80"]] = [
        "END",
        "FAIL",
    ]
    """Slurm's --mail-type."""


class Profile(Section):
    """One cluster. In `run_root`, `container.mounts` and paths of `container.image`, ~, $NAME and ${NAME} are those of
    whoever submits; every other value is literal."""

    partition: Line | None = None
    """Default: the cluster's own."""
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    """Node features, as for --constraint."""
    reservation: Line | None = None
    mail: Mail | None = None
    gpus_per_node: PositiveInt
    """GPUs that a node has."""
    gres: Annotated[str, Field(pattern=r"^(gres/gpu(:[A-Za-z0-9_.-]+)?|[A-Za-z0-9_.-]+)$")] | None = "gpu"
    """How GPUs are asked for: `gpu` is --gpus-per-node=8 and `h100` --gpus-per-node=h100:8; where Slurm knows only
    --gres, `gres/gpu` and `gres/gpu:h100`; null: not at all, where Slurm knows of none."""
    gpu_memory_gib: PositiveFloat = 80.0
    """Memory of one GPU; `mrl plan` warns above it."""
    time_limit: TimeLimit | None = None
    """Slurm's --time of one attempt where the recipe names none: minutes or 4:00:00; default: the partition's."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of each rank; default: whatever an exclusive node gives."""
    distribution: Line | None = "block:block"
    """Slurm's --distribution of the ranks. Its own default deals them out to the sockets in turn, and then half of them
    compute beside another socket's GPUs."""
    cpu_bind: Line | None = None
    """Slurm's --cpu-bind of the ranks, such as cores; default: the cluster's own."""
    srun: list[Line] = []
    """Further flags of srun for the ranks' steps, such as --mpi=pmix, --network=... or --no-container-entrypoint."""
    wrapper: Wrapper | None = None
    """What the ranks are started by."""
    container: Container | None = None
    """null: the ranks run on the nodes as they are."""
    environment: dict[str, str] = {}
    """Variables of every rank. Values are literal: nothing in them is expanded."""
    secrets: list[Variable] = []
    """Names of variables that travel from your shell to the ranks; their values are never written anywhere."""
    run_root: str
    """Absolute directory, seen by all nodes, of runs, images and caches."""
    readable_by: Literal["me", "group", "all"] = "me"
    """Who may read the directories of new runs, with the code and the logs in them."""
    prolog: list[str] = []
    """Commands of the batch script before anything else, such as `module load enroot`."""
    sbatch: list[Line] = []
    """Further flags of sbatch, such as --switches=1."""
    python: Line | None = None
    """Python of the ranks; default: python3 in a container, else the one that runs mrl-submit."""
    host_python: Line | None = None
    """Python 3.9 or later of the batch host, for what runs beside the ranks; default: the one that runs mrl-submit, or
    python3 where the host does not have it."""
    signal_s: PositiveInt = 120
    """Seconds before the time limit at which the run is told to save; a save has to fit in."""
    fs_bandwidth: PositiveFloat | None = None
    """GB/s that one job can write to `run_root`; `mrl plan` says from it how long a checkpoint takes."""
    health_check: bool = True
    """Try every node before the ranks start on it."""
    all_reduce_gbps: PositiveFloat | None = None
    """GB/s of an all-reduce between nodes below which one counts as slow; default: nothing does."""

    def host_pythons(self) -> tuple[str, ...]:
        """Interpreters of the host side, in the order in which a job tries them."""
        return (self.host_python,) if self.host_python else (sys.executable, "python3")

    def gpus(self, count: int) -> dict[str, str]:
        """The option of sbatch and srun that asks for so many GPUs of each node, by name; none where Slurm knows of
        none."""
        if self.gres is None:
            return {}
        if self.gres.startswith("gres/"):
            return {"gres": f"{self.gres.removeprefix('gres/')}:{count}"}
        return {"gpus-per-node": f"{count}" if self.gres == "gpu" else f"{self.gres}:{count}"}

    @property
    def gpu_type(self) -> str:
        """Of the nodes' GPUs, as Slurm calls it; `gpu` for any."""
        return (self.gres or "gpu").removeprefix("gres/").removeprefix("gpu:")

    @field_validator("sbatch", "srun")
    @classmethod
    def _are_flags(cls, flags: list[str], info: ValidationInfo) -> list[str]:
        for flag in flags:
            if not flag.startswith("--" if info.field_name == "srun" else "-"):
                raise ValueError(f"{flag!r} is no flag of {info.field_name}: write --name=value, one a line")
            if info.field_name == "sbatch" and re.match(r"--array\b|-a", flag):
                raise ValueError(f"{flag!r}: a run is one job and no array; mrl-submit makes sweeps of a=1,2")
        return flags

    @field_validator("environment", mode="before")
    @classmethod
    def _has_no_secrets(cls, environment: object) -> object:
        """Before anything is said about a value, which would show it."""
        for name, value in environment.items() if isinstance(environment, dict) else ():
            way_out = f"and the script can be read; list {name} under secrets: and export its value in your shell"
            if _SECRET.search(str(name)):
                raise ValueError(f"environment.{name}: is the name of a secret, {way_out}")
            if _PASSWORD_IN_URL.search(str(value)):
                raise ValueError(f"environment.{name}: holds a password in a URL, {way_out}")
        return environment

    @model_validator(mode="after")
    def _environment_is_fit(self) -> Profile:
        for name, value in self.environment.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"environment: {name!r} is not the name of an environment variable")
            if name in self.secrets:
                raise ValueError(f"environment.{name}: is under secrets: too; the value there is that of your shell")
            if "\0" in value:
                raise ValueError(f"environment.{name}: holds a zero byte, which no variable can")
        for key, values in (("prolog", self.prolog), ("environment", self.environment.values())):
            if any("\r" in value for value in values):
                raise ValueError(f"{key}: holds a carriage return (\\r), and sbatch takes no such script")
        return self
