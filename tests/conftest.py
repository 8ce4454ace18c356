"""Fixtures that are slow to create and shared by all tests: imported packages, and a megatron-core world of one
rank."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from durations import Durations, WorkerDurations
from examples import OF_A_COMMIT
from hypothesis import settings

TESTS = Path(__file__).parent

# No deadline, because a machine may be busy. Examples of a commit's tests are the same each time, so a
# failure means that the commit broke something; `make test-slow` tries new examples each time, and many more.
settings.register_profile("mrl", deadline=None, max_examples=OF_A_COMMIT, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("mrl")

# Before torch is imported, because threads that wait for one another on busy cores slow down small tensors.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts background jobs with Ctrl-C ignored, which all processes of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks of tests are forked from a server that has imported their modules. The module is looked up from the folder where
# the tests start; a module that is not found is ignored.
multiprocessing.set_forkserver_preload(["tests.helpers.rank_server"])


# Imports create no garbage, and searching for it takes a third of the time of collecting the tests.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write to this file how long each file of tests took")


def pytest_configure(config: pytest.Config) -> None:
    if target := config.getoption("durations_file"):
        worker = hasattr(config, "workerinput")
        config.pluginmanager.register(WorkerDurations() if worker else Durations(config.rootpath / target))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interleave files of runs and slurm, so that tests that wait for Slurm leave the processors to those that compute.
    Files of unit come last, because they are short and let all workers end at nearly the same time."""
    files = list(dict.fromkeys(item.path for item in items))
    folders: dict[str, list[Path]] = {}
    for file in files:
        folders.setdefault(file.relative_to(TESTS).parts[0], []).append(file)
    order = {
        file: (folder == "unit", place / len(of), folder)
        for folder, of in folders.items()
        for place, file in enumerate(of)
    }
    items.sort(key=lambda item: order[item.path])


NEED = {
    "trl": ("rows_of_peers", "supervised_step", "trl_parity"),
    "openai": (
        *("conversations", "endpoint", "endpoint_agent", "endpoint_refusals", "endpoint_responses"),
        *("first_rows", "published_templates", "raw_requests", "rows", "turn_end"),
    ),
    "datasets": (
        "datasets",
        "rows_fuzzed",
        "hf_dataset",
        "trial",
        "countdown",
        "math_environment",
        "reasoning_gym",
        "shipped_math",
    ),
    "transformers": (
        *("tools", "hf_convert", "huggingface", "irregular_files", "text_stream", "parity", "model", "tokenizer"),
        *("server_chat", "server_completions", "server_connections", "server_guard", "server_readers"),
        *("server_refusals", "standalone", "trainer", "lora", "lora_export", "delta_net"),
    ),
}
"""Packages that take seconds to import, and the test files that import them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Group of files with the same slow import, which `--dist loadfile` gives to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = Path(file).stem.removeprefix("test_")
            return next((package for package, files in NEED.items() if name in files), file)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Spare the last search for garbage, which pytest makes at the end. On a busy machine it took a worker longer than
    the five seconds after which execnet sends the worker a SIGINT: a KeyboardInterrupt then ended the output of runs
    in which every test had passed."""
    gc.freeze()


LEVELS = {name: logging.getLogger(name).level for name in (None, "megatron_rl")}
"""Levels of loggers, before a program that a test calls changes them."""


@pytest.fixture(autouse=True)
def usual_levels() -> None:
    """Begin each test with the levels of a new process, since some tests expect the only message."""
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A gloo group of this process only, unless one exists."""
    import torch.distributed as dist

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if ours:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def platform() -> Any:
    from megatron_rl.model.platform.select import select
    from megatron_rl.recipe.job import JobConfig

    return select(JobConfig(device="cpu", gpus_per_node=1, threads_per_rank=1))


@pytest.fixture(scope="session")
def groups(platform: Any) -> Iterator[Any]:
    """Groups of the one rank."""
    from datetime import timedelta

    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl.rank.groups import Groups

    if not dist.is_initialized():
        dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield Groups.from_megatron(timedelta(seconds=60))
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
