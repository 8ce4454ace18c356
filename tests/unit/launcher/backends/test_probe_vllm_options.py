"""vLLM's own parser says which options it refuses. A stand-in for it has argparse's parser and two options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.backends.probe import vllm_probe as vllm_options
from launcher.backends.probe.vllm_probe import Unasked, refused_options

STAND_IN = """
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
class ServeSubcommand:
    def subparser_init(self, subparsers):
        serve = subparsers.add_parser("serve")
        serve.add_argument("model")
        serve.add_argument("--swap-space", type=float)
        serve.add_argument("--eplb", action=argparse.BooleanOptionalAction)
    def validate(self, args):
        if args.swap_space == 7:
            raise ValueError("seven is too much")
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python with the stand-in."""
    for module in ("vllm/entrypoints/cli/serve.py", "vllm/utils/argparse_utils.py"):
        (tmp_path / module).parent.mkdir(parents=True)
        (tmp_path / module).write_text("from stand_in import *\n")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "INFO banner"\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_all_refused_options_are_named_with_the_words_of_vllm(python: str) -> None:
    args = {"swap_space": "lots", "nonsense-option": 3, "eplb": False, "no-such": False}
    assert refused_options(python, args) == {
        "swap_space": "argument --swap-space: invalid float value: 'lots'",
        "nonsense-option": "unrecognized arguments: --nonsense-option=3",
        "no-such": "unrecognized arguments: --no-no-such",
    }
    assert refused_options(python, {"swap-space": 7}) == {"swap-space": "seven is too much"}
    assert refused_options(python, {"swap-space": 4.5, "eplb": True}) == {}


def test_without_options_nothing_is_started() -> None:
    assert refused_options("/there/is/no/python", {}) == {}


@pytest.mark.parametrize(
    ("program", "why"), [("exec sleep 60", "no answer within"), ("echo No module named vllm >&2; exit 1", "No module")]
)
def test_a_python_that_does_not_answer_says_nothing_about_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(vllm_options, "OPTIONS_LIMIT_S", 0.2 if "sleep" in program else 60.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    with pytest.raises(Unasked, match=why):
        refused_options(str(python), {"a": 1})
