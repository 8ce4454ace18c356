"""Kinds of runs under chaos, and what their records must show in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exactly_once import NotExactlyOnce, fates
from records import OVERRIDES, record
from small_root import PYTHON

from launcher.recipe.shipped import SHIPPED
from megatron_rl.contract.paths import RunDir

STEPS = 16
SHORT = (*OVERRIDES, f"training.steps={STEPS}", "job.silence_limit_s=60")
REPLICA = ("placement.mode=partitioned", "placement.inference.nodes=1")
AHEAD = ("resume.partial=keep", "async.max_lag=2")
JOB = (
    "job.nodes=2",
    "job.gpus_per_node=1",
    "job.collective_timeout_s=120",
    "job.backoff_s=1",
    "job.silence_limit_s=60",
)
PROGRAM = (
    *("demo-program", "--cluster", "real", *JOB, "save.every=4", "evaluation.every=0"),
    *("model.hidden_size=32", "model.ffn_hidden_size=48", "model.supervised.steps=60"),
    *("environment.args.timeout_s=250", "job.silence_limit_s=300", "environment.args.held_out=0.02"),
)
FEW = ("grpo.prompts_per_step=2", "grpo.group_size=2")
"""Answers of programs, each of which starts a process."""
SUPERVISED = ("training.steps=40", "evaluation.every=20", "data.examples_per_step=32")
CONTAINED = Path(__file__).with_name("contained_stock.py")
ASLEEP = "answer = await complete(client, prompt)"


@dataclass(frozen=True)
class Kind:
    """One kind of run: the words of mrl-submit."""

    name: str
    words: tuple[str, ...]
    like: str | None = None
    """Kind whose undisturbed record it has; None: each prompt is settled once, whatever the answers are."""


def kinds(vllm: str | None, image: Path | None) -> dict[str, Kind]:
    """All kinds that run here.

    vllm: interpreter that has vLLM. image: root file system for containers with an interpreter.
    """
    demo = ("demo", "--cluster", "real", *SHORT)
    apart = ("job.nodes=2", *REPLICA, *AHEAD)
    found = [
        Kind("co-located", demo, "co-located"),
        Kind("partitioned", (*demo, "job.nodes=3", *REPLICA), "co-located"),
        Kind("partitioned with lag", (*demo, *apart)),
        Kind("adapters", (*demo, "model.lora.rank=4", "model.lora.alpha=8"), "adapters"),
        Kind("program", (*PROGRAM, *FEW, f"training.steps={STEPS}"), "program"),
        Kind("supervised", ("demo-supervised", "--cluster", "real", *JOB, "save.every=10", *SUPERVISED), "supervised"),
    ]
    if image is not None:
        program = ("environment.args.function=null", f"environment.args.command=['{PYTHON}','contained_stock.py']")
        code = (f"environment.args.code=['{CONTAINED}']", f"environment.args.container='{image}'")
        found.append(Kind("container", (*PROGRAM, *program, *code, *FEW, f"training.steps={STEPS}"), "program"))
    if vllm is not None:
        engine = ("inference.engine=vllm", "inference.max_batch=16", f"inference.vllm.python={vllm}")
        shape = ("model.hidden_size=64", "model.num_attention_heads=2", "model.num_query_groups=2")  # of vLLM on CPUs
        found.append(Kind("vLLM", (*demo, *apart, *engine, *shape, "job.silence_limit_s=1200")))
    return {kind.name: kind for kind in found}


def marathon(folder: Path) -> Kind:
    """A run that goes on until it is stopped, whose long-lived processes are watched: a replica, and programs that ask
    the policy endpoint and mostly sleep."""
    code = folder / "slow_stock.py"
    text = (SHIPPED / "programs" / "stock.py").read_text()
    assert ASLEEP in text
    patient = text.replace("import os\n", "import asyncio\nimport os\n", 1)
    code.write_text(patient.replace(ASLEEP, f"await asyncio.sleep(1.0)\n    {ASLEEP}", 1))
    program = ("environment.args.function=slow_stock:rollout", f"environment.args.code=['{code}']")
    return Kind("marathon", (*PROGRAM, *program, *FEW, "training.steps=1000000", *REPLICA, *AHEAD))


def complaint(kind: Kind, run: RunDir, undisturbed: dict[str, Path], killed: Sequence[str]) -> str | None:
    """Return what is wrong with the record of a finished run; None if nothing is.

    killed: kinds of faults it was hit with that may lose an answer, which then differs from an undisturbed one.
    """
    try:
        settled = fates(run) if kind.name != "supervised" else {}
    except NotExactlyOnce as error:
        return str(error)
    if kind.like is None or killed:
        return None if sorted(settled) == list(range(len(settled))) else "prompts are missing"
    names = ("metrics", "evaluations")
    for name, ours, theirs in zip(names, record(run), record(RunDir(undisturbed[kind.like])), strict=True):
        if ours != theirs:
            differing = next((a, b) for a, b in [*zip(ours, theirs, strict=False), (len(ours), len(theirs))] if a != b)
            return f"its {name} differ from those of the undisturbed run: {_difference(*differing)}"
    return None


def _difference(ours: object, theirs: object) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
        return f"step {ours.get('step')}: " + ", ".join(f"{key} {ours.get(key)} != {theirs.get(key)}" for key in keys)
    return f"{ours} lines instead of {theirs}"
