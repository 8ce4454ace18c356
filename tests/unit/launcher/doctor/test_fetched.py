"""Images, models and data that a cluster lacks: one check for mrl-submit and mrl doctor. What surely fails is an error,
and what the job gets at its start is a note."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Profile
from launcher.doctor.fetched import fetched, image_of
from launcher.recipe.load import load_recipe

RECIPE = "qwen2.5-32b-dapo"


def profile(root: Path, image: str = "org/image:1") -> Profile:
    return Profile.model_validate({"gpus_per_node": 8, "run_root": str(root), "container": {"image": image}})


def said(root: Path, *overrides: str) -> list[str]:
    found = fetched(load_recipe(RECIPE, overrides), profile(root))
    return [f"{one.level}: {one.text}; {one.fix}" for one in found]


def squashfs(length: int) -> bytes:
    """Superblock of a file of 200 bytes, and its first bytes."""
    return struct.pack("<4s36xQ", b"hsqs", 200).ljust(length, b"\0")[:length]


def test_missing_models_and_data_are_errors_and_an_image_of_a_registry_is_a_note(tmp_path: Path) -> None:
    image, *others = said(tmp_path)
    assert image.startswith("note: image org/image:1 is not in ") and "the job's first node will import it" in image
    assert others and all(one.startswith("error: ") and "`mrl prefetch RECIPE`" in one for one in others)
    (image, *_) = said(tmp_path, "image.import_on=login")
    assert "mrl-submit will import it first" in image


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"", "is not a squashfs file"),
        (b"#!/bin/sh\n" * 30, "is not a squashfs file"),
        (squashfs(100), "is cut short, 100 of 200 bytes"),
    ],
    ids=["missing", "empty", "junk", "cut"],
)
def test_image_file_that_cannot_be_used_is_an_error_with_its_key(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "x.sqsh"
    if content is not None:
        file.write_bytes(content)
    (found, *_) = said(tmp_path, f"image.reference={file}")
    assert found.startswith(f"error: override 'image.reference={file}': image.reference: image {file}: {why}")


@pytest.mark.parametrize("reference", ["dockerd://mine:1", "podman://mine:1", "no image"])
def test_reference_that_no_node_can_import_is_an_error(tmp_path: Path, reference: str) -> None:
    (found, *_) = said(tmp_path, f"image.reference={reference!r}")
    assert found.startswith("error: ") and reference in found
    assert [one.level for one in image_of(profile(tmp_path, reference))] == ["error"]


@pytest.mark.parametrize("written", ["images/x.sqsh", "./images/x.sqsh", "x.sqsh"])
def test_image_file_is_looked_for_beside_what_names_it(tmp_path: Path, written: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / written).write_bytes(squashfs(200))
    (tmp_path / "mine.yaml").write_text(f"extends: {RECIPE}\nimage: {{reference: {written}}}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert recipe.config.image.reference == str(tmp_path / Path(written))
    (tmp_path / "clusters.yaml").write_text(
        f"lab: {{gpus_per_node: 8, run_root: {tmp_path}, container: {{image: {written}}}}}\n"
    )
    lab = load_clusters(tmp_path / "clusters.yaml", {}).profile("lab")
    assert not [one for one in fetched(load_recipe(RECIPE), lab) if one.topic == "image"]


def test_run_with_a_checkpoint_needs_its_initial_weights_only_where_they_are_kept(tmp_path: Path) -> None:
    def models(*overrides: str) -> list[str]:
        recipe = load_recipe(RECIPE, ["tokenizer.path=/there", *overrides])
        return [one.text for one in fetched(recipe, profile(tmp_path), resumes=True) if "model " in one.text]

    assert not models("grpo.kl_beta=0.0")
    assert models("grpo.kl_beta=0.1") and models("grpo.kl_beta=0.0", "model.lora={rank: 8}")
