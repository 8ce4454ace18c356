"""One front and its vLLM: who reaches them, what they sample, and how they end."""

from __future__ import annotations

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from checkpoint_helpers import Ranks
from hf_helpers import publish
from layout_helpers import Layout
from vllm_front import START_S, Front
from vllm_training import PROMPT, SERVED, TOKEN, Trainer, prepare_run, probe_of

from megatron_rl.contract.codes import EXIT_CONFIG, EXIT_CRASHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.inference import Sampling

LIMIT_S = 120.0
MANY = 1500
HOSTILE = {"temperature": 0.3, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.8, "do_sample": True}
"""Sampling that a published model recommends, and that no training may have."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json changes what is sampled."""
    folder = tmp_path_factory.mktemp("published")
    publish(folder, SERVED["Qwen2"])
    (folder / "generation_config.json").write_text(json.dumps(HOSTILE))
    return folder


@pytest.fixture(scope="module")
def run(published: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return prepare_run(tmp_path_factory.mktemp("runs") / "run", published)


@pytest.fixture(scope="module")
def front(run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front whose TMPDIR is too long for sockets."""
    temporary = tmp_path_factory.mktemp("temporary") / ("long" * 20)
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with Front(run) as front:
            yield front.wait_until_it_answers()


def test_socket_of_vllm_is_in_a_folder_of_this_user_alone(front: Front) -> None:
    folder = front.folder().stat()
    assert stat.S_IMODE(folder.st_mode) == 0o700
    assert folder.st_uid == front.process.uids().real


def test_processes_of_vllm_answer_http_on_no_port(front: Front) -> None:
    """Ports of torch.distributed are open on this machine alone, and answer no request."""
    for process in front.children():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), process.cmdline()
                with pytest.raises(httpx.HTTPError):
                    httpx.get(f"http://127.0.0.1:{connection.laddr.port}/health", timeout=1.0)


def test_every_route_of_the_front_refuses_other_keys(front: Front) -> None:
    address = front.address
    assert address is not None
    base = f"http://{address.host}:{address.port}"
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(front.folder() / "socket")), base_url="http://vllm", timeout=60.0
    ) as inside:
        described = inside.get("/openapi.json").json()["paths"]
    routes = {(path, method.upper()) for path, methods in described.items() for method in methods}
    assert len(routes) > 30
    ours = {(path, "POST") for path in ("/hello", "/ask", "/news", "/receive", "/swap", "/end")}
    for path, method in routes | ours | {("/openapi.json", "GET"), ("/metrics", "GET")}:
        for headers in ({}, {"Authorization": f"Bearer {TOKEN[:-1]}x"}, {"Authorization": "Bearer"}):
            answer = httpx.request(method, base + path, headers=headers, json={}, timeout=60.0)
            assert answer.status_code == 401, (path, headers)


def sample_often(_rank: int, _world: int, run: RunDir, published: Path) -> tuple[list[list[int]], list[float]]:
    """Publish a model, and sample two tokens many times. Returns the tokens, and the log-probs of all first tokens by
    the trainer's model."""
    from core_helpers import full_forward

    trainer = Trainer(run, Layout())
    trainer.load(published)
    whole = trainer.whole(published)
    trainer.publish(1, probe_of(whole))
    (answers,) = trainer.ask((Sampling(max_new_tokens=2), MANY))
    vocabulary = trainer.tokenizer.vocab_size
    with torch.no_grad():
        logits = full_forward(whole, PROMPT)[-1, :vocabulary].float()
    trainer.refit.close()
    return [answer.tokens for answer in answers], torch.log_softmax(logits, dim=-1).tolist()


def test_sampled_tokens_follow_the_softmax_whatever_the_model_recommends(
    front: Front, run: RunDir, published: Path, tmp_path: Path
) -> None:
    ranks = Ranks(tmp_path, 1, sample_often, run, published)
    answers, logprobs = ranks.results(LIMIT_S)[0]
    assert front.process.is_running(), front.text()
    expected = [MANY * math.exp(logprob) for logprob in logprobs]
    found = Counter(tokens[0] for tokens in answers)
    rare = [token for token, count in enumerate(expected) if count < 5]
    pairs = [(found[token], count) for token, count in enumerate(expected) if token not in rare]
    pairs.append((sum(found[token] for token in rare), max(sum(expected[token] for token in rare), 1e-9)))
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    assert freedom >= 10
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("inference", "code", "said"),
    [
        (
            {"vllm": {"args": {"none-such": 3}}},
            EXIT_CONFIG,
            r"refuses its options, see inference\.vllm\.args: .*unrecognized arguments: --none-such=3",
        ),
        ({"cache_tokens": 10**12}, EXIT_CRASHED, r"is less than requested memory for kv \(\d+"),
    ],
    ids=["an option that vLLM does not know", "more memory than there is"],
)
def test_a_start_that_fails_is_reported_with_the_words_of_vllm(
    inference: dict[str, Any], code: int, said: str, published: Path, tmp_path: Path
) -> None:
    with Front(prepare_run(tmp_path / "run", published, inference=inference)) as front:
        assert front.process.wait(START_S) == code, front.text()
        assert re.search(said, front.error()), front.text()
