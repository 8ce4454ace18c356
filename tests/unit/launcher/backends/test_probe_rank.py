"""The doctor reports why its rank failed, and not what srun says after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from srun_stand_in import on_a_node

from launcher.backends.probe.rank import ask_in_container, probe
from launcher.cluster.profile import Profile

SRUN = "srun: error: node01: task 0: Exited with exit code 1"
CONTAINER = """slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [ERROR] No such file or directory: /data
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: Failed to invoke spank plugin stack"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "mrl.cpus=0\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'megatron'",
            "ModuleNotFoundError: No module named 'megatron'",
        ),
        (CONTAINER, "[ERROR] No such file or directory: /data"),
        ("", SRUN),
    ],
)
def test_the_cause_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, cause: str) -> None:
    image = on_a_node(tmp_path, monkeypatch, f"cat <<'end'\n{said}\nend\necho '{SRUN}' >&2\nexit 1")
    profile = Profile.model_validate(
        {"partition": "low", "gpus_per_node": 8, "container": {"image": str(image)}, "run_root": str(tmp_path)}
    )
    assert probe(profile, None, tmp_path, gpus=False).failure == cause


def test_the_rank_has_the_variables_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyxis prefers a variable of the image unless --container-env names it."""
    image = on_a_node(tmp_path, monkeypatch, 'echo "$SITE $NVIDIA_VISIBLE_DEVICES"; echo "$@"; exit 1')
    fields = {"partition": "low", "gpus_per_node": 8, "container": {"image": str(image)}, "run_root": str(tmp_path)}
    profile = Profile.model_validate(fields | {"environment": {"SITE": "a, b"}})
    said = ask_in_container(profile, image, False, ["true"]).text
    assert said.startswith("a, b void\n")
    assert "--container-env=NVIDIA_VISIBLE_DEVICES,SITE " in said
    assert "--container-env=SITE " in ask_in_container(profile, image, True, ["true"]).text
