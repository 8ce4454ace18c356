"""A resumed run needs only its own checkpoint, except for the KL penalty."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from core_helpers import quiet_safe_points, stir, tiny_model, tiny_run

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append
from megatron_rl.rank.here import Here
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run import setup
from megatron_rl.run.setup import set_up
from megatron_rl.run.state import Counters, Run

STEP = 3


class Began:
    """A run that started from the checkpoint of another run, and has saved its own step 3."""

    def __init__(self, folder: Path, platform: Any, groups: Any, **grpo: Any) -> None:
        self.platform, self.groups = platform, groups
        self.source, self.run_dir = folder / "source", RunDir(folder / "run")
        self.change_source(seed=1)
        first = self.start(**grpo)
        stir(first.trainer.policy, 0.3)
        self.weights = weights(first)
        first.step, first.next_ordinal, first.evaluated, first.trainer.policy_version = STEP, 12, 2, 5
        save(first, STEP)

    def change_source(self, seed: int) -> None:
        """Save other weights at the path of `model.checkpoint`."""
        shutil.rmtree(self.source, ignore_errors=True)
        other = self._set_up(RunDir(self.source), tiny_run())
        stir(other.trainer.policy, 0.3, seed)
        save(other, 1)

    def start(self, *, shape: dict[str, Any] | None = None, **grpo: Any) -> Run:
        checkpoint = str(RunDir(self.source).checkpoint(1))
        model = tiny_model(init="checkpoint", checkpoint=checkpoint, **shape or {}).model_dump()
        return self._set_up(self.run_dir, tiny_run(model=model, grpo=grpo))

    def _set_up(self, run_dir: RunDir, config: RunConfig) -> Run:
        attempt = run_dir.attempt(run_dir.last_attempt() + 1)
        attempt.folder.mkdir(parents=True)
        return set_up(config, Here(run_dir, attempt, self.platform, self.groups, quiet_safe_points()))


def weights(run: Run) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in run.trainer.policy.parameters()]


def save(run: Run, step: int) -> None:
    append(run.here.run_dir.metrics, MetricsLine(step, {"loss": 0.5}))
    run.checkpointer.save(step, run.models.sharded_state(), run.counters())
    run.checkpointer.wait(final=True)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_counters_resume_from_the_checkpoint_and_the_initial_one_is_not_needed(
    tmp_path: Path, platform: Any, groups: Any
) -> None:
    """The initial checkpoint may be deleted by then, and loading it at every start would cost minutes."""
    began = Began(tmp_path, platform, groups)
    for _ in range(2):
        run = began.start()
        assert same(weights(run), began.weights)
        assert (run.step, run.next_ordinal, run.evaluated, run.saved) == (STEP, 12, 2, STEP)
        assert run.trainer.policy_version == run.engine.policy_version == 5
        shutil.rmtree(began.source, ignore_errors=True)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"rope_base": 5e5}, r"model.rope_base 500000.0 contradicts 10000.0 \(model.rope_base\) of .*resolved.yaml"),
        ({"num_attention_heads": 2, "num_query_groups": 1}, "num_attention_heads 2 .*; model.num_query_groups 1 "),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_even_if_its_tensors_fit(
    tmp_path: Path, platform: Any, groups: Any, shape: dict[str, Any], said: str
) -> None:
    began = Began(tmp_path, platform, groups)
    shutil.rmtree(began.run_dir.root)
    RunDir(began.source).resolved.write_text(yaml.safe_dump(tiny_run().model_dump()))
    with pytest.raises(ConfigurationError, match=f"model.checkpoint: .*{said}"):
        began.start(shape=shape)
    began.start()


def test_the_kl_penalty_stays_towards_the_initial_weights(tmp_path: Path, platform: Any, groups: Any) -> None:
    began = Began(tmp_path, platform, groups, kl_beta=0.1)
    run = began.start(kl_beta=0.1)
    assert run.models.reference is not None
    assert same(weights(run), began.weights)
    assert not same([weight.detach() for weight in run.models.reference.parameters()], began.weights)
    began.change_source(seed=2)
    with pytest.raises(
        ConfigurationError, match=r"model\.checkpoint \(or huggingface\) has changed since this run started"
    ):
        began.start(kl_beta=0.1)
    assert same(weights(began.start()), began.weights), "only the penalty needs the initial weights"
    shutil.rmtree(began.source)
    with pytest.raises(ConfigurationError, match=r"model\.checkpoint: .* is not a checkpoint"):
        began.start(kl_beta=0.1)
    shutil.rmtree(began.run_dir.root)
    with pytest.raises(ConfigurationError, match=r"model\.checkpoint: .* is not a checkpoint"):
        began.start()  # there is no checkpoint of the run any more


def test_counters_of_a_later_version_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="has turns_seen, unknown to this version of mrl"):
        Counters.of({**asdict(Counters(step=STEP)), "turns_seen": 3})


def test_fault_of_a_row_is_a_wrong_configuration_before_any_model_is_built(
    tmp_path: Path, one_rank: None, platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "x"}\n')
    data = {"path": str(tmp_path / "rows.jsonl"), "prompt": "prompt", "answer": "answer"}
    values = tiny_run().model_dump() | {"data": data, "environment": None, "grpo": None}
    values["training"] |= {"objective": "supervised"}
    monkeypatch.setattr(setup, "build_models", lambda *_, **__: pytest.fail("a model was built"))
    run_dir = RunDir(tmp_path / "run")
    here = Here(run_dir, run_dir.attempt(1), platform, groups, quiet_safe_points())
    with pytest.raises(ConfigurationError, match=r"rows\.jsonl:1 cannot be trained on: no token for the character 'x'"):
        set_up(RunConfig.model_validate(values), here)
