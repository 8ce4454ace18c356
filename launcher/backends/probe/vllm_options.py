"""Query of vLLM's own parser: which options of `inference.vllm.args` it refuses.

vLLM is imported, which takes seconds, and nothing is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from launcher.backends.probe.command import ask
from megatron_rl.inference.vllm_options import given_options, option_name, option_word

LIMIT_S = 120.0
"""Seconds to import vLLM and parse, on a machine that may be busy."""

# Argument: words by name, as JSON. Each word is parsed alone, since a parser ends at its first refusal. A sentence of
# several lines is pydantic's, which ends each problem with an address.
PROGRAM = """
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
    nothing if there are no options.

    Args:
        args: `inference.vllm.args` or `distill.replicas.vllm.args`.

    Raises Unasked.
    """
    return dict(_asked(python, words_of(args))) if args else {}


def words_of(args: Mapping[str, bool | int | float | str]) -> str:
    options = given_options(args)
    return json.dumps({name: option_word(option_name(name), options[option_name(name)]) for name in args})


@cache  # of a sweep, each run asks
def _asked(python: str, words: str) -> dict[str, str]:
    answer = ask(["env", "PYTHONPATH=", python, "-P", "-c", PROGRAM, words], LIMIT_S)
    return read_refused(answer.text, answer.failure)


def read_refused(text: str, failure: str | None) -> dict[str, str]:
    said = [line for line in text.splitlines() if line.startswith("mrl.vllm_options=")]
    if failure is not None or not said:
        raise Unasked(failure or "vLLM's parser does not answer")
    found: dict[str, str] = json.loads(said[-1].removeprefix("mrl.vllm_options="))
    return found
