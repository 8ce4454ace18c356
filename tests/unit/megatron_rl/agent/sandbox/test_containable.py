"""A machine that cannot make a container says why, however the attempt ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_rl.agent.sandbox import container
from megatron_rl.agent.sandbox.container import CannotContain, ContainerLimits, ProgramContainer, why_not_contained

ROOT = ProgramContainer("/", ContainerLimits(2**30, 2**30, 8), False)


def refused() -> NoReturn:
    raise CannotContain("the kernel has no user namespaces")


def silent() -> NoReturn:
    raise RuntimeError


def killed() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (lambda: os._exit(0), None),
        (refused, "the kernel has no user namespaces"),
        (silent, "unknown"),
        (killed, "it was killed by signal 9"),
        (lambda: os._exit(3), "it ended with exit code 3"),
    ],
    ids=["contained", "refused", "an error without a word", "killed", "left"],
)
def test_why_a_machine_cannot_contain_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Callable[[], NoReturn], why: str | None
) -> None:
    monkeypatch.setattr(container, "become_contained", lambda *given: ends())
    assert why_not_contained(ROOT, tmp_path) == why
