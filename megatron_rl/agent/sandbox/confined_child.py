"""Code of a child process of confined_process.py; standard library only.

    worker     {"function": "module:name"}: answers requests, one JSON line each, by calling a function of ours
    program    {"function": null}: runs one program that a model wrote

The process confines itself first. A program arrives on stdin as JSON after its length; the rest of stdin is the
program's own input.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import CodeType
from typing import Any

from megatron_rl.agent.sandbox.confine import confine, limit_memory, limit_processor, raise_stack_limit
from megatron_rl.agent.sandbox.limits import Ending
from megatron_rl.contract.children import OUTSIDE_SIGNALS, death_with_parent

LENGTH_DIGITS = 12

OUT_OF_MEMORY = 99

PRELUDE = """\
from typing import *
from collections import *
from bisect import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import pow
import bisect, collections, functools, heapq, itertools, math, operator, re, string, sys
"""
"""Names that a function may use without importing them, as on programming sites whose problems ask for functions."""
RARE = ("copy", "datetime", "random", "statistics")
"""Further modules, imported only if the answer mentions them: they take as long to import as Python to start."""
DEEPEST = 50_000
"""Recursion limit: solutions commonly recurse five thousand calls deep."""


def main() -> None:
    job = json.loads(sys.argv.pop())
    for number in OUTSIDE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    death_with_parent(job["parent"])()
    limit_memory(job["memory_bytes"])
    del sys.path[-1]  # our entry, with which confined_process.py made this module importable
    sys.path.extend(place for place in job["path"] if place not in sys.path)
    if job["function"] is None:
        run_program(job["cpu_s"])
    else:
        work(job["function"], job["cpu_s"])


def work(function: str, cpu_s: int) -> None:
    replies = os.dup(1)
    with suppress(OSError):  # a socket, which cannot be opened again
        # Flags of an open file, such as that of not waiting, hold for all who share it. Ours must not be the owner's.
        os.dup2(os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(2, 1)  # keep the prints of libraries out of the replies
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)
    _write(replies, ["ready", confine()])
    for line in sys.stdin.buffer:
        limit_processor(cpu_s, for_good=False)
        _write(replies, _reply(lambda line=line: answer(json.loads(line))))  # type: ignore[misc]


def run_program(cpu_s: int) -> None:
    """Run one program. Its output follows our "ready" line; if it is a function call, the output is one reply line."""
    job = json.loads(_read(int(_read(LENGTH_DIGITS))))
    names: dict[str, Any] = {"__name__": "__main__"}
    for name in ("exit", "quit"):  # defined by the module site, which takes as long to load as Python itself
        setattr(builtins, name, sys.exit)
    replies = os.dup(1)
    if job["name"] is not None:
        names = {"__name__": "answer"}
        rare = [f"import {name}\n" for name in RARE if name in job["source"]]
        exec(PRELUDE + "".join(rare), names)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _write(replies, ["ready", confine()])
    limit_processor(cpu_s, for_good=True)
    raise_stack_limit()
    sys.setrecursionlimit(DEEPEST)
    code = compile(job["source"], "answer.py", "exec", dont_inherit=True)
    if job["name"] is None:
        exec(code, names)
    else:
        _write(replies, _reply(lambda: _call(code, names, job["name"], job["arguments"])))


def _call(code: CodeType, names: dict[str, Any], name: str, arguments: list[Any]) -> Any:
    given = names.get(name)  # a function may have the name of one in the prelude, such as gcd
    exec(code, names)
    function = names.get(name)
    if function is None or function is given:
        function = getattr(names["Solution"](), name)
    return function(*arguments)


def _reply(answer: Callable[[], Any]) -> list[Any]:
    try:
        value = answer()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the process is in an unknown state
    except Exception as error:  # noqa: BLE001 - code of a model or a library
        return [Ending.ERROR, f"{type(error).__name__}: {error}"[:200]]
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return [Ending.WRONG_FORMAT, f"{type(value).__name__} cannot be written as JSON: {error}"[:200]]
    return [Ending.OK, value]


def _write(file: int, reply: list[Any]) -> None:
    left = json.dumps(reply).encode() + b"\n"
    while left:
        left = left[os.write(file, left) :]


def _read(size: int) -> bytes:
    parts = []
    while size:
        part = os.read(0, size)
        if not part:
            raise SystemExit("the program arrived incomplete")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
