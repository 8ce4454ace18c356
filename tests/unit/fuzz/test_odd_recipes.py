"""YAML of people is read or refused, and a recipe with any value in any place is planned or refused, in a sentence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from examples import examples
from hostile import ODD_TEXTS, damaged_bytes, odd_bytes, places_in
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.mrl_submit import main as mrl_submit
from launcher.cluster.choice import load_clusters
from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from launcher.recipe.located_yaml import Located, YamlProblems, dump, read

PROFILE: dict[str, Any] = {
    "gpus_per_node": 8,
    "run_root": "$HOME/mrl",
    "partition": "gpu",
    "mail": {"to": "me@x", "when": ["END"]},
    "gres": "gpu",
    "gpu_memory_gib": 80.0,
    "time_limit": "4:00:00",
    "srun": ["--mpi=none"],
    "signal_s": 120,
    "wrapper": {"command": ["nsys", "--x"], "ranks": [0]},
    "vllm": {"python": "/opt/python"},
    "secrets": ["TOKEN"],
    "container": {"image": "a.sqsh", "mounts": ["$USER:/x"], "workdir": "/x"},
    "environment": {"A": "$USER"},
    "prolog": ["module load x"],
    "sbatch": ["--exclusive"],
    "fs_bandwidth": 1.5,
    "readable_by": "group",
}
SIGNS = "ab:-[]{},#&*!|>'\"%@`?~"
PARTS = [
    *SIGNS,
    *(
        "::",
        "<<:",
        "&x",
        "*x",
        "&y",
        "*y",
        "!!int ",
        "!!float ",
        "!!bool ",
        "!!str ",
        "!!set ",
        "!!binary ",
        "!!merge ",
    ),
    *("\n", "\n  ", "\n\t", "\r", " ", "---", "...", "a: ", "- ", "<<: *x", "!!null ", "!!timestamp ", "!<x> "),
    *(
        "0x1F",
        "1_0",
        "yes",
        "2026-13-41",
        ".nan",
        "1e999",
        "9" * 30,
        "\u2028",
        "\x85",
        "\0",
        "\ud800",
        "\ufeff",
        "[" * 60,
    ),
]
ODD = [
    *(None, True, 0, -1, 1, 3, 7, 0.5, -0.5, 1e-300, 1e308, float("inf"), float("nan"), 2**62, 10**18, "", "x"),
    *([], {}, [None], [[]], [{}], {"a": None}, {"": 0}, [1, "a"], "1", "true", "cuda", "cpu", "null"),
    *(text for text in ODD_TEXTS if text.isprintable()),
]


@examples(60)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_any_text_is_yaml_or_refused(parts):
    try:
        assert isinstance(read("".join(parts)), Located)
    except YamlProblems as error:
        assert error.problems and all(what for _, what in error.problems)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("home")
    (folder / "clusters.yaml").write_text(f"lab: {{gpus_per_node: 8, container: null, run_root: {folder}/root}}\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MRL_CLUSTERS", "clusters.yaml"), ("XDG_STATE_HOME", "state")):
            patch.setenv(name, str(folder / value))
        patch.chdir(folder)
        yield folder


@examples(20)
@given(
    name=st.sampled_from(["demo", "demo-program", "demo-supervised"]),
    chance=st.randoms(use_true_random=False),
    cluster=st.sampled_from(["local", "lab"]),
)
def test_a_recipe_with_odd_values_is_planned_or_refused(home, name, chance, cluster):
    values = copy.deepcopy(load_recipe(name).config.model_dump(mode="json"))
    for _ in range(chance.randint(1, 2)):
        places = places_in(values)
        container, key = chance.choice(places)
        container[key] = chance.choice(ODD)
    Path("mine.yaml").write_text(dump(values), encoding="utf-8")
    done = CliRunner().invoke(mrl_submit, ["mine.yaml", "--dry-run", "--cluster", cluster])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 2)
    assert done.exit_code == 0 or "error: " in done.stderr or "would be refused: " in done.stderr


SHAPES = (
    lambda values: {"default": "lab", "clusters": {"lab": values, "other": values}},
    lambda values: {"default": "lab", "lab": values},
    lambda values: {"lab": values},
    lambda values: {"clusters": [values]},
    lambda values: [values],
)


@examples(40)
@given(shape=st.sampled_from(SHAPES), chance=st.randoms(use_true_random=False), in_bytes=st.booleans())
def test_profiles_of_any_shape_are_read_or_refused(home, shape, chance, in_bytes):
    tree = copy.deepcopy(shape(PROFILE))
    for _ in range(chance.randint(0, 3)):
        places = places_in(tree)
        container, key = chance.choice(places) if places else (None, None)
        if container is not None:
            container[key] = copy.deepcopy(chance.choice([*ODD, tree]))
    data = damaged_bytes(dump(tree).encode("utf-8", "surrogatepass"), chance) if in_bytes else dump(tree).encode()
    Path("odd.yaml").write_bytes(odd_bytes(chance) if chance.random() < 0.1 else data)
    environ = {
        "HOME": "/home/me",
        "USER": chance.choice(ODD_TEXTS),
        "MRL_CLUSTER": chance.choice(["", "lab", "\ud800"]),
    }
    try:
        clusters = load_clusters(Path("odd.yaml"), environ)
        clusters.choose_profile(None, chance.choice([None, "lab", ""]))
    except BadInput as error:
        assert error.problems and all(error.problems)
