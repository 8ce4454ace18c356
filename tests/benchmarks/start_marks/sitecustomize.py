"""Python imports this file first in each process of `start.py`. It writes when the process reaches certain marks, as
JSON lines of [mark, unix time, CPU seconds of the process], to MRL_START_MARKS/PID."""

import functools
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

CALLS = {
    "launcher.cli.submit.launch": ["launch", "load_clusters", "plan_runs"],
    "launcher.cli.submit.this_machine": ["run_on_this_machine", "_start"],
    "launcher.host.supervise": ["supervise"],
    "launcher.host.attempt.local_ranks": ["LocalRanks.start"],
    "megatron_rl.run.attempt": ["run_attempt", "note_kernels", "connect", "set_up"],
    "megatron_rl.run.setup": ["build_material", "build_models", "restore", "build_generation", "build_driver"],
    "megatron_rl.train_rl": ["train_step"],
    "megatron_rl.generate.engine.engine": ["Engine.step"],
}
"""Module -> functions whose first call is marked at its beginning, as NAME, and at its end, as NAME/."""
IMPORTS = {"click", "megatron_rl.recipe.config", "torch", "megatron.core", "megatron_rl.run.attempt"}
"""Modules whose import is marked at its beginning."""

seen: set[str] = set()


def mark(name: str) -> None:
    if name not in seen:
        seen.add(name)
        line = json.dumps([name, time.time(), time.process_time()])
        with Path(os.environ["MRL_START_MARKS"], str(os.getpid())).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def marked(function, name):
    @functools.wraps(function)
    def call(*given, **named):
        mark(name)
        try:
            return function(*given, **named)
        finally:
            mark(f"{name}/")

    return call


class Finder:
    """Finds the modules of CALLS, and replaces their functions once they are loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in IMPORTS:
            mark(f"import {name}")
        if name not in CALLS or f"finds {name}" in seen:
            return None
        seen.add(f"finds {name}")
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_replace(module):
            load(module)
            for called in CALLS[name]:
                *owners, last = called.split(".")
                owner = functools.reduce(getattr, owners, module)
                setattr(owner, last, marked(getattr(owner, last), called))

        spec.loader.exec_module = load_and_replace
        return spec


mark("begin")
sys.meta_path.insert(0, Finder)
