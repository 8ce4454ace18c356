"""mrl serve as its users meet it: OpenAI's own client, curl's headers, Ctrl-C, and hundreds of clients at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from commands import Command
from hf_helpers import PUBLISHED, publish
from loop_helpers import Attempt, loop_recipe, prepare
from server_helpers import TEMPLATE, byte_backend
from waiting import until

from launcher.host.process.processes import start_time
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE

READY_S = 180.0
LONG = 400  # tokens, which take the tiny model seconds
PROMPT = [5, 6, 7, 8]


class Served:
    def __init__(self, path: Path, home: Path, *options: str | Path) -> None:
        import openai  # slow to import

        self.token_file = home / "token"
        self.command = start(path, home, "--port", "0", "--json", "--token-file", self.token_file, *options)
        self.said = json.loads(self.command.stdout.readline() or '{"error": "nothing was said"}')
        assert "error" not in self.said, (self.said, self.command.communicate(READY_S))
        self.address, self.model = self.said["address"], self.said["model"]
        self.token = self.token_file.read_text().strip()
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key=self.token, max_retries=0, timeout=READY_S)
        self.headers = {"Authorization": f"Bearer {self.token}"}
        self.reader = httpx.Client(headers=self.headers, timeout=READY_S)

    def load(self, name: str) -> int:
        return int(self.reader.get(f"{self.address}/load").json()[name])

    def begin(self, **body: Any) -> socket.socket:
        """A connection that has requested a long streamed answer and reads nothing of it."""
        host, port = self.address.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((host, int(port)))
        content = json.dumps({"prompt": PROMPT, "max_tokens": LONG, "min_tokens": LONG, "stream": True} | body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.token}\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection


def start(path: Path | str, home: Path, *options: str | Path) -> Command:
    environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return Command(["mrl", "serve", *options, str(path)], env=environment)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Weights, and the same model in transformers."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("published") / "tiny-qwen"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<end>", chat_template=TEMPLATE)
    Qwen2Config().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokens = len(AutoTokenizer.from_pretrained(folder))  # transformers would add one by the model's type
    model = publish(folder, PUBLISHED["Qwen2"] | {"vocab_size": tokens, "max_position_embeddings": 512})
    tokenizer.save_pretrained(folder)
    return folder, model


def greedy(served: Served) -> list[int]:
    """Tokens that follow PROMPT."""
    answer = served.client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"return_token_ids": True}
    )
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tokens


@pytest.fixture(scope="module")
def served(published: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(published[0], tmp_path_factory.mktemp("home"))
    yield server
    server.command.terminate()
    assert server.command.wait(READY_S) == EXIT_FINISHED


def test_server_prints_its_address_and_the_token_is_readable_only_by_its_owner(served: Served) -> None:
    assert served.said["model"] == "tiny-qwen" and served.said["max_length"] == 512 and served.said["chat"] is True
    assert served.address.startswith("http://127.0.0.1:")
    assert served.token_file.stat().st_mode & 0o777 == 0o600
    assert [model.id for model in served.client.models.list()] == ["tiny-qwen"]
    for pid in (served.command.pid, *_children(served.command.pid)):
        assert served.token not in " ".join(_words(pid))


def test_greedy_completions_equal_those_of_transformers(served: Served, published: tuple[Path, Any]) -> None:
    inputs = torch.tensor([PROMPT])
    said = published[1].generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False, pad_token_id=0
    )[0, len(PROMPT) :]
    answer = served.client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=24, temperature=0, logprobs=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = answer.choices
    tokens = choice.token_ids  # type: ignore[attr-defined]
    assert len(tokens) > 5 and tokens == said.tolist()[: len(tokens)]
    assert choice.policy_versions == [0] * len(tokens)  # type: ignore[attr-defined]
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(tokens) and max(choice.logprobs.token_logprobs) < 0
    assert answer.usage is not None and answer.usage.completion_tokens == len(tokens)


def test_prompt_is_scored_as_by_transformers(served: Served, published: tuple[Path, Any]) -> None:
    """Uses OpenAI's client, with the parameters that lm-eval and vLLM's users send."""
    inputs = torch.tensor([PROMPT])
    expected = published[1](inputs).logits[0, :-1].log_softmax(-1).gather(1, inputs[0, 1:, None]).squeeze(1)
    answer = served.client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    scored = answer.choices[0].logprobs
    assert scored is not None and scored.token_logprobs is not None
    assert scored.token_logprobs[0] is None
    assert scored.token_logprobs[1 : len(PROMPT)] == pytest.approx(expected.tolist(), abs=1e-4)


def test_same_seed_gives_the_same_answers_streamed_or_not(served: Served) -> None:
    asked: dict[str, Any] = {"model": served.model, "prompt": "x", "max_tokens": 30, "n": 3, "seed": 11}
    first, second = (served.client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in served.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_answers_have_the_fields_and_chunks_that_clients_of_vllm_read(served: Served) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 3}
    answer = served.client.chat.completions.create(model=served.model, **asked)
    assert answer.choices[0].stop_reason is None  # type: ignore[attr-defined]
    assert answer.system_fingerprint is None
    assert answer.usage is not None and answer.usage.prompt_tokens_details is None
    first, *others = served.client.chat.completions.create(model=served.model, **asked, stream=True)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in others)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in others)
    assert said == answer.choices[0].message.content


def test_probes_need_no_token(served: Served) -> None:
    for path, status in (("health", 200), ("ping", 200), ("version", 200), ("load", 401), ("v1/models", 401)):
        assert httpx.get(f"{served.address}/{path}", timeout=READY_S).status_code == status, path


def test_chat_with_tools_logprobs_and_usage(served: Served) -> None:
    asked: dict[str, Any] = {
        "model": served.model, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 12,
        "seed": 3, "logprobs": True, "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }  # fmt: skip
    whole = served.client.chat.completions.create(**asked)
    assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
    assert all(len(place.top_logprobs) == 2 for place in whole.choices[0].logprobs.content)
    *chunks, last = served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage


def test_errors_are_those_that_the_client_knows(served: Served) -> None:
    import openai

    create = served.client.completions.create
    with pytest.raises(openai.NotFoundError, match=f"this server has '{served.model}'"):
        create(model="gpt-5", prompt="x", max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="512 tokens long") as caught:
        create(model=served.model, prompt=[1] * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        create(model=served.model, prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        create(model=served.model, prompt="x", max_tokens=0)
    stranger = openai.OpenAI(base_url=f"{served.address}/v1", api_key="not-the-token-of-it", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_reader_that_leaves_or_stalls_delays_nobody_and_frees_its_pages(served: Served) -> None:
    pages = served.load("free_pages")
    connections = [served.begin(n=4) for _ in range(2)]
    until(lambda: served.load("running") > 0, limit_s=READY_S)
    answer = served.client.completions.create(model=served.model, prompt="x", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    for connection in connections:
        connection.close()
    until(lambda: served.load("running") == 0, limit_s=READY_S)
    assert served.load("free_pages") == pages
    assert served.load("open_requests") == 1  # the client of this request


@pytest.mark.slow
def test_hundreds_of_clients_at_once(served: Served) -> None:
    async def crowd() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(headers=served.headers, limits=limits, timeout=READY_S) as client:
            body = {"prompt": PROMPT, "max_tokens": 4, "min_tokens": 4}
            asked = [client.post(f"{served.address}/v1/completions", json=body) for _ in range(500)]
            healthy = client.get(f"{served.address}/health")
            return [response.status_code for response in await asyncio.gather(*asked, healthy)]

    assert asyncio.run(crowd()) == [200] * 501
    assert served.load("running") == 0


def test_port_in_use_is_one_error(served: Served, published: tuple[Path, Any], tmp_path: Path) -> None:
    port = served.address.rpartition(":")[2]
    command = start(published[0], tmp_path, "--port", port)
    out, err = command.communicate(READY_S)
    assert (command.wait(), out) == (EXIT_USAGE, "")
    assert err == f"error: port {port} of 127.0.0.1 is in use: give another --port, or 0 for any free port\n"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved steps 1 and 2; a file of step 2 is missing."""
    recipe = loop_recipe(job={"gpus_per_node": 1}, training={"steps": 2, "sequence_length": 32}, save={"every": 1})
    root = tmp_path_factory.mktemp("runs") / "mine"
    attempt = Attempt(prepare(root, recipe), tmp_path_factory.mktemp("cache"), ranks=1)
    assert attempt.exit_codes() == [0], attempt.logs()
    next((root / "checkpoints" / "step-000002").glob("*.distcp")).unlink()
    return root


def test_run_is_served_from_its_newest_good_checkpoint_until_it_is_stopped(run_dir: Path, tmp_path: Path) -> None:
    """Open requests are finished, and new ones refused."""
    import openai

    served = Served(run_dir, tmp_path, "--name", "mine")
    assert served.said["max_length"] == 48, "the run trains on shorter sequences"
    assert (served.said["model"], served.said["step"], served.said["chat"]) == ("mine", 1, False)
    pid = next(child for child in _children(served.command.pid) if "megatron_rl.run.serve" in _words(child))
    (running,) = [served.client.completions.create(model="mine", prompt="1+1=", max_tokens=3, temperature=0)]
    assert running.choices[0].finish_reason in ("stop", "length")
    under_way = served.client.completions.create(
        model="mine", prompt="1+1=", max_tokens=36, extra_body={"min_tokens": 36}, stream=True
    )
    first = next(iter(under_way))
    served.command.terminate()
    rest = list(under_way)
    assert rest[-1].choices[0].finish_reason == "length" or first.choices[0].finish_reason
    assert served.command.wait(READY_S) == EXIT_FINISHED
    assert start_time(pid) is None
    with pytest.raises(openai.APIConnectionError):
        served.client.models.list()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_interrupted_start_leaves_no_process(
    published: tuple[Path, Any], tmp_path: Path, number: signal.Signals
) -> None:
    command = start(published[0], tmp_path, "--port", "0")
    until(lambda: any("megatron_rl.run.serve" in _words(child) for child in _children(command.pid)), limit_s=READY_S)
    (child,) = _children(command.pid)
    until(lambda: (tmp_path / ".config" / "mrl" / "serve-token").exists(), limit_s=READY_S)
    command.send_signal(number)
    _, err = command.communicate(READY_S)
    until(lambda: start_time(child) is None, limit_s=READY_S)
    if number == signal.SIGINT:
        assert (command.wait(), err) == (EXIT_INTERRUPTED, "interrupted\n")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
