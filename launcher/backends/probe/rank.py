"""Probe of one rank in the profile's container, started as in a job: one srun step, which waits for a node for a
limited time."""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.backends.probe.command import CommandAnswer, ask
from launcher.backends.probe.node import WAIT_S, placed
from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_python
from launcher.host.image.cache import find
from launcher.host.image.reference import ImageError
from launcher.host.record.log_tails import reason_of_container
from megatron_rl.model.platform import gpu_calls

RUN_S = 900  # seconds for the step itself: a node unpacks the image and imports from it

# Program for the container's Python, as text, since torch is not imported here. Arguments: a file to write, and with a
# GPU the source of gpu_calls.py, which the image may lack. Further output of the image does no harm.
PROGRAM = """
import json, os, sys, types
print("mrl.cpus=" + ",".join(map(str, sorted(os.sched_getaffinity(0)))))
import megatron.core, torch, torch.distributed as dist
print("mrl.versions=torch %s, megatron-core %s" % (torch.__version__, megatron.core.__version__))
gpu = torch.cuda.is_available()
print("mrl.gpus=%d" % torch.cuda.device_count())
dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
one = torch.ones(1, device="cuda" if gpu else "cpu")
dist.all_reduce(one)
assert one.item() == 1.0
with open(sys.argv[1], "w") as file:
    file.write("written")
if gpu:
    print("mrl.capability=" + json.dumps(torch.cuda.get_device_capability()))
if sys.argv[2:]:
    calls = sys.modules["gpu_calls"] = types.ModuleType("gpu_calls")
    exec(sys.argv[2], vars(calls))
    print("mrl.calls=" + json.dumps([[fit.fits, str(fit)] for fit in calls.check_packages()]))
print("mrl.done=yes")
"""


@dataclass(frozen=True, slots=True)
class RankFacts:
    failure: str | None = None
    unasked: str | None = None  # why none was started, although nothing is wrong
    versions: str = ""
    gpus: int = 0
    cpus: str = ""
    capability: tuple[int, int] | None = None  # CUDA's compute capability of its GPU; None without one
    packages: tuple[tuple[bool, str], ...] = ()
    """Whether the calls of each package that GPUs use fit, and the sentence to show. Empty without a GPU."""


def probe(profile: Profile, reference: str | None, directory: Path, gpus: bool) -> RankFacts:
    """Run the rank.

    Args:
        reference: reference of the image; None: the profile's.
        directory: an existing directory of the run root; it holds a small file while the step runs.
        gpus: whether to request a GPU.
    """
    if profile.container is None:
        return RankFacts(unasked="the profile has no container")
    try:
        file = find_image(profile, reference or profile.container.image)
    except ImageError as error:
        return RankFacts(failure=str(error))
    if file is None:
        return RankFacts(unasked=f"{reference or profile.container.image} is not imported yet")
    canary = directory / f".mrl-doctor-{secrets.token_hex(6)}"
    try:
        program = [rank_python(profile), "-c", PROGRAM]
        of_gpus = [inspect.getsource(gpu_calls)] if gpus else []
        answer = ask_in_container(profile, file, gpus, [*program, str(canary), *of_gpus])
        if not answer.known:
            return RankFacts(failure=answer.failure)
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        said = dict(line.removeprefix("mrl.").split("=", 1) for line in lines if line.startswith("mrl."))
        if "done" not in said or not canary.exists():
            return RankFacts(failure=f"what it wrote to {directory} is not there")
        capability = json.loads(said.get("capability", "null"))
        return RankFacts(
            None,
            None,
            said["versions"],
            int(said["gpus"]),
            said["cpus"],
            tuple(capability) if capability else None,
            tuple((fits, text) for fits, text in json.loads(said.get("calls", "[]"))),
        )
    finally:
        canary.unlink(missing_ok=True)


def find_image(profile: Profile, reference: str) -> Path | None:
    """Return the file of an image in the cluster's cache; None: it is not imported yet. Raises ImageError."""
    return find(reference, Path(profile.run_root) / "cache" / "images")


def ask_in_container(profile: Profile, image: Path, gpus: bool, command: Sequence[str]) -> CommandAnswer:
    """Run a command in a container on a compute node, with the profile's variables, and behind its wrapper if that is
    for all ranks. Its errors are part of its output; a failure has its cause.

    Args:
        image: file of the image.
        gpus: whether to request a GPU.
    """
    answer = ask(_in_container(profile, image, gpus, command), WAIT_S + RUN_S)
    lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
    return answer if answer.known else replace(answer, failure=_cause(lines) or str(answer.failure))


def _cause(lines: list[str]) -> str:
    """Why the rank failed: its own last line, or pyxis's error; srun's last line only where there is neither."""
    own = [line for line in lines if not line.startswith(("srun: ", "mrl."))]
    return reason_of_container(own) or next(reversed(own or lines), "")


def _in_container(profile: Profile, image: Path, gpus: bool, command: Sequence[str]) -> list[str]:
    assert profile.container is not None
    mounts = ",".join([f"{profile.run_root}:{profile.run_root}", *profile.container.mounts])
    step = ["srun", "--job-name=mrl-doctor", "--nodes=1", "--ntasks=1", "--time=15", f"--immediate={WAIT_S}", "--quiet"]
    binding = {"distribution": profile.distribution, "cpu-bind": profile.cpu_bind}
    step += [*placed(profile, gpus), *(f"--{name}={value}" for name, value in binding.items() if value)]
    step += [f"--container-image={image}", f"--container-mounts={mounts}", "--no-container-mount-home"]
    variables = {**({} if gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}), **profile.environment}
    if variables:
        step += ["--export=ALL", f"--container-env={','.join(variables)}"]  # otherwise those of the image would win
    wrapper = profile.wrapper.command if profile.wrapper and profile.wrapper.ranks is None else []
    assigned = [f"{name}={value}" for name, value in variables.items()]
    return ["sh", "-c", 'exec env "$@" 2>&1', "srun", *assigned, *step, *profile.srun, *wrapper, *command]
