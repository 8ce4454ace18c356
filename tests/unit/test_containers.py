"""The scripts that make the image of the ranks leave no partial one. Its sources cannot be downloaded in tests, so srun
and unsquashfs are stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from image_rehearsal import CONTAINERS


@pytest.fixture
def build(tmp_path):
    """Run build.sbatch. srun: script of the stand-in for srun, which has the target path in $SAVE."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "dist").mkdir()

    def run(srun: str, **environment: str) -> subprocess.CompletedProcess[str]:
        tools = {
            "srun": f'#!/bin/bash\nfor a; do [[ $a != --container-save=* ]] || SAVE=${{a#*=}}; done\necho "$@"\n{srun}',
            "unsquashfs": '#!/bin/bash\ngrep -q whole "${@: -1}"\n',
        }
        for name, text in tools.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **environment}
        command = ["bash", str(CONTAINERS / "build.sbatch")]
        return subprocess.run(command, env={**env, "SLURM_JOB_ID": "7"}, capture_output=True, text=True, timeout=30)

    return run


def test_an_image_is_built_under_a_temporary_name_and_appears_complete(build, tmp_path):
    (tmp_path / "dist" / "mrl-0.1.0-py3-none-any.whl").touch()
    image = tmp_path / "mrl.sqsh"
    built = build('echo whole >"$SAVE"', IMAGE=str(image))
    assert built.returncode == 0, built.stderr
    assert "--container-image=nvcr.io#nvidia/pytorch:25.06-py3" in built.stdout
    assert "install.sh /opt/checkout/dist/mrl-0.1.0-py3-none-any.whl" in built.stdout
    assert [path.name for path in tmp_path.glob("*.sqsh")] == ["mrl.sqsh"]
    again = build('echo whole >"$SAVE"', IMAGE=str(image))
    assert again.returncode != 0
    assert "images are never changed" in again.stderr


@pytest.mark.parametrize("image", ["images/new/mrl.sqsh", "mrl.sqsh"])
def test_the_folder_of_an_image_is_created(build, tmp_path, monkeypatch, image):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dist" / "mrl-0.1.0-py3-none-any.whl").touch()
    built = build('[[ $SAVE == /* ]] && echo whole >"$SAVE"', IMAGE=image)
    assert built.returncode == 0, built.stderr
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.sqsh")] == [Path(image)]


def test_an_image_that_appears_meanwhile_is_not_reported_as_built(build, tmp_path):
    (tmp_path / "dist" / "mrl-0.1.0-py3-none-any.whl").touch()
    image = tmp_path / "mrl.sqsh"
    built = build(f'echo whole >"$SAVE"; echo theirs >{image}', IMAGE=str(image))
    assert (built.returncode, image.read_text()) == (1, "theirs\n")
    assert "made by somebody else" in built.stderr and "built" not in built.stdout


def test_the_newest_wheel_is_installed_with_all_processors_and_without_a_gpu(build, tmp_path):
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        (tmp_path / "dist" / f"mrl-{version}-py3-none-any.whl").touch()
    said = 'echo "void: $NVIDIA_VISIBLE_DEVICES"; echo whole >"$SAVE"'
    built = build(said, IMAGE=str(tmp_path / "mrl.sqsh"), SLURM_CPUS_PER_TASK="16").stdout
    assert "install.sh /opt/checkout/dist/mrl-0.10.0-py3-none-any.whl" in built
    assert "--cpus-per-task=16" in built  # srun does not take it from the job
    assert "void: void" in built
    assert "--container-env=NVIDIA_VISIBLE_DEVICES" in built, "or the image's own value wins"


@pytest.mark.parametrize(("imports", "code"), [("exit 0", 0), ("exit 1", 1)])
def test_an_image_that_cannot_import_the_newest_wheel_is_discarded(tmp_path, imports, code):
    (tmp_path / "bin").mkdir()
    python = f'#!/bin/sh\ncase "$*" in *pins.py) echo torch==2 ;; *megatron.core*) {imports} ;; esac\n'
    for name, text in {"pip": '#!/bin/sh\necho "$@"\n', "python3": python}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    wheels = ["/d/mrl-0.10.0-py3-none-any.whl", "/d/mrl-0.9.0-py3-none-any.whl"]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(CONTAINERS / "install.sh"), *wheels]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert f"{wheels[0]}[" in done.stdout
    assert (done.returncode, "added mrl" in done.stdout) == (code, code == 0)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Run install.sh with stand-ins for its Python and pip, which note their arguments; return (exit code, notes)."""
    monkeypatch.delenv("NVIDIA_PYTORCH_VERSION", raising=False)
    note = f'echo "$0 $@ ${{PIP_CONSTRAINT:-free}}" >>{tmp_path}/notes'
    answer = f"""case "$*" in
    *pins.py) if [ "$REPLACED" = yes ]; then echo "torch==$(wc -l <{tmp_path}/notes)"; else echo torch==2; fi ;;
    *gpu_calls*) [ "$UNFIT" != yes ] || exit 1 ;;
    esac"""
    venv = f'[ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp {tmp_path}/bin/* "$3/bin"; }}'
    (tmp_path / "bin").mkdir()
    for name, text in {"pip": "", "python3": f"{answer}; {venv}", "python": '[ "$BROKEN" != yes ]'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{note}\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(**environment: str) -> tuple[int, str]:
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PIP_CONSTRAINT": "/etc/pins"}
        environ |= {"VLLM_ENVIRONMENT": str(tmp_path / "vllm"), **environment}
        command = ["bash", str(CONTAINERS / "install.sh"), "/d/mrl-0.1.0-py3-none-any.whl"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, (tmp_path / "notes").read_text()

    return run


def test_the_constraints_of_the_image_do_not_apply_and_its_own_builds_stay(install, tmp_path):
    code, notes = install()
    (of_pip,) = (line for line in notes.splitlines() if line.startswith(f"{tmp_path}/bin/pip install"))
    assert code == 0 and of_pip.endswith(" free")
    assert re.search(r"-c /tmp/\S+ -c \S+/constraints.txt ", of_pip)
    assert install(REPLACED="yes")[0] == 1


def test_an_image_that_was_tried_gets_the_packages_of_its_lock_and_nothing_else(install, tmp_path):
    code, notes = install(NVIDIA_PYTORCH_VERSION="25.06")
    of_lock, of_mrl = (line for line in notes.splitlines() if line.startswith(f"{tmp_path}/bin/pip install"))
    assert code == 0
    assert f"--no-deps --require-hashes -r {CONTAINERS}/locked/image-pytorch-25.06.txt free" in of_lock
    assert " --no-index " in of_mrl and "/d/mrl-0.1.0-py3-none-any.whl[" in of_mrl


def test_pip_chooses_the_packages_of_an_image_without_a_lock(install):
    code, notes = install(NVIDIA_PYTORCH_VERSION="99.01")
    assert code == 0 and "--no-index" not in notes and "--require-hashes" not in notes


def test_an_image_whose_packages_do_not_accept_the_calls_is_discarded(install):
    code, notes = install(UNFIT="yes")
    assert code == 1
    assert "-m megatron_rl.model.platform.gpu_calls flash-attn transformer-engine" in notes


def test_vllm_gets_an_environment_of_its_own_without_the_pins_of_the_image(install, tmp_path):
    """Its torch is another one than that of the image."""
    code, notes = install(VLLM="yes")
    (of_vllm,) = (line for line in notes.splitlines() if line.startswith(f"{tmp_path}/vllm/bin/pip install"))
    assert code == 0 and of_vllm.endswith("--no-deps --require-hashes -r " + f"{CONTAINERS}/locked/vllm.txt free")


def test_vllm_is_not_installed_unless_asked_for(install, tmp_path):
    code, notes = install()
    assert code == 0 and f"{tmp_path}/vllm" not in notes


def test_an_image_whose_vllm_cannot_be_imported_is_discarded(install):
    assert install(VLLM="yes", BROKEN="yes")[0] != 0


@pytest.mark.parametrize("srun", ['echo ha >"$SAVE"', 'echo whole >"$SAVE"; exit 3', "exit 1"])
def test_a_failed_build_leaves_no_image(build, tmp_path, srun):
    (tmp_path / "dist" / "mrl-0.1.0-py3-none-any.whl").touch()
    assert build(srun, IMAGE=str(tmp_path / "mrl.sqsh")).returncode != 0
    assert list(tmp_path.glob("*.sqsh")) == []


def test_missing_files_are_reported(build, tmp_path):
    assert "say where the image goes" in build("").stderr
    assert "make one first" in build("", IMAGE=str(tmp_path / "mrl.sqsh")).stderr
