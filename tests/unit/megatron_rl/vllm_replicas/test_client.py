"""Answers of vLLM are parsed, and refused if they do not agree with its protocol."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.generate.vllm.client import (
    NewTokens,
    VllmClient,
    VllmStats,
    piece_of,
    sampling_params,
    stats_in,
    versions_in,
)
from megatron_rl.generate.vllm.process import VllmGone, VllmRefused, reason_in
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.recipe.inference import Sampling


def test_a_choice_has_tokens_log_probs_and_at_the_end_versions() -> None:
    choice = {
        "index": 2,
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -9999.0}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    assert piece_of(choice) == NewTokens(2, [5, 6], [-0.5, -math.inf], [3, 4])


def routed(rows: Any) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, np.array(rows, np.uint8))
    return {"index": 0, "token_ids": [], "routed_experts": base64.b64encode(file.getvalue()).decode()}


def test_choices_of_experts_are_those_of_the_layers_that_have_some() -> None:
    rows = [[[0, 0], [4, 5]], [[0, 0], [6, 7]]]
    assert piece_of(routed(rows), ChoiceForm((2,), 2, 9)).choices == [b"\x04\x05", b"\x06\x07"]
    assert piece_of(routed(rows)).choices == []


@pytest.mark.parametrize("form", [ChoiceForm((2,), 3, 9), ChoiceForm((2, 3), 2, 9)])
def test_choices_of_another_model_are_refused(form: ChoiceForm) -> None:
    with pytest.raises(VllmGone, match="no tokens or log-probs"):
        piece_of(routed([[[0, 0], [4, 5]]]), form)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"index": 0, "token_ids": [5]}, "1 tokens and 0 log-probs"),
        ({"index": 0, "token_ids": [], "finish_reason": "abort"}, "gave up an answer: finish_reason 'abort'"),
        ({"token_ids": []}, "no tokens or log-probs"),
    ],
)
def test_a_choice_that_cannot_be_used_is_refused(choice: dict[str, object], said: str) -> None:
    with pytest.raises(VllmGone, match=said):
        piece_of(choice)


def test_tokens_before_the_first_weights_of_the_run_have_no_version() -> None:
    assert versions_in([{"version": "default", "start": 0, "end": 2}, {"version": "0", "start": 2, "end": 3}]) == [
        *[-1, -1],
        0,
    ]


def test_every_parameter_that_a_model_may_have_a_default_for_is_sent() -> None:
    found = sampling_params(Sampling(max_new_tokens=8, min_new_tokens=3), [1, 2], 4, 2)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert found.items() >= {**neutral, "temperature": 1.0, "repetition_penalty": 1.0, "n": 4}.items()
    assert (found["max_tokens"], found["min_tokens"]) == (6, 1)
    assert (found["stop_token_ids"], found["ignore_eos"]) == ([1, 2], True)


def test_figures_are_read_from_the_metrics() -> None:
    text = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="480",engine="0"} 1.0
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
"""
    one = VllmStats(running=3, waiting=2, cache_used=0.25, pages=480, preemptions=7)
    assert stats_in(text) == one
    of_two_parts = text + text.replace('engine="0"', 'engine="1"')
    assert stats_in(of_two_parts) == VllmStats(running=6, waiting=4, cache_used=0.25, pages=960, preemptions=14)
    drafts = """vllm:spec_decode_num_drafts_total{engine="0",model_name="policy"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="policy"} 15.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="policy"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="policy",position="0"} 4.0
"""
    assert stats_in(text + drafts) == replace(one, drafted=15, accepted=9)


def test_the_reason_of_an_end_is_the_error_that_the_others_follow() -> None:
    lines = [
        "(APIServer pid=1) WARNING 11-25 [x.py:1] can cause errors like `OSError: too many files`",
        "(Worker pid=3) ERROR 11-25 [executor.py:953] ModuleNotFoundError: No module named 'megatron'",
        "(EngineCore pid=2) ERROR [core.py:1] Exception: WorkerProc initialization failed due to an exception",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert reason_in(lines) == "ModuleNotFoundError: No module named 'megatron'"
    assert reason_in(["vllm: error: unrecognized arguments: --no-such-option"]) == (
        "error: unrecognized arguments: --no-such-option"
    )
    assert reason_in(["INFO all is well"]) is None


def test_a_full_disk_is_the_reason_of_what_fails_after_it() -> None:
    lines = [
        "(EngineCore pid=2) ERROR RuntimeError: Worker failed with error 'CppCompileError: C++ compile error",
        "(EngineCore pid=2) ERROR [core.py:1512] /usr/bin/ld: final link failed: No space left on device",
        "(EngineCore pid=2) ERROR [core.py:1512] collect2: error: ld returned 1 exit status",
        "(APIServer pid=1) ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered",
    ]
    assert reason_in(lines) == "/usr/bin/ld: final link failed: No space left on device"


def test_a_call_after_a_failed_one_is_answered_although_the_server_closes_the_connection(tmp_path: Path) -> None:
    async def fail_then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first call of a connection, and none after it."""
        request = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", request)[1]))
        status = b"200 OK" if b"/resume" in request else b"500 Internal Server Error"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        await reader.read(1)  # the next call, or the client's end of the connection
        writer.close()

    async def call() -> None:
        client = VllmClient(tmp_path / "socket")
        async with await asyncio.start_unix_server(fail_then_close, tmp_path / "socket"):
            with pytest.raises(VllmRefused, match="/update_weights: HTTP 500"):
                await client.update(3, load=True)
            await client.resume()
        await client.close()

    asyncio.run(asyncio.wait_for(call(), 20))


async def served(folder: Path, answers: dict[str, str], call: Callable[[VllmClient], Awaitable[Any]]) -> Any:
    """Return the result of a call to a vLLM that answers these paths, with these bodies."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode().partition("?")[0]
        body = answers[path].encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    client = VllmClient(folder / "socket")
    async with await asyncio.start_unix_server(answer, folder / "socket"):
        try:
            return await asyncio.wait_for(call(client), 20)
        finally:
            await client.close()


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("said", ["", '{"status": "awake"}'], ids=["before 0.32", "0.32"])
def test_vllm_is_awake_when_it_says_that_it_does_not_sleep(said: str, sleeps: bool, tmp_path: Path) -> None:
    answers = {"/wake_up": said, "/is_sleeping": json.dumps({"is_sleeping": sleeps})}
    assert asyncio.run(served(tmp_path, answers, lambda client: client.wake("kv_cache"))) is not sleeps


def test_a_stream_that_ends_before_its_answers_is_an_error(tmp_path: Path) -> None:
    token = {"index": 0, "token_ids": [5], "logprobs": {"content": [{"logprob": -0.5}]}}
    ended = [json.dumps({"choices": [token | {"finish_reason": reason}]}) for reason in (None, "stop")]

    async def read(client: VllmClient) -> int:
        return len([piece async for piece in client.generate([1], Sampling(max_new_tokens=8), [2])])

    def answers(events: list[str]) -> dict[str, str]:
        return {"/inference/v1/generate": "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])}

    assert asyncio.run(served(tmp_path, answers(ended), read)) == 2
    with pytest.raises(VllmGone, match="gave up 1 of 1 answers"):
        asyncio.run(served(tmp_path, answers(ended[:1]), read))
