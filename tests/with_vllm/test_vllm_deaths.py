"""Deaths of vLLM's processes in the middle of an answer and of a transfer, as the training ranks see them."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoint_helpers import Ranks
from core_helpers import answer_logprobs
from hf_helpers import publish
from layout_helpers import Layout
from vllm_front import START_S, Front, is_there, until
from vllm_training import CLOSE, PROMPT, SERVED, Trainer, prepare_run, probe_of

from launcher.host.record.heartbeats import HangWatch
from megatron_rl.contract.owned_folders import NOTE
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.inference import Sampling

LONG = 1500
"""Tokens of an answer that takes seconds."""
HANG_S = 10.0
IDLE_S = 60
"""Seconds after which a vLLM that has nothing to do and does not react is gone."""
STOPPED_S = 3.0
"""Seconds in which a transfer to stopped processes begins."""


class Seen(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    trained: list[float]
    """Log-probs of the tokens by the trainer's model."""
    kept: list[int]
    """Tokens of the answer when its replica was killed."""


def answer_over_deaths(_rank: int, _world: int, run: RunDir, published: Path) -> Seen:
    """Ask for a long answer. Stop and resume the engine in the middle of it, kill the front, and kill the engine of the
    next start in a transfer. Stop the engine of the last start while it has nothing to do."""
    trainer = Trainer(run, Layout())
    trainer.load(published)
    whole = trainer.whole(published)
    probe = probe_of(whole)
    assert trainer.pool is not None
    with ThreadPoolExecutor(2) as threads:
        with Front(run) as first:
            first.wait_until_it_answers()
            trainer.publish(1, probe)
            answer = threads.submit(trainer.ask, (Sampling(max_new_tokens=LONG, min_new_tokens=LONG), 1))
            until(lambda: len(tokens_of(trainer)) > 50, "the answer begins", START_S, first.check)
            for process in first.computing():
                process.suspend()
            hangs = HangWatch(first.replica, HANG_S)
            until(lambda: hangs.poll(time.monotonic()) is not None, "the host notices a stopped engine")
            for process in first.computing():
                process.resume()
            children, left = first.children(), first.folder()
            segments = [Path("/dev/shm", name) for name in json.loads((left / NOTE).read_text())]
            assert [*(left / "tmp").glob("vllm_dist_*")], "vLLM leaves this file behind"
            assert segments and all(segment.exists() for segment in segments)
            first.process.kill()
            kept = tokens_of(trainer)
            until(lambda: not any(map(is_there, children)), "all processes of vLLM end with the front")
        with Front(run, start=1) as second:
            second.wait_until_it_answers()
            assert not left.exists(), "the next start removes the folder of a front that was killed"
            assert not any(segment.exists() for segment in segments), "and the shared memory of its vLLM"
            for process in second.computing():
                process.suspend()
            published_again = threads.submit(trainer.publish, 1, probe)
            time.sleep(STOPPED_S)
            for process in second.computing():
                process.kill()
            second.process.wait(START_S)
            reason = second.error()
            assert "was killed by SIGKILL" in reason, second.text()
        with Front(run, start=2) as third:
            third.wait_until_it_answers()
            published_again.result(START_S)
            ((found,),) = answer.result(START_S)
            for process in third.computing():
                process.suspend()
            children = third.children()
            os.killpg(third.process.pid, signal.SIGKILL)  # as the launcher ends a replica
            until(lambda: not any(map(is_there, children)), "stopped processes of vLLM end with the front")
        with Front(run, start=3) as fourth:
            fourth.wait_until_it_answers()
            for process in fourth.computing():
                process.suspend()
            fourth.process.wait(START_S)
            assert "its workers do not react" in fourth.error(), fourth.text()
    trainer.close()
    trained = answer_logprobs(whole, PROMPT, found.tokens).tolist()
    return Seen(found.tokens, found.logprobs, trained, kept)


def tokens_of(trainer: Trainer) -> list[int]:
    """Tokens so far of the only answer."""
    assert trainer.pool is not None
    parts = trainer.pool.partial_answers()
    return parts[0].prefix.tokens if parts else []


@pytest.mark.timeout(1800)
def test_answer_continues_on_the_next_start_after_deaths_in_generation_and_in_a_transfer(tmp_path: Path) -> None:
    published = tmp_path / "published"
    publish(published, SERVED["Qwen2"] | {"max_position_embeddings": 2048})
    run = prepare_run(tmp_path / "run", published, training={"sequence_length": 2048}, job={"silence_limit_s": IDLE_S})
    seen = Ranks(tmp_path, 1, answer_over_deaths, run, published).results(3 * START_S)[0]
    assert len(seen.kept) > 50
    assert seen.tokens[: len(seen.kept)] == seen.kept
    assert seen.logprobs == pytest.approx(seen.trained, abs=CLOSE)
