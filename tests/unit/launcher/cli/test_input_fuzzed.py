"""Random recipes, overrides, profiles and arguments cause no traceback and no hang, and a meaningful
exit code."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from doctor_helpers import RECORDED, disk, slurm
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import begin, end, submitted

from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.node import NodeFacts
from launcher.backends.slurm.cluster_facts import SlurmFacts
from launcher.cli import doctor, prefetch
from launcher.cli.main import ALIASES, COMMANDS, main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.cluster.choice import SHIPPED as CLUSTERS
from launcher.host.record.identity import identify
from launcher.recipe.problems import known_keys
from launcher.recipe.shipped import SHIPPED
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.config import RunConfig

LIMIT_S = 20.0  # of processor time of one command, before it counts as hanging
DEMO = (SHIPPED / "demo.yaml").read_text(encoding="utf-8")
PROFILE = (CLUSTERS / "h100.yaml").read_text(encoding="utf-8")
KEYS = sorted(".".join(path) for path in known_keys(RunConfig.model_json_schema()))

ODD = [
    *("", " ", "-", "--", "~", "..", "/", "@", "=", ",", "[", "{", "*", "&a", "<<", "null", "true", "NaN", ".inf"),
    *("-1", "0", "1e999", "99999999999999999999", "0x", "1_0", "2024-13-01", "!!int x", "!!python/object:os.system x"),
    *("a\0b", "\x1b[31m", "\udcff", "\u2028", "é", "x" * 300, "~nouser/x", "$HOME", "$(id)", "a\nb"),
    *("'", '"', "[1,2", "%"),
]
WORD = st.sampled_from(ODD) | st.text(max_size=12)
VALUE = WORD | st.integers().map(str) | st.floats().map(str)


def texts(original: str) -> st.SearchStrategy[str]:
    """Text of a file with lines removed, doubled or indented, or with a value of another type."""
    lines = original.splitlines()

    def edited(changes: list[tuple[int, str, str]]) -> str:
        result = list(lines)
        for number, kind, word in changes:
            at = number % len(result)
            key = result[at].partition(":")[0]
            line = result[at]
            result[at] = {"lost": "", "value": f"{key}: {word}", "in": f" {line}", "word": word}.get(kind, line)
            if kind == "twice":
                result.insert(at, result[at])
        return "\n".join(result) + "\n"

    kinds = st.sampled_from(["lost", "value", "value", "value", "in", "word", "twice"])
    return st.lists(st.tuples(st.integers(0, 500), kinds, VALUE), min_size=1, max_size=4).map(edited)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A login node without Slurm, with three runs in its index."""
    folder = tmp_path_factory.mktemp("home")
    lab = f"lab: {{gpus_per_node: 8, container: null, run_root: {folder}/root}}\n"
    (folder / "clusters.yaml").write_text(lab)
    environ = {
        "XDG_STATE_HOME": str(folder / "state"),
        "MRL_CLUSTERS": str(folder / "clusters.yaml"),
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "100",
    }
    before = Path.cwd()
    with mock.patch.dict(os.environ, environ):
        os.environ.pop("MRL_CLUSTER", None)
        os.chdir(folder)
        for name, job_id in (("one", None), ("two", "7"), ("three", "8")):
            run = submitted(folder / name, job_id=job_id, cluster="lab" if job_id else "local")
            identify(run)
            begin(run, 1, job_id=job_id)
            run.metrics.write_text('{"step": 1, "mean_reward": 0.5}\n')
        end(RunDir(folder / "one"), 1, "drained")
        yield folder
        os.chdir(before)


def tried(program: click.Command, words: list[str]) -> int:
    """Run a command, check that it ends properly, and return its exit code."""
    began = time.process_time()
    done = CliRunner().invoke(program, words)
    assert time.process_time() - began < LIMIT_S, words
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2, 3), (words, done.exit_code)
    found = done.exit_code == 1 and words[0] in LOOKS_INTO  # that something is missing, as the output says
    if done.exit_code in (1, 2):
        said = done.output if found else done.stderr.lower().rpartition("error:")[2]
        assert said.strip(), (words, done.output)
    return done.exit_code


@given(text=texts(DEMO))
def test_recipes(home, text):
    (home / "mine.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert tried(mrl_submit, ["mine.yaml", "--dry-run"]) in (0, 2)


@given(
    overrides=st.lists(st.tuples(st.sampled_from(KEYS) | WORD, VALUE), min_size=1, max_size=3), cluster=st.booleans()
)
def test_overrides(home, overrides, cluster):
    words = [f"{key}={value}" for key, value in overrides]
    where = ["--cluster", "lab"] if cluster else []
    assert tried(mrl_submit, ["--dry-run", *where, "--", "demo", *words]) in (0, 2)


@given(text=texts(PROFILE))
def test_profiles(home, text):
    indented = "lab:\n" + "".join(f"  {line}\n" for line in text.splitlines())
    (home / "odd.yaml").write_text(indented, encoding="utf-8", errors="surrogateescape")
    with mock.patch.dict(os.environ, {"MRL_CLUSTERS": str(home / "odd.yaml")}):
        assert tried(mrl_submit, ["demo", "--cluster", "lab", "--dry-run", "job.gpus_per_node=2"]) in (0, 2)


OPTIONS = [
    *("--json", "--all", "--drain", "--now", "--list", "-n", "--lines", "--rank", "--role", "--attempt", "--cluster"),
    *("--help", "--yes", "--limit", "--nonsense", "--run-dir", "--change", "--after", "--max-running", "--script"),
]
NAMES = ["demo", "one", "two", "t", "7", "99", "one@1", "one@", "demo.yaml", "training.steps=3"]
ARGUMENT = WORD | st.sampled_from([*NAMES, *OPTIONS])
LOOKS_INTO = ("doctor", "prefetch", "rehearse")  # the machine, the network, the ranks
BELOW = (*LOOKS_INTO, "convert")


@examples(40)
@given(
    name=st.sampled_from([*sorted({*COMMANDS, *ALIASES} - {*BELOW}), "mrl-submit", "mrl-submit"]),
    arguments=st.lists(ARGUMENT, max_size=4),
)
def test_arguments(home, name, arguments):
    words = ["--dry-run", *arguments] if name in ("resume", "fork", "mrl-submit") else arguments
    if name == "mrl-submit":
        tried(mrl_submit, words)
    else:
        tried(main, [name, *words])


OVERRIDES = [
    *("job.device=cuda", "job.nodes=4", "job.gpus_per_node=8", "model.init=huggingface", "model.huggingface=a/b"),
    *("tokenizer.type=huggingface", "tokenizer.path=a/b", "environment.name=math", "image.reference=a:1"),
    *("image.reference=A b", "image.import_on=login", "parallel.tensor=3", "job.time_limit=1:00:00", "cluster=lab"),
]
DEMANDS = st.lists(st.sampled_from(OVERRIDES) | ARGUMENT, max_size=4)
PLACES = st.sampled_from([[], ["--cluster", "lab"], ["--cluster", "h100"], ["--cluster", "local"], ["--cluster", "x"]])
HEADS = st.sampled_from([["demo"], ["demo"], ["qwen2.5-32b-dapo"], []])


@given(head=HEADS, place=PLACES, more=DEMANDS, fetched=st.booleans())
def test_arguments_of_prefetch(home, head, place, more, fetched):
    """The network returns nothing, or claims success."""
    with mock.patch.object(prefetch, "fetch", lambda need, cache: fetched):
        tried(main, ["prefetch", *head, *place, *more])
        tried(main, ["prefetch", *head, *place, "--check", *more])


FACTS = [field.name for field in fields(SlurmFacts)]
CLUSTERS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


def spoilt(text: str, at: int, odd: str, cut: bool) -> str:
    where = at % (len(text) + 1)
    return text[:where] + odd + ("" if cut else text[where:])


@examples(30)
@given(
    head=HEADS,
    place=PLACES,
    more=DEMANDS,
    cluster=st.sampled_from(CLUSTERS),
    damages=st.lists(st.tuples(st.sampled_from(FACTS), st.integers(0, 5000), WORD, st.booleans()), max_size=3),
    silent=st.lists(st.sampled_from(FACTS), max_size=2),
    writable=st.booleans(),
)
def test_arguments_of_doctor(home, head, place, more, cluster, damages, silent, writable):
    """The facts are recorded, with some of Slurm's answers damaged or missing."""
    said = slurm(cluster)
    for name, at, odd, cut in damages:
        said = replace(said, **{name: CommandAnswer(spoilt(getattr(said, name).text, at, odd, cut))})
    said = replace(said, **{name: CommandAnswer(failure="no answer within 20 s") for name in silent})
    found = disk(writable=writable, problem=None if writable else "Read-only file system")
    with (
        mock.patch.object(doctor.slurm_facts, "collect", lambda: said),
        mock.patch.object(doctor.disk, "inspect", lambda path: found),
        mock.patch.object(doctor.compute_node, "python_here", lambda python: CommandAnswer("3.9.2\n")),
        mock.patch.object(doctor.compute_node, "probe", lambda *about: NodeFacts(failure="no node is free")),
    ):
        tried(main, ["doctor", *head, *place, *more])
