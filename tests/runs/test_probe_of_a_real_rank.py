"""Report of the rank that `mrl doctor --deep` starts in the container; a stand-in for srun runs it on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.probe.rank import RankFacts, probe
from launcher.cluster.profile import Container, Profile, Wrapper


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A profile whose image exists, with an srun that runs the command after its options."""
    image = tmp_path / "i.sqsh"
    image.write_bytes(b"hsqs".ljust(48, b"\0"))
    tools = tmp_path / "bin"
    tools.mkdir()
    srun = f'#!/bin/sh\necho "$@" >{tmp_path}/said\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nexec "$@"\n'
    (tools / "srun").write_text(srun)
    (tools / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    container = Container(image=str(image), mounts=["/data:/data:ro"])
    values = {"gpus_per_node": 8, "run_root": str(tmp_path), "python": sys.executable, "srun": ["--mpi=none"]}
    return Profile.model_validate({**values, "container": container})


def test_probe_reports_versions_and_usable_cpus_and_leaves_no_files(on, tmp_path):
    found = probe(on, None, tmp_path, gpus=False)
    assert (found.failure, found.gpus) == (None, 0)
    assert "megatron-core" in found.versions
    assert found.cpus.split(",")[0].isdigit()
    said = (tmp_path / "said").read_text()
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data:ro" in said
    assert "--distribution=block:block" in said and "--mpi=none" in said
    assert "--gpus-per-node=1" not in said
    assert not list(tmp_path.glob(".mrl-doctor-*"))


@pytest.mark.slow
def test_probe_reports_the_packages_that_gpus_use(on, tmp_path):
    found = probe(on, None, tmp_path, gpus=True)
    assert found.failure is None
    assert (False, "flash-attn is not installed: install flash-attn 2.7.4 or later") in found.packages
    assert any(fits and text.startswith("torch ") for fits, text in found.packages)
    assert found.capability is None


@pytest.mark.parametrize(("ranks", "release"), [(None, "2.9"), ([3], "2.8")], ids=str)
def test_a_wrapper_of_all_ranks_is_that_of_the_probe(on: Any, tmp_path: Path, ranks: Any, release: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntouch "$3"\nprintf "mrl.%s\\n" versions=${TORCH:-2.8} gpus=1 cpus=0 done=yes\n')
    python.chmod(0o755)
    wrapper = Wrapper(command=["env", "TORCH=2.9"], ranks=ranks)
    wrapped = on.model_copy(update={"python": str(python), "wrapper": wrapper})
    assert probe(wrapped, None, tmp_path, gpus=True).versions == release


def test_faults_of_the_container_are_reported(on, tmp_path):
    (tmp_path / "bin" / "srun").write_text(
        "#!/bin/sh\ncat >&2 <<E\nslurmstepd: error: pyxis: printing enroot log file:\n"
        "slurmstepd: error: pyxis:     enroot-mount: failed to mount: /data\n"
        "slurmstepd: error: Failed to invoke spank plugin stack\nE\nexit 1\n"
    )
    assert probe(on, None, tmp_path, gpus=True).failure == "enroot-mount: failed to mount: /data"


def test_image_without_megatron_core_is_reported_before_a_job_runs(on, tmp_path):
    bare = on.model_copy(update={"python": "/usr/bin/python3"})
    assert "No module named" in str(probe(bare, None, tmp_path, gpus=False).failure)


def test_image_not_imported_yet_is_no_fault(on, tmp_path):
    on = on.model_copy(update={"container": Container(image="nvcr.io#team/mrl:1")})
    assert probe(on, None, tmp_path, gpus=True) == RankFacts(unasked="nvcr.io#team/mrl:1 is not imported yet")
