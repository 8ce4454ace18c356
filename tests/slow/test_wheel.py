"""mrl as users install it: a wheel in an empty virtual environment, used outside any checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder bin of an environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=600)
    (wheel,) = folder.glob("mrl-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, timeout=300)
    python = folder / "env" / "bin" / "python"
    subprocess.run([str(python), *pip[1:], "install", str(wheel)], check=True, timeout=900)
    return python.parent


def run(installed: Path, where: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        [str(installed / command[0]), *command[1:]],
        cwd=where,
        env={**kept, "HOME": str(where), **variables},
        capture_output=True,
        text=True,
        timeout=120,
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
