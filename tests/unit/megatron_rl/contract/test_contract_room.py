"""The contract can be imported on every host of the two sides."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import megatron_rl.contract

ROOM = Path(megatron_rl.contract.__file__).parent
FILES = sorted(ROOM.glob("*.py"))


def test_contract_imports_only_the_standard_library():
    assert len(FILES) > 5
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [str(node.module)]
            for name in names:
                ours = name.startswith("megatron_rl.contract")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, f"{file} imports {name}"


def test_contract_needs_no_installed_package():
    program = "import megatron_rl.contract.window_rules, megatron_rl.contract.run_records"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOM.parents[1])!r}); {program}"],
        check=True,
        timeout=60,
    )
