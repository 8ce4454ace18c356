"""Probes of this login node, and of a compute node: one small srun step, which waits for a node for a limited time."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from launcher.backends.probe.command import CommandAnswer, ask
from launcher.backends.probe.gpus import limiting_mode
from launcher.cluster.profile import Profile

WAIT_S = 60  # seconds for a free node
RUN_S = 60  # seconds for the step itself

# $1: the canary, $2: a program, $3 and further: interpreters for it. Lines of the prolog in between do no harm.
SCRIPT = """
echo "mrl.host=$(hostname)"
for python in "${@:3}"; do
    if found=$("$python" -c "$2" 2>/dev/null); then
        echo "mrl.python=$found"
        echo "mrl.interpreter=$python"
        break
    fi
done
if [ -r "$1" ]; then echo mrl.shared=yes; fi
if command -v enroot >/dev/null; then echo "mrl.enroot=$(enroot version 2>/dev/null)"; fi
if command -v nvidia-smi >/dev/null; then
    echo "mrl.driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
    echo "mrl.compute_modes=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader 2>/dev/null | paste -sd, -)"
fi
"""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    failure: str | None = None
    host: str = ""
    python: str | None = None
    """Version of the interpreter for the host side there; None: not found or too broken to say."""
    interpreter: str = ""
    shared: bool = False
    enroot: str | None = None  # version; None: not found
    driver: str | None = None  # NVIDIA driver; None: no nvidia-smi
    compute_mode: str | None = None
    """Same as in GpuFacts."""


def probe(profile: Profile, directory: Path, gpus: bool) -> NodeFacts:
    """Run the step, after the profile's prolog as in jobs.

    Args:
        directory: an existing directory of the run root; it holds a small file while the step runs.
        gpus: whether to request a GPU, which partitions of GPU nodes often demand.
    """
    canary = directory / f".mrl-doctor-{secrets.token_hex(6)}"
    try:
        canary.touch(mode=0o600)
    except OSError as error:
        return NodeFacts(failure=f"{canary.parent}: {error.strerror}")
    try:
        answer = ask(_command(profile, canary, gpus), WAIT_S + RUN_S)
    finally:
        canary.unlink(missing_ok=True)
    return _read(answer.text) if answer.known else NodeFacts(failure=answer.failure)


def placed(profile: Profile, gpus: bool) -> list[str]:
    """Options of srun that place a small step; `gpus`: with a GPU."""
    names = ("partition", "account", "qos", "constraint", "reservation")
    flags = [f"--{name}={value}" for name in names if (value := getattr(profile, name))]
    return flags + ([f"--{name}={value}" for name, value in profile.gpus(1).items()] if gpus else [])


def _command(profile: Profile, canary: Path, gpus: bool) -> list[str]:
    flags = placed(profile, gpus)
    step = ["srun", "--job-name=mrl-doctor", "--nodes=1", "--ntasks=1", "--time=2", f"--immediate={WAIT_S}", "--quiet"]
    script = "\n".join([*profile.prolog, SCRIPT])
    return [*step, *flags, "bash", "-c", script, "bash", str(canary), PYTHON_PROBE, *profile.host_pythons()]


def _read(text: str) -> NodeFacts:
    lines = [line.removeprefix("mrl.").partition("=") for line in text.splitlines() if line.startswith("mrl.")]
    found = {key: value.strip() for key, equals, value in lines if equals}
    return NodeFacts(
        host=found.get("host", ""),
        python=found.get("python"),
        interpreter=found.get("interpreter", ""),
        shared=found.get("shared") == "yes",
        enroot=found.get("enroot"),
        driver=found.get("driver") or None,
        compute_mode=limiting_mode(found.get("compute_modes", "").split(",")),
    )


PYTHON_PROBE = "import sys; print('.'.join(map(str, sys.version_info[:3])))"


def python_here(host_python: str) -> CommandAnswer:
    return ask([host_python, "-c", PYTHON_PROBE])
