"""The walls of the house: who may import whom, and what the oldest Python of a batch host can read."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOST_SIDE = [*sorted((ROOT / "launcher" / "host").glob("*.py")), ROOT / "megatron_rl" / "run_dir.py"]


def imports(file: Path) -> set[str]:
    """Absolute names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute here, so that this test sees them"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_the_launcher_checks_a_recipe_without_torch():
    program = """
import sys
from launcher.recipe import load_recipe
import launcher.cli.main, launcher.cli.submit, launcher.cli.environments, launcher.backends.local
load_recipe("demo")
heavy = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "transformers", "apex"})
print(" ".join(heavy) or "light")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.strip() == "light", run.stderr


def test_the_ranks_never_import_the_launcher():
    sources = sorted((ROOT / "megatron_rl").rglob("*.py"))
    assert sources
    for file in sources:
        assert not {name for name in imports(file) if name.split(".")[0] == "launcher"}, file


def test_the_launcher_imports_of_the_other_side_only_what_needs_no_torch():
    allowed = ("megatron_rl.config", "megatron_rl.run_dir", "megatron_rl.agent.registry", "megatron_rl.supported")
    for file in sorted((ROOT / "launcher").rglob("*.py")):
        other = {name for name in imports(file) if name.startswith(("megatron_rl", "megatron.", "torch"))}
        assert not {name for name in other if not name.startswith(allowed)}, file


def test_the_host_side_reads_on_python_3_6_and_needs_only_the_standard_library():
    for file in HOST_SIDE:
        ast.parse(file.read_text(encoding="utf-8"), filename=str(file), feature_version=(3, 6))
        for name in imports(file):
            top = name.split(".")[0]
            ours = name.startswith(("launcher.host", "megatron_rl.run_dir"))
            assert ours or top in sys.stdlib_module_names, f"{file} imports {name}"
