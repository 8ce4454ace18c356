"""Functions of the user's that a recipe names: which file is meant, what is refused, and the run's copy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.contract.run_records import KeptFile, KeptFiles
from megatron_rl.recipe.own_code import CodeReference, beside, check_file, kept, load, name_or_own
from megatron_rl.recipe.removed import MOVED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("import math\n\nanswer = 42\n\ndef loss():\n    return math.pi\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("def loss():\n    return 'inner'\n")
    return tmp_path


@pytest.mark.parametrize("text", ["mine:loss", "package.inner:loss", "./some folder/mine.py:loss", "/a:b/mine.py:loss"])
def test_reference_names_a_module_or_a_file_and_a_function(text: str) -> None:
    place, function = CodeReference.of(text)
    assert f"{place}:{function}" == text
    assert (CodeReference.of(text).file is not None) == place.endswith(".py")


@pytest.mark.parametrize("text", ["mine:", ":loss", "mine:1loss", "my module:loss", "mine.txt:a.b", "mine/loss:f"])
def test_other_texts_with_a_colon_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form module:function or FILE\.py:function"):
        name_or_own(text, ["clip"])


def test_misspelt_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"unknown name 'gsop' \(did you mean 'gspo'\?\); expected one of clip, gspo"):
        name_or_own("gsop", ["clip", "gspo"])


def test_module_beside_the_recipe_becomes_the_path_of_its_file(folder: Path) -> None:
    assert beside("mine:loss", folder) == f"{folder}/mine.py:loss"
    assert beside("package.inner:loss", folder) == f"{folder}/package/inner.py:loss"
    assert beside("other.py:loss", folder) == f"{folder}/other.py:loss"  # its absence is reported later
    assert beside("installed:loss", folder) == "installed:loss"
    assert beside("clip", folder) == "clip"


def test_function_of_a_file_is_loaded_and_is_the_same_object_each_time(folder: Path) -> None:
    found = load(f"{folder}/mine.py:loss")
    assert found() == pytest.approx(3.14159, abs=1e-4)
    assert load(f"{folder}/mine.py:loss") is found
    assert load("math:sqrt")(9) == 3


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("mine.py:nothing", "mine.py defines no function nothing"),
        ("absent.py:loss", "absent.py: no such file or directory"),
        ("broken.py:loss", "broken.py:2: not valid Python"),
        ("raises.py:loss", r"raises\.py:2: 1 / 0: ZeroDivisionError"),
        ("mine.py:answer", "answer is not a function"),
    ],
)
def test_unusable_file_is_refused_with_its_place(folder: Path, reference: str, why: str) -> None:
    (folder / "broken.py").write_text("x = 1\ndef loss(:\n")
    (folder / "raises.py").write_text("def loss(): pass\n1 / 0\n")
    with pytest.raises(ValueError, match=why):
        load(f"{folder}/{reference}")
    assert not [name for name in sys.modules if name.startswith("mrl_own_raises")]


def test_absent_module_is_refused_with_the_ways_to_provide_it() -> None:
    with pytest.raises(ValueError, match=r"nowhere_at_all: ModuleNotFoundError.*beside the recipe.*code\.include"):
        load("nowhere_at_all:loss")
    check_file("nowhere_at_all:loss")  # only an import can decide


def test_files_import_the_modules_beside_them_and_never_those_of_another_folder(tmp_path: Path) -> None:
    for name, right in (("one", "1"), ("two", "2")):
        (tmp_path / name).mkdir()
        source = f"# {name}\nfrom beside_mine import right\ndef loss():\n    return right\n"
        (tmp_path / name / "mine.py").write_text(source)
        (tmp_path / name / "beside_mine.py").write_text(f"right = {right}\n")
    assert load(f"{tmp_path}/one/mine.py:loss")() == 1
    with pytest.raises(ValueError, match="import different modules named beside_mine: rename one of them"):
        load(f"{tmp_path}/two/mine.py:loss")
    (tmp_path / "two" / "beside_mine.py").write_text("right = 1\n")
    assert load(f"{tmp_path}/two/mine.py:loss")() == 1


def test_a_file_that_reads_what_lies_beside_it_learns_that_a_run_has_no_copy(folder: Path) -> None:
    (folder / "reads.py").write_text(f"open({str(folder / 'table.json')!r})\ndef loss(): pass\n")
    with pytest.raises(ValueError, match=r"reads.py:1: .*FileNotFoundError.*by their absolute paths"):
        load(f"{folder}/reads.py:loss")


def test_run_uses_its_copy_of_a_file(folder: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    original = f"{folder}/mine.py"
    assert kept(f"{original}:loss", run) == f"{original}:loss"
    (run.kept_files / "1-abc").mkdir(parents=True)
    (run.kept_files / "1-abc" / "mine.py").write_text("def loss():\n    return 'copy'\n")
    write(run.kept_files_record, KeptFiles([KeptFile(original, "1-abc/mine.py", "abc")]))
    assert load(kept(f"{original}:loss", run))() == "copy"
    assert kept("math:sqrt", run) == "math:sqrt"
    assert kept("clip", run) == "clip"
    run.kept_files_record.write_text("{")
    with pytest.raises(ValueError, match="copies of user code are unknown"):
        kept(f"{original}:loss", run)


def test_import_of_a_module_that_has_moved_names_its_new_place(folder: Path) -> None:
    (folder / "old.py").write_text("from megatron_rl.environments.dataset import Dataset\n\ndef loss(): ...\n")
    with pytest.raises(ValueError, match=r"megatron_rl\.environments is megatron_rl\.agent\.environments now"):
        load(f"{folder}/old.py:loss")
    for old, new in MOVED.items():
        assert importlib.util.find_spec(f"megatron_rl.{new}"), new
        assert not Path("megatron_rl", *old.split(".")).with_suffix(".py").exists()
