"""Cheaper tokens: drafts keep the distribution of the policy, and each update is quantised to 8 bits again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_helpers import Ranks
from core_helpers import answer_logprobs, full_forward
from hf_helpers import publish
from layout_helpers import Layout
from vllm_front import Front, until
from vllm_training import CLOSE, PROMPT, SERVED, Trainer, prepare_run, probe_of

from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion
from megatron_rl.generate.vllm.command import STREAM_INTERVAL
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import Sampling

LIMIT_S = 240.0
SAMPLES = 240
SIGMAS = 5
DRAFTED = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 1}
EIGHT_BITS = {"quantization": "fp8_per_channel", "kv-cache-dtype": "fp8"}
"""The only quantisation of weights that vLLM's CPU build has without AMX, and of dense models alone."""
TOLERANCE = 1.0
"""Tolerance of the probe. The random weights of a tiny model suffer more from 8 bits than those of a trained one."""


def versions_of(root: Path, model: str) -> list[Path]:
    """Published weights that differ in every tensor."""
    folders = [root / "first", root / "second"]
    for seed, folder in enumerate(folders):
        publish(folder, SERVED[model], seed=seed)
    return folders


class Drafted(NamedTuple):
    answers: list[Completion]
    """Half of those of one version, and all that began under the first and ended under the second."""
    trained: list[list[list[float]]]
    """Log-probs of the tokens of each answer by the trainer's weights, of each version."""
    chances: list[tuple[bool, float]]
    """Whether a token continues an earlier one as the text did before, and the probability of that."""
    metrics: dict[str, float]


def ask_across_versions(_rank: int, _world: int, run: RunDir, folders: Sequence[Path]) -> Drafted:
    trainer = Trainer(run, Layout())
    wholes = [trainer.whole(folder) for folder in folders]
    trainer.load(folders[0])
    trainer.publish(1, probe_of(wholes[0]))
    pool = trainer.pool
    assert pool is not None
    pool.metrics()
    trainer.load(folders[1])
    probe = probe_of(wholes[1])
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(trainer.ask, (Sampling(max_new_tokens=40), SAMPLES))
        until(lambda: asked.done() or pool.partial_answers(), "some answers have begun")
        trainer.publish(2, probe)
        (all_of_them,) = asked.result()
    answers = [each for at, each in enumerate(all_of_them) if at % 2 == 0 or len({*each.versions}) > 1]
    metrics: dict[str, float] = {}

    def counted() -> bool:
        metrics.update(pool.metrics())
        return "system/replica_draft_acceptance" in metrics

    until(counted, "vLLM counts its drafts")
    trained = [[answer_logprobs(whole, PROMPT, each.tokens).tolist() for whole in wholes] for each in answers]
    chances = [chance for each in answers for chance in repetitions(wholes, each)]
    trainer.close()
    return Drafted(answers, trained, chances, metrics)


@torch.no_grad()
def repetitions(wholes: Sequence[Policy], answer: Completion) -> list[tuple[bool, float]]:
    """Look at each token whose predecessor was there before. Returns whether it is what followed then, as n-grams draft
    it, and the probability of that under the weights that sampled it."""
    text = [*PROMPT, *answer.tokens]
    probabilities = [torch.softmax(full_forward(whole, text).float(), dim=-1) for whole in wholes]
    found = []
    for at in range(len(PROMPT), len(text)):
        before = [then for then in range(at - 1) if text[then] == text[at - 1]]
        if before:
            drafted, version = text[before[0] + 1], answer.versions[at - len(PROMPT)]
            found.append((text[at] == drafted, float(probabilities[version - 1][at - 1, drafted])))
    return found


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    root = tmp_path_factory.mktemp("drafted")
    folders = versions_of(root, "Qwen2")
    vllm = {"args": {"speculative-config": json.dumps(DRAFTED)}}
    run = prepare_run(root / "run", folders[0], inference={"vllm": vllm})
    return in_front(root, run, ask_across_versions, folders)


def in_front(root: Path, run: RunDir, ask: Any, folders: Sequence[Path]) -> Any:
    with Front(run) as front:
        front.wait_until_it_answers()
        ranks = Ranks(root, 1, ask, run, folders)
        try:
            return ranks.results(LIMIT_S)[0]
        except AssertionError as error:
            raise AssertionError(front.text()) from error


def test_each_token_has_the_log_prob_of_weights_of_the_trainer(drafted: Drafted) -> None:
    """Also where a step yields several tokens, and answers continue under new weights. Tokens that were on their way
    during the change, in one message of an answer, may be named after the newer version."""
    assert {version for answer in drafted.answers for version in answer.versions} == {1, 2}
    assert any(len({*answer.versions}) == 2 for answer in drafted.answers)
    for answer, trained in zip(drafted.answers, drafted.trained, strict=True):
        rows = [*zip(answer.logprobs, answer.versions, *trained, strict=True)]
        others = [row for row in rows if abs(row[0] - row[1 + row[1]]) > CLOSE]
        assert len(others) < STREAM_INTERVAL
        for logprob, version, former, _ in others:
            assert version == 2
            assert logprob == pytest.approx(former, abs=CLOSE)


def test_what_the_text_suggests_is_sampled_as_often_as_the_policy_would(drafted: Drafted) -> None:
    assert drafted.metrics["system/replica_draft_acceptance"] > 0
    assert drafted.metrics["system/replica_tokens_per_s"] > 0
    happened = sum(repeats for repeats, _ in drafted.chances)
    expected = sum(chance for _, chance in drafted.chances)
    deviation = math.sqrt(sum(chance * (1 - chance) for _, chance in drafted.chances))
    assert len(drafted.chances) > SAMPLES
    assert abs(happened - expected) < SIGMAS * deviation


class Quantised(NamedTuple):
    differences: list[list[float]]
    """Mean absolute difference of the answers' log-probs of each version from the trainer's, of each version."""


def ask_with_8_bits(_rank: int, _world: int, run: RunDir, folders: Sequence[Path]) -> Quantised:
    trainer = Trainer(run, Layout())
    wholes, differences = [trainer.whole(folder) for folder in folders], []
    for version, (folder, whole) in enumerate(zip(folders, wholes, strict=True), start=1):
        trainer.load(folder)
        trainer.publish(version, probe_of(whole, TOLERANCE))
        (answers,) = trainer.ask((Sampling(max_new_tokens=24), 16))
        assert {version for each in answers for version in each.versions} == {version}
        differences.append([difference(answers, whole) for whole in wholes])
    trainer.close()
    return Quantised(differences)


def difference(answers: Sequence[Completion], whole: Policy) -> float:
    trained = [answer_logprobs(whole, PROMPT, each.tokens).tolist() for each in answers]
    pairs = [zip(each.logprobs, theirs, strict=True) for each, theirs in zip(answers, trained, strict=True)]
    return fmean(abs(ours - theirs) for pair in pairs for ours, theirs in pair)


def test_weights_are_quantised_again_at_each_update(tmp_path: Path) -> None:
    folders = versions_of(tmp_path, "Qwen2")
    run = prepare_run(tmp_path / "run", folders[0], model={"dtype": "bf16"}, inference={"vllm": {"args": EIGHT_BITS}})
    (right, other), (former, renewed) = in_front(tmp_path, run, ask_with_8_bits, folders).differences
    for same, different in ((right, other), (renewed, former)):
        assert 1e-2 < same < TOLERANCE, "8 bits differ from 16"
        assert different > 3 * same
