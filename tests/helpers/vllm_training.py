"""Training ranks beside replicas with vLLM: they publish weights of published folders from any layout, and ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from core_helpers import answer_logprobs, choices_of, experts_in
from hf_helpers import PUBLISHED, STRETCHED, model_of
from layout_helpers import Layout
from vllm_front import START_S

from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.links import ALL
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import digest_of, read_token
from megatron_rl.model.parallel import groups_of_one
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.config import RunConfig, read_config
from megatron_rl.recipe.inference import Sampling
from megatron_rl.run.models import share_weights

LIMIT = timedelta(seconds=60)
NO_REPLICA = timedelta(seconds=START_S)
TOKEN = "a-token-of-a-run-with-32-characters-or-more"
LONGEST = 64
CLOSE = 1e-3
"""Largest difference between log-probs of one model in fp32, computed by different programs."""

PROMPT = [3, 10, 4, 33, 7, 13, 0, 14, 1, 44, 21, 5]

SIZES = {
    "vocab_size": 61,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest of vLLM's attention on a CPU
    "max_position_embeddings": LONGEST,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
SERVED: dict[str, dict[str, Any]] = {
    "Qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": False},
    "Qwen2, tied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3, tied": SIZES | {"model_type": "qwen3", "hidden_size": 64, "tie_word_embeddings": True},
    "Llama 3.1": SIZES | {"model_type": "llama", "rope_parameters": STRETCHED},
    "Mistral": SIZES | {"model_type": "mistral", "sliding_window": None},
    "Qwen3 MoE": SIZES | EXPERTS | {"model_type": "qwen3_moe", "tie_word_embeddings": False},
    "Qwen2, YaRN": SIZES | {"model_type": "qwen2", "rope_parameters": YARN},
    "GLM-4.5": PUBLISHED["GLM-4.5"] | SIZES | {"moe_intermediate_size": 32},
    "DeepSeek-V3": PUBLISHED["DeepSeek-V3"]
    | {key: SIZES[key] for key in ("hidden_size", "intermediate_size")}
    | {
        "moe_intermediate_size": 32,
        "kv_lora_rank": 512,  # with qk_rope_head_dim the only sizes of vLLM's latent attention on a CPU
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt-oss": PUBLISHED["gpt-oss"] | SIZES | {"intermediate_size": 64},
    "Gemma 3": PUBLISHED["Gemma 3"] | SIZES | {"num_hidden_layers": 3, "tie_word_embeddings": False},
    "OLMo 3": PUBLISHED["OLMo 3"] | SIZES | {"num_hidden_layers": 3},
}
"""Name -> contents of config.json. vLLM serves all of them on a CPU in fp32. It computes gated delta nets there in bf16
alone, and reads no Qwen3.5 without torchvision."""


def prepare_run(root: Path, published: Path, **sections: dict[str, Any]) -> RunDir:
    """Write the recipe of a partitioned run with one replica of vLLM that starts from published weights."""
    recipe: dict[str, Any] = {
        "name": "served",
        "job": {"nodes": 2, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1},
        "model": model_of(published).model_dump(),
        "tokenizer": {"type": "huggingface", "path": str(published)},
        "environment": {"name": "arithmetic"},
        "sampling": {"max_new_tokens": 24},
        "inference": {"engine": "vllm", "max_batch": 16},
        "placement": {"mode": "partitioned", "inference": {"nodes": 1}},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 4, "sequence_length": LONGEST},
        "resume": {"partial": "keep"},
    }
    for name, fields in sections.items():
        recipe[name] = recipe.get(name, {}) | fields
    root.mkdir(parents=True)
    run = RunDir(root)
    run.resolved.write_text(yaml.safe_dump(RunConfig.model_validate(recipe).model_dump(mode="json")))
    run.token.write_text(f"{TOKEN}\n")
    return run


LAYOUTS = {
    "Qwen2": Layout(tp=2),
    "Qwen2, tied": Layout(pp=2),
    "Qwen3, tied": Layout(tp=2),
    "Llama 3.1": Layout(pp=2),
    "Mistral": Layout(dp=2),
    "Qwen3 MoE": Layout(ep=2, dp=2),
    "Qwen2, YaRN": Layout(dp=2),
    "GLM-4.5": Layout(pp=2),
    "DeepSeek-V3": Layout(tp=2),
    "gpt-oss": Layout(ep=2, dp=2),
    "Gemma 3": Layout(tp=2),
    "OLMo 3": Layout(tp=2),
}
"""Layout of two training ranks for each model."""


@dataclass(frozen=True)
class Asked:
    """Answers under one version."""

    sampled: list[Completion]
    greedy: Completion
    trained: list[list[float]]
    """Log-probs of the sampled answers by the trainer's model."""
    experts: list[list[list[set[int]]]]
    """Experts that its routers choose for each token and layer of prompt and answer; empty for a model without."""
    vocabulary: int
    """Tokens of the tokenizer, over which log-probs are normalised."""


class Trainer:
    """One training rank of a run whose replicas have vLLM, with its part of a model."""

    def __init__(self, run: RunDir, layout: Layout) -> None:
        self.config = read_config(run)
        self.tokenizer = build_tokenizer(self.config.tokenizer)
        self.platform = select(self.config.job)
        self.groups = layout.groups()
        self.policy = build_policy(self.config.model, self.tokenizer.vocab_size, self.platform)
        self.pool: ReplicaPool | None = None
        control = None
        if dist.get_rank() == 0:
            digest, token = digest_of(run.resolved), read_token(run.token)
            self.pool = ReplicaPool(Dispatch(run.attempt(1), digest, token, ALL, resumes=True, limit_s=START_S))
            self.pool.start()
            control = PoolControl(self.pool, LIMIT)
        self.refit = TransferRefit(
            Sender(weights_by_box(self.policy)),
            self.groups.control,
            "gloo",
            control,
            lambda: False,
            LIMIT,
            NO_REPLICA,
        )

    def load(self, published: Path) -> None:
        load_pretrained(self.policy, self.config.model, published)
        share_weights(self.policy, self.groups)

    def publish(self, version: int, probe: Probe) -> None:
        """Give the weights to the replicas. Collective."""
        assert self.refit.publish(version, probe)
        if self.pool is not None:
            self.pool.policy_version = version

    def whole(self, published: Path) -> Policy:
        """Build a published model on this rank alone."""
        policy = build_policy(self.config.model, self.tokenizer.vocab_size, self.platform, groups=groups_of_one())
        load_pretrained(policy, self.config.model, published)
        return policy

    def ask(self, *asked: tuple[Sampling, int]) -> list[list[Completion]]:
        """Answers of the replicas to the prompt, for each sampling a number of samples. On rank 0."""
        assert self.pool is not None
        requests = [GenerationRequest(PROMPT, samples, sampling, key) for key, (sampling, samples) in enumerate(asked)]

        async def all_of_them(pool: ReplicaPool) -> list[list[Completion]]:
            return await asyncio.gather(*(pool.generate(request) for request in requests))

        return asyncio.run(all_of_them(self.pool))

    def close(self) -> None:
        self.refit.close()
        if self.pool is not None:
            self.pool.close(end=True)


@torch.no_grad()
def greedily(folder: Path, prompt: Sequence[int], length: int, vocabulary: int) -> tuple[list[int], list[float]]:
    """Continue a prompt with transformers, over the tokens of the tokenizer. Returns tokens and log-probs."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, logprobs = [*prompt], []
    for _ in range(length):
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1, :vocabulary], dim=-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


def record_answers(file: Path, _rank: int) -> None:
    """Make a training rank append what it asks of the replicas, and their answers, to a file."""
    generate = ReplicaPool.generate

    async def recorded(pool: ReplicaPool, request: GenerationRequest) -> list[Completion]:
        answers = await generate(pool, request)
        with file.open("a") as lines:
            for answer in answers:
                asked = {"prompt_tokens": request.prompt_tokens, "temperature": request.sampling.temperature}
                lines.write(json.dumps(asked | answer._asdict()) + "\n")
        return answers

    ReplicaPool.generate = recorded  # type: ignore[method-assign]


def probe_of(policy: Policy, tolerance: float = CLOSE) -> Probe:
    logprobs = answer_logprobs(policy, PROMPT[:1], PROMPT[1:])
    return Probe(tuple(PROMPT), tuple(logprobs.tolist()), tolerance)


def publish_and_ask(rank: int, _world: int, run: RunDir, layout: Layout, versions: Sequence[Path]) -> list[Asked]:
    """Publish each version, and ask for answers under it. Returns them on rank 0."""
    trainer, seen = Trainer(run, layout), []
    length = trainer.config.sampling.max_new_tokens
    for version, published in enumerate(versions, start=1):
        trainer.load(published)
        whole = trainer.whole(published)
        trainer.publish(version, probe_of(whole))
        if rank == 0:
            sampling = Sampling(max_new_tokens=length)
            sampled, (greedy,) = trainer.ask((sampling, 4), (sampling.model_copy(update={"temperature": 0.0}), 1))
            trained = [answer_logprobs(whole, PROMPT, each.tokens).tolist() for each in sampled]
            experts = []
            if (model := trainer.config.model).num_experts is not None:
                computed = ([*PROMPT, *each.tokens][:-1] for each in sampled)
                experts = [experts_in(model, choices_of(whole, model, each)) for each in computed]
            seen.append(Asked(sampled, greedy, trained, experts, trainer.tokenizer.vocab_size))
        dist.barrier()
    trainer.close()
    return seen
