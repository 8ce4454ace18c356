"""Answers of vLLM to an evaluation. This process starts it on published weights, or on weights that it exports first,
and asks it over a socket that nobody else reaches."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path

import httpx

from megatron_rl.checkpoint.hf.export import SHARD_BYTES
from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.publish import read_manifest
from megatron_rl.evaluate.blocks import Opened
from megatron_rl.evaluate.config import EvaluateConfig
from megatron_rl.inference.api import Completion, GenerationRequest, Unsupported
from megatron_rl.inference.config import InferenceConfig, VllmConfig, ends_of
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.standalone.source import Source
from megatron_rl.vllm.answers import Answer, Answers, shared_streams
from megatron_rl.vllm.client import MODEL_NAME, VllmClient
from megatron_rl.vllm.command import BYTES, DTYPES, Served, as_option, given_options, vllm_environment
from megatron_rl.vllm.process import VllmGone, VllmProcess

START_LIMIT_S = 1800.0
"""Seconds that vLLM has to start."""
CPU_PAGE_TOKENS = 128
"""Tokens of a page of vLLM's cache on CPUs."""
POLL_S = 0.5
"""Seconds between two checks whether vLLM has started."""


@contextmanager
def open_vllm(source: Source, asked: EvaluateConfig, max_length: int, rows: int) -> Iterator[Opened]:
    """Start vLLM on the weights of a source; it ends with the context.

    Args:
        max_length: tokens of a prompt and its answer together.
        rows: answers decoded at once.

    Raises:
        VllmGone: vLLM did not start.
        CheckpointError: the checkpoint is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="mrl-vllm-") as temporary:  # for this user alone
        folder = Path(temporary)
        weights, digest = _published(source, folder)
        served = Served(weights, folder / "socket", folder / "plugins")
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # of another Python
        environment = vllm_environment(environ, served, cpu=asked.device == "cpu")
        with (folder / "log").open("w", encoding="utf-8") as log:
            process = VllmProcess(_command(source, asked, served, max_length, rows), environment, log)
            try:
                version = _started(process, served.socket)
                engine = VllmEngine(VllmClient(served.socket), process, source, rows)
                engine.policy_version = WeightsFolder(weights).policy_version
                yield Opened(engine, source, digest, f"vllm {version}")
            finally:
                process.end()


def _published(source: Source, folder: Path) -> tuple[Path, str]:
    """Return a folder of Hugging Face weights, exported below `folder` if the source is a checkpoint, and the digest of
    the source's weights."""
    if source.kind == "huggingface":
        return source.folder, WeightsFolder(source.folder).digest
    with connected(StandaloneWorld.single()) as (platform, _):
        to_hugging_face(source.folder, folder / "weights", platform, shard_bytes=SHARD_BYTES)
    return folder / "weights", read_manifest(source.folder).digest


def _command(source: Source, asked: EvaluateConfig, served: Served, max_length: int, rows: int) -> list[str]:
    """The command of `vllm serve`. What the evaluation decides comes last, so it wins."""
    model = source.model
    of_run = source.recipe.inference.vllm if source.recipe else None
    options = given_options(of_run or VllmConfig())
    options |= {
        "model": str(served.model),
        "served-model-name": MODEL_NAME,
        "uds": str(served.socket),
        "enable-scale-out": True,
        "disable-uvicorn-access-log": True,
        "skip-tokenizer-init": True,
        "dtype": DTYPES[model.dtype],
        "max-model-len": str(max_length),
        "max-num-seqs": str(rows),
        "max-num-batched-tokens": str(max(InferenceConfig().prefill_tokens, max_length)),
        "tensor-parallel-size": str(asked.tp),
        "generation-config": "vllm",
        "seed": str(asked.seed),
    }
    if asked.device == "cpu":
        pages = rows * -(-max_length // CPU_PAGE_TOKENS)
        values = 2 * model.num_layers * max(1, model.num_query_groups // asked.tp) * model.head_size
        options |= {
            "enforce-eager": True,
            "kv-cache-memory-bytes": str(pages * CPU_PAGE_TOKENS * values * BYTES[model.dtype]),
        }
    assert asked.vllm_python is not None, "the launcher fills it in"
    # The same as `vllm serve`, which asks for a distribution that a build for CPUs does not have.
    command = [asked.vllm_python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return command + [as_option(name, value) for name, value in options.items()]


def _started(process: VllmProcess, socket: Path) -> str:
    """Wait until vLLM answers, and return its version. Raises VllmGone if it ends, or takes too long."""
    give_up = time.monotonic() + START_LIMIT_S
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://vllm") as client:
        while time.monotonic() < give_up:
            process.check()
            try:
                if client.get("/health").is_success:
                    return str(client.get("/version").json()["version"])
            except httpx.HTTPError:
                pass  # not yet
            time.sleep(POLL_S)
    raise VllmGone(f"vLLM did not answer within {START_LIMIT_S:.0f} s")


class VllmEngine:
    """Implements `InferenceInterface`, in one asyncio loop."""

    def __init__(self, client: VllmClient, process: VllmProcess, source: Source, rows: int) -> None:
        self.policy_version = 0
        self.busy_s = 0.0
        self._client, self._process, self._tokenizer, self._rows = client, process, source.tokenizer, rows

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a prompt, as InferenceInterface says. Raises VllmGone too."""
        if beyond := request.beyond_training:
            raise Unsupported(f"{beyond} is not supported by vLLM in an evaluation")
        answers = Answers(self._tokenizer.end_ids, self._tokenizer.decode).begin(request)
        try:
            await asyncio.gather(*map(self._stream, shared_streams(answers, self._rows)))
        except VllmGone:
            self._process.check()  # its output says more
            raise
        return [answer.transcript.completion() for answer in answers]

    async def _stream(self, answers: Sequence[Answer]) -> None:
        first, began = answers[0], time.monotonic()
        sampling = first.transcript.request.sampling
        ends = ends_of(sampling, self._tokenizer.end_ids)
        pieces = self._client.generate(first.prompt, sampling, ends, len(answers), first.known)
        async with aclosing(pieces):
            async for piece in pieces:
                answers[piece.sample].take(piece, self.policy_version, checked=True)
                if all(answer.ended for answer in answers):
                    break
        self.busy_s += time.monotonic() - began
