"""A front beside training ranks and its vLLM: answers that span a sleep, and deaths and drains in each state."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from checkpoint_helpers import Ranks
from core_helpers import answer_logprobs
from hf_helpers import publish
from layout_helpers import Layout
from vllm_front import START_S, Front, is_there, until
from vllm_training import CLOSE, PROMPT, SERVED, TOKEN, Trainer, prepare_run, probe_of

from megatron_rl.contract.codes import DRAIN_SIGNAL, EXIT_CRASHED, EXIT_DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion
from megatron_rl.generate.replicas.link import ReplicaGone
from megatron_rl.generate.replicas.wire import PROTOCOL, digest_of
from megatron_rl.generate.vllm.command import STREAM_INTERVAL
from megatron_rl.recipe.inference import Sampling

LONG = 1500
"""Tokens of an answer that takes seconds."""
PAUSE_S = 3.0
"""Seconds of a sleep, in which no token may come."""
BESIDE: dict[str, dict[str, Any]] = {
    "job": {"nodes": 1},
    "placement": {"mode": "colocated", "inference": {}, "offload": "buffers"},
}


class Seen(NamedTuple):
    answer: Completion
    trained: list[list[float]]
    """Log-probs of its tokens under each version, by the trainer's model."""
    kept: list[int]
    """Its tokens when vLLM was killed."""
    asleep: list[int]
    """Numbers of its tokens at the beginning and at the end of a sleep."""


class Turns:
    """The requests of the first training rank that a front beside it gets."""

    def __init__(self, trainer: Trainer, start: int) -> None:
        assert trainer.pool is not None
        self._trainer, self._pool, self._start = trainer, trainer.pool, (0, start)
        until(lambda: self.state is not None, "the front answers", START_S)

    @property
    def state(self) -> str | None:
        return self._pool.states().get(self._start)

    def post(self, path: str, **body: Any) -> Future[dict[str, Any]]:
        return self._pool.call(self._start, path, body, START_S)

    def begin(self) -> None:
        """Have vLLM started and put to sleep."""
        assert self.state == "down"
        self.post("start").result()
        self.post("sleep").result()
        assert self.state == "asleep"

    def tokens(self) -> list[int]:
        """Tokens so far of the only answer."""
        parts = self._pool.partial_answers()
        return parts[0].prefix.tokens if parts else []


def answer_over_sleeps(_rank: int, _world: int, run: RunDir, published: Sequence[Path]) -> Seen:
    """Ask for a long answer, and let vLLM sleep in the middle of it. Kill vLLM while it is asleep, and its next start
    while it wakes."""
    trainer = Trainer(run, Layout())
    whole = [trainer.whole(each) for each in published]

    def give(version: int) -> None:
        trainer.load(published[version - 1])
        trainer.publish(version, probe_of(whole[version - 1]))

    with ThreadPoolExecutor(2) as threads:
        with Front(run) as first:
            first.wait_until_it_answers()
            assert not first.children(), "vLLM needs the devices, so it waits for the ranks"
            turns = Turns(trainer, 0)
            turns.begin()
            give(1)
            assert turns.state == "awake"
            answer = threads.submit(trainer.ask, (Sampling(max_new_tokens=LONG, min_new_tokens=LONG), 1))
            until(lambda: len(turns.tokens()) > 50, "the answer begins", START_S, first.check)
            turns.post("sleep").result()
            time.sleep(PAUSE_S)  # the last tokens before the sleep arrive
            asleep = [len(turns.tokens())]
            turns.post("sleep").result()  # repeated
            time.sleep(PAUSE_S)
            asleep.append(len(turns.tokens()))
            give(2)
            until(lambda: len(turns.tokens()) > asleep[1] + 100, "the answer continues", START_S, first.check)
            turns.post("sleep").result()
            kept = turns.tokens()
            for process in first.computing():
                process.kill()
            assert first.process.wait(START_S) == EXIT_CRASHED, first.text()
            assert "was killed by SIGKILL" in first.error(), first.text()
        with Front(run, start=1) as second:
            second.wait_until_it_answers()
            turns = Turns(trainer, 1)
            turns.begin()
            for process in second.computing():
                process.suspend()
            waking = turns.post("receive", version=2, epoch={})
            time.sleep(PAUSE_S)
            assert not waking.done(), "its workers do not react"
            for process in second.computing():
                process.kill()
            with pytest.raises(ReplicaGone):
                waking.result(START_S)
            assert second.process.wait(START_S) == EXIT_CRASHED, second.text()
            assert "was killed by SIGKILL" in second.error(), second.text()
        with Front(run, start=2) as third:
            third.wait_until_it_answers()
            Turns(trainer, 2).begin()
            give(2)
            ((found,),) = answer.result(START_S)
    trainer.close()
    return Seen(found, [answer_logprobs(each, PROMPT, found.tokens).tolist() for each in whole], kept, asleep)


@pytest.mark.timeout(1800)
def test_answer_that_spans_sleeps_is_token_for_token_what_the_weights_of_each_side_give(tmp_path: Path) -> None:
    published = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(published):
        publish(folder, SERVED["Qwen2"] | {"max_position_embeddings": 2048}, seed=seed)
    run = prepare_run(tmp_path / "run", published[0], training={"sequence_length": 2048}, **BESIDE)
    seen = Ranks(tmp_path, 1, answer_over_sleeps, run, published).results(4 * START_S)[0]
    assert seen.asleep[0] == seen.asleep[1] > 50
    assert len(seen.kept) > seen.asleep[1]
    assert seen.answer.tokens[: len(seen.kept)] == seen.kept
    first, second = (
        [abs(found - trained) < CLOSE for found, trained in zip(seen.answer.logprobs, of_version, strict=True)]
        for of_version in seen.trained
    )
    border = first.index(False)
    assert all(second[border:])
    assert seen.asleep[1] <= border < seen.asleep[1] + STREAM_INTERVAL, "tokens leave vLLM a few at a time"
    labelled = seen.answer.versions.index(2)
    assert set(seen.answer.versions[labelled:]) == {2}
    assert 0 <= border - labelled < STREAM_INTERVAL


def post(front: Front, run: RunDir, path: str) -> dict[str, Any]:
    """Send a request that does not count as one of the first training rank, without which a front ends when asked."""
    address = front.address
    assert address is not None
    body = {"protocol": PROTOCOL, "digest": digest_of(run.resolved), "driver": 1}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"http://{address.host}:{address.port}/{path}", headers=headers, json=body, timeout=START_S)
    return dict(answer.raise_for_status().json()["about"])


def begin(front: Front, run: RunDir) -> dict[str, Any]:
    """Have a front begin to start vLLM. Returns once there are a guard and the server."""
    about = post(front.wait_until_it_answers(), run, "start")
    until(lambda: len(front.children()) >= 2, "vLLM starts", check=front.check)
    return about


@pytest.mark.timeout(1800)
def test_a_front_leaves_while_its_vllm_starts_or_sleeps_and_ends_with_a_vllm_that_is_killed_while_it_starts(
    tmp_path: Path,
) -> None:
    publish(tmp_path / "published", SERVED["Qwen2"])
    run = prepare_run(tmp_path / "run", tmp_path / "published", **BESIDE)
    for start, asleep in enumerate((False, True)):
        with Front(run, start=start) as front:
            assert begin(front, run)["state"] == "down"
            if asleep:
                assert post(front, run, "sleep")["state"] == "asleep"
            children, folder = front.children(), front.folder()
            front.process.send_signal(DRAIN_SIGNAL)
            assert front.process.wait(START_S) == EXIT_DRAINED, front.text()
            until(lambda children=children: not any(map(is_there, children)), "vLLM ends")  # type: ignore[misc]
            assert not folder.exists()
    with Front(run, start=2) as front:
        begin(front, run)
        front.server().kill()
        assert front.process.wait(START_S) == EXIT_CRASHED, front.text()
        assert re.search(r"vLLM has ended \(signal SIGKILL\)", front.error()), front.text()
