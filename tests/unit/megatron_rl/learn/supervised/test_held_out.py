"""The loss on held-out rows beside `transformers` in float64, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import ALPHABET, build_run
from optional import needs
from published_twin import published_twin
from supervised_helpers import sums, supervised_run, write_rows

from megatron_rl.learn.supervised import held_out
from megatron_rl.run.state import Run

pytestmark = needs("datasets")


def run_on(tmp_path: Path, platform: Any, groups: Any, **data: Any) -> Run:
    """A run on rows of two sets, whose model has no row of the vocabulary beyond the tokens."""
    rows, columns = sums(60), {"prompt": "question", "answer": "answer"}
    one, other = (write_rows(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows[:40]), ("b", rows[40:])))
    held = write_rows(tmp_path / "held.jsonl", [*sums(9, seed=1), {"question": "1" * 80, "answer": "2"}])
    sets = [
        {"path": str(one), **columns, "held_out": {"share": 0.3}},
        {"path": str(other), **columns, "held_out": {"path": str(held)}},
    ]
    recipe = supervised_run(data={"sets": sets, "prompt": None, "answer": None}, tokenizer={"alphabet": ALPHABET + "*"})
    return build_run(recipe, platform, groups)


def test_the_loss_is_that_of_transformers_in_float64_by_token_and_by_set(
    tmp_path: Path, platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(held_out, "AT_ONCE", 4)
    run = run_on(tmp_path, platform, groups)
    twin = published_twin(run.trainer.policy, run.config.model).double()
    sums_of = {}
    assert run.material.lesson.rows is not None
    for id, rows in run.material.lesson.rows.held_out.items():
        assert len(rows) > 4
        total, tokens = 0.0, 0
        for row in rows:
            prompt, answer = (run.material.lesson.tokenizer.encode(row.golden[key]) for key in ("prompt", "answer"))
            whole = torch.tensor([[*prompt, *answer, run.material.lesson.tokenizer.eos_id]])
            if whole.shape[1] > run.config.sequence_length:
                continue
            with torch.no_grad():
                logprobs = torch.log_softmax(twin(whole).logits[0, :-1], -1).gather(1, whole[0, 1:, None])
            total, tokens = total - float(logprobs[len(prompt) - 1 :].sum()), tokens + len(answer) + 1
        sums_of[f"held_out_rows/{id}"] = total, tokens
    sums_of["held_out_rows"] = tuple(map(sum, zip(*sums_of.values(), strict=True)))
    expected = {f"eval/{name}/loss": total / tokens for name, (total, tokens) in sums_of.items()}
    before = [parameter.clone() for parameter in run.trainer.policy.parameters()]
    assert run.evaluate() == pytest.approx(expected, rel=1e-6)
    assert run.evaluate() == run.evaluate()
    assert all(map(torch.equal, before, run.trainer.policy.parameters()))
    run.step = 1  # only another evaluation set is due
    assert run.evaluate() == {}
    assert caplog.text.count("1 held-out rows cannot be read as tokens") == 1


def test_first_rows_are_counted(tmp_path: Path, platform: Any, groups: Any) -> None:
    run = run_on(tmp_path, platform, groups)
    few = run.config.model_copy(update={"evaluation": run.config.evaluation.model_copy(update={"prompts": 2})})
    assert run.material.lesson.rows is not None
    rows = run.material.lesson.rows.held_out
    first = held_out.HeldOutRows({id: its[:2] for id, its in rows.items()}, run.material.lesson.tokenizer, run.config)
    limited = held_out.HeldOutRows(rows, run.material.lesson.tokenizer, few)
    assert limited.losses(run.trainer) == first.losses(run.trainer)
