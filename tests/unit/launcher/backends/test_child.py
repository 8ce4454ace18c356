"""The processes with torch that commands start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.backends import child as children
from launcher.backends.child import ModuleProcess
from launcher.cli.serve import serve
from launcher.errors import BadInput, Failed

SAYS_ITS_ORDER = 'import json; print(json.dumps({"address": "", "order": list({f"task {i}" for i in range(20)})}))'


def test_each_draws_its_problems_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some tasks of reasoning-gym go through a set, whose order is that of Python's hash seed: what `mrl evaluate`
    asks and what `mrl serve-agent` gives must be what the runs were given."""
    (tmp_path / "says_its_order.py").write_text(SAYS_ITS_ORDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with ModuleProcess("says_its_order") as child:
        asked = [said["order"] for said in child.said()]
    serve("says_its_order", [], tmp_path / "tokens", usage=None)
    served = json.loads(capsys.readouterr().out)["order"]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with ModuleProcess("says_its_order") as child:
        seed_0 = [said["order"] for said in child.said()]
    assert asked == [served] == seed_0


def test_a_process_without_the_packages_of_the_ranks_names_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_what_is_absent.py").write_text("import no_such_package")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ModuleProcess("imports_what_is_absent") as child, pytest.raises(Failed, match="No module named"):
        child.finish()
    monkeypatch.setattr(children, "missing", lambda extras: ["torch"] if [*extras] == ["train"] else [])
    with ModuleProcess("imports_what_is_absent") as child, pytest.raises(BadInput) as refused:
        child.finish()
    assert refused.type is BadInput
    assert re.fullmatch(r"not installed: torch; pip install .*\[train\]'", str(refused.value))
