"""Answers of vLLM to an evaluation. This process starts it on published weights, or on weights that it exports first,
and asks it over a socket that nobody else reaches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path

from megatron_rl.checkpoint.hf.folder import WeightsFolder
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.source import PolicySource
from megatron_rl.contract.manifest import read_manifest
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, Unsupported
from megatron_rl.generate.vllm.checked_answers import VllmAnswer, begun, shared_streams
from megatron_rl.generate.vllm.client import VllmClient
from megatron_rl.generate.vllm.command import Served, ServeSizes, serve_command, vllm_environment
from megatron_rl.generate.vllm.plugin import write_version
from megatron_rl.generate.vllm.private_folder import private_folder
from megatron_rl.generate.vllm.process import VllmGone, VllmProcess
from megatron_rl.generate.vllm.start import started, version_in
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.inference import InferenceConfig, ends_of
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_drafts import without_draft
from megatron_rl.recipe.vllm_releases import release_of
from megatron_rl.run.evaluate.blocks import OpenedEvaluation


@contextmanager
def open_vllm(
    source: PolicySource, asked: Evaluation, max_length: int, rows: int, waits_for: Callable[[str], None]
) -> Iterator[OpenedEvaluation]:
    """Start vLLM on the weights of a source; it ends with the context.

    Args:
        max_length: tokens of a prompt and its answer together.
        rows: answers decoded at once.
        waits_for: called with what is awaited, again and again.

    Raises:
        ConfigurationError: the Python has no vLLM that was tried, vLLM refuses its options, or there is no folder for
            its sockets.
        VllmGone: vLLM did not start.
        CheckpointError: the checkpoint is damaged.
    """
    assert asked.vllm_python is not None, "the launcher fills it in"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # of another Python
    version = version_in(asked.vllm_python, environ)
    with private_folder() as folder, private_folder(for_sockets=False) as exported:
        waits_for("reading the weights")
        weights, digest = _published(source, exported)
        served = Served(weights, folder)
        write_version(served.plugins, version)
        sizes = ServeSizes(
            model=source.model,
            cpu=asked.device == "cpu",
            tp=asked.tp,
            longest=max_length,
            rows=rows,
            prefill_tokens=InferenceConfig().prefill_tokens,
        )
        of_run = kept_settings(asked, source.recipe.inference.vllm if source.recipe else None)
        command = serve_command(asked.vllm_python, served, sizes, of_run, {}, asked.seed)
        environment = vllm_environment(environ, served, cpu=sizes.cpu)
        began = time.monotonic()

        def goes_on() -> bool:
            waits_for(f"starting vLLM for {time.monotonic() - began:.0f} s")
            return True

        with (
            (folder / "log").open("w", encoding="utf-8") as log,
            started(command, environment, served, log, "inference.vllm.args", goes_on) as process,
        ):
            assert process is not None, "nothing stops the wait"
            most_samples = rows if release_of(version).streams_several else 1
            engine = VllmEngine(VllmClient(served.socket), process, source, most_samples)
            yield OpenedEvaluation(engine, source, digest, f"vllm {version}")


def kept_settings(asked: Evaluation, of_run: VllmConfig | None) -> VllmConfig | None:
    """Settings of the run's vLLM, without drafts where those would change what is sampled: on a CPU, where nothing
    repairs vLLM here (see cpu_drafts), and with min_p, which vLLM would ignore."""
    if of_run is None or (asked.device != "cpu" and asked.sampling.min_p == 0):
        return of_run
    return of_run.model_copy(update={"args": without_draft(of_run.args)})


def _published(source: PolicySource, folder: Path) -> tuple[Path, str]:
    """Return a folder of Hugging Face weights, exported below `folder` if the source is a checkpoint, and the digest of
    the source's weights."""
    if source.kind == "huggingface":
        return source.folder, WeightsFolder(source.folder).digest
    with connected(StandaloneWorld.single()) as (platform, _):
        to_hugging_face(source.folder, folder / "weights", platform)
    return folder / "weights", read_manifest(source.folder).digest


class VllmEngine:
    def __init__(self, client: VllmClient, process: VllmProcess, source: PolicySource, most: int) -> None:
        """most: answers that one request to vLLM may ask for."""
        self.policy_version = 0
        self.busy_s = 0.0
        self._client, self._process, self._tokenizer, self._most = client, process, source.tokenizer, most

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Answer a prompt, as InferenceInterface says. Raises VllmGone too."""
        if beyond := request.beyond_training:
            raise Unsupported(f"{beyond} is not supported by vLLM in an evaluation")
        if request.grammar:
            raise Unsupported("tool_choice, response_format: vLLM forces no form in an evaluation; use --engine native")
        answers = begun(request, self._tokenizer.end_ids, self._tokenizer.decode)
        try:
            await asyncio.gather(*map(self._stream, shared_streams(answers, self._most)))
        except VllmGone:
            self._process.check()  # its output says more
            raise
        return [answer.transcript.completion() for answer in answers]

    async def _stream(self, answers: Sequence[VllmAnswer]) -> None:
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
