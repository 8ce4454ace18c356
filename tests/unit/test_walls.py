"""Architecture: allowed imports between rooms, and code that the oldest Python of a batch host can run."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from parsed import parsed

ROOT = Path(__file__).parents[2]
OLDEST_PYTHON = Path.home() / ".pyenv" / "versions" / "3.9.18" / "bin" / "python3"

# From the bottom up: a room imports from itself and from earlier rooms. An entry is a room, a sub-room or a file.
ORDER = {
    "megatron_rl": """
        contract recipe model rank checkpoint generate agent algorithms learn run
        train_rl run.attempt rank_main replica_main
    """,
    "launcher": """
        host.process host.slurm host.judge host.record host.code host.image host.attempt host
        errors documents recipe cluster plan backends fetch doctor runs explain report job push start api
        cli.show cli.submit cli
    """,
}
SHARED = ("megatron_rl.contract", "megatron_rl.recipe")
"""Rooms of megatron_rl from which the launcher imports."""

EXCEPTIONS = ("megatron_rl.rank.metrics.names", "megatron_rl.model.platform.gpu_calls")
"""Files of other rooms that it may import too: what `mrl help METRIC` shows, what `mrl doctor` sends to nodes."""


@cache
def modules() -> dict[str, Path]:
    files = [file for top in ORDER for file in sorted((ROOT / top).rglob("*.py"))]
    assert len(files) > 100
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def imports(file: Path) -> frozenset[str]:
    """Absolute names of all imports in a file."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports must be absolute, so that this test sees them"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def imported_modules(name: str) -> set[str]:
    """Modules of this project that a module imports from."""
    return {
        found
        for imported in imports(modules()[name])
        if (found := imported if imported in modules() else imported.rpartition(".")[0]) in modules()
    } - {name}


def top(name: str) -> str:
    return name.partition(".")[0]


def room(name: str) -> str:
    side, _, inside = name.partition(".")
    known = [entry for entry in ORDER[side].split() if f"{inside}.".startswith(f"{entry}.")]
    assert known or not inside, f"{name} is in no room of ORDER"
    return f"{side}.{max(known, key=len)}" if known else side


def test_no_import_runs_against_the_order_of_the_rooms():
    height = {f"{side}.{entry}": (side, number) for side in ORDER for number, entry in enumerate(ORDER[side].split())}
    against = []
    for name in modules():
        for other in imported_modules(name):
            here, there = room(name), room(other)
            if top(here) == top(there) and height.get(there, (top(name), -1)) > height.get(here, (top(name), 99)):
                against.append(f"{name} imports {other}")
    assert not against


def test_no_files_import_one_another_in_a_circle():
    waiting = {name: imported_modules(name) for name in modules()}
    while free := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in free:
            del waiting[name]
    assert not waiting, "each of these modules is in a circle, or imports one that is"


def test_the_launcher_checks_recipes_with_the_packages_of_a_login_node():
    """These are what mrl depends on without an extra; everything else is as good as not installed."""
    program = """
import sys
from importlib.metadata import distribution, packages_distributions
from packaging.requirements import Requirement

login, waiting = set(), {"mrl"}
while waiting:
    found = distribution(waiting.pop())
    login.add(found.name.lower())
    wanted = [Requirement(text) for text in found.requires or ()]
    names = {one.name.lower() for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})}
    waiting |= names - login
owners = packages_distributions()
tried = set()

class OnLogin:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top in owners and not login & {owner.lower() for owner in owners[top]}:
            tried.add(top)
            raise ModuleNotFoundError(f"a login node has no {name}", name=name)

sys.meta_path.insert(0, OnLogin)
from launcher.recipe.load import load_recipe
from megatron_rl.recipe.registry import environment_class, environment_names
import launcher.cli.main, launcher.cli.mrl_submit, launcher.cli.environments, launcher.backends.local, launcher.api
load_recipe("demo")
for name in environment_names():
    environment_class(name)
print(" ".join(tried & {"torch", "megatron", "transformers", "apex"}) or "light")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.strip() == "light", run.stderr


def test_the_ranks_never_import_the_launcher():
    for name, file in modules().items():
        if name.startswith("megatron_rl"):
            assert not {other for other in imports(file) if other.split(".")[0] == "launcher"}, name


def test_the_launcher_imports_from_megatron_rl_only_modules_without_torch():
    for name, file in modules().items():
        if not name.startswith("launcher"):
            continue
        for other in imports(file):
            if other.startswith(("megatron_rl", "megatron.", "torch")):
                assert other.startswith((*SHARED, *EXCEPTIONS)), f"{name}: {other}"


@pytest.mark.parametrize("folder", ["launcher/host", "megatron_rl/contract"])
def test_code_of_a_batch_host_runs_on_python_3_9_with_the_standard_library_alone(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 5
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), filename=str(file), feature_version=(3, 9))
        for name in imports(file):
            ours = name.startswith(("launcher.host", "megatron_rl.contract"))
            assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{file} imports {name}"


@pytest.mark.skipif(not OLDEST_PYTHON.exists(), reason=f"needs {OLDEST_PYTHON}")
def test_the_oldest_python_of_a_batch_host_imports_all_its_code():
    names = [name for name in modules() if name.startswith(("launcher.host", "megatron_rl.contract"))]
    program = "; ".join(f"import {name}" for name in names if not name.endswith("__main__"))
    run = subprocess.run([OLDEST_PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_room_has_a_docstring():
    for name, file in modules().items():
        if file.name == "__init__.py":
            assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), name


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their bare names, and refuses the second one only if both run at once."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
