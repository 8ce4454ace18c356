"""Supervised training of a tiny base model on the answer format before RL (`model.init: supervised`).

Takes a fixed number of steps, with its own seed, on the environment's worked examples: the rows, the packing and the
loss are those of `training.objective: supervised`. Every rank does the same work without communication, so the result
does not depend on the number of ranks. A cache keyed by everything the result depends on makes no difference: the run
starts from the same bits.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import logging
import math
import pickle
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.loss import supervised_loss
from megatron_rl.algorithms.packing import pack
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.contract.files import cache_folder, check_regular
from megatron_rl.learn.supervised.example_rows import demonstrations, token_example
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.chat.messages import Example
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.model import SupervisedConfig

logger = logging.getLogger(__name__)


class NoDemonstrations(ConfigurationError):
    """The environment has no worked examples to learn from."""


def teach(
    policy: Policy,
    config: RunConfig,
    environment: object,
    tokenizer: Tokenizer,
    safe_points: SafePoints,
    *,
    writer: bool,
) -> None:
    """Give `policy` the taught weights, from the cache if they are in it.

    policy: the whole model, with random weights from seed `model.supervised.seed`.
    writer: whether this rank writes the cache.

    Returns early, with useless weights, if this rank was asked to leave. Raises NoDemonstrations.
    """
    worked = demonstrations(environment)
    if not worked:
        raise NoDemonstrations(
            f"model.init is supervised but environment {config.task.name!r} has no worked examples: give it "
            "`demonstrations` (megatron_rl.agent.api.Demonstrator), or set model.init to from-scratch"
        )
    try:
        examples = [token_example(prompt, answer, tokenizer) for prompt, answer in worked]
    except ValueError as error:
        raise ConfigurationError(f"a worked example of environment {config.task.name!r}: {error}") from error
    path = cache_path(config, examples)
    state = _read(path)
    if state is None:
        _train(policy, examples, config.model.supervised, safe_points)
        if writer and not safe_points.poll():
            _write(path, policy)
    else:
        logger.info("base model taken from %s", path)
        policy.load_state_dict(state, strict=False)


def _train(
    policy: Policy,
    examples: Sequence[Example],
    config: SupervisedConfig,
    safe_points: SafePoints,
) -> None:
    adam = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    tokens, loss_masks = [list(column) for column in zip(*examples, strict=True)]
    generator = torch.Generator().manual_seed(config.seed)

    def loss(hidden: Tensor, read: ModelInput) -> Tensor:
        logprobs, _ = predicted_logprobs(hidden, policy.output(), read.targets, temperature=1.0, entropy="none")
        last.fill_(-logprobs.detach().mean())  # not finite where a log-prob is not, which the loss leaves out
        mean = torch.full_like(logprobs, 1 / len(logprobs))
        return supervised_loss(TrainedTokens.of_rows(logprobs, mean))[0]

    last = torch.zeros((), device=next(policy.parameters()).device)
    for _ in range(config.steps):
        if safe_points.poll():
            return
        chosen = torch.randint(len(examples), (config.batch_size,), generator=generator).tolist()
        inputs = [ModelInput.of(policy, batch) for batch in pack(tokens, loss_masks, chosen, limit=2**62)]
        adam.zero_grad()
        forward_backward(policy, inputs, loss, Pipeline(), stop=lambda: False)
        adam.step()
    policy.zero_grad(set_to_none=True)
    if not math.isfinite(last.item()):
        raise ConfigurationError(
            f"the base model cannot be taught: its loss is {last.item()} after {config.steps} steps. Lower "
            "model.supervised.learning_rate"
        )
    logger.info("base model taught, loss %.3f after %d steps", last.item(), config.steps)


def cache_path(config: RunConfig, examples: Sequence[Example]) -> Path:
    """Cache file of the weights taught by these examples under this configuration."""
    depends_on = {
        "model": config.model.model_dump(exclude={"checkpoint", "init", "init_seed", "lora"}),
        "tokenizer": config.tokenizer.model_dump(),
        "environment": config.task.model_dump(),
        "examples": hashlib.sha256(
            repr([*map(tuple, examples)]).encode()
        ).hexdigest(),  # the environment's code may have changed
        "device": [config.job.device, config.job.threads_per_rank],
        "versions": [importlib.metadata.version(package) for package in ("torch", "megatron-core", "mrl")],
    }
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("supervised") / f"{key}.pt"


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        check_regular(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        logger.warning("the cached base model %s cannot be read (%s): teaching it again", path, error)
        return None


def _write(path: Path, policy: Policy) -> None:
    """Write the cache, with a warning if that fails: it only costs the next run some seconds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    weights = {name: tensor for name, tensor in policy.state_dict().items() if torch.is_tensor(tensor)}
    content = io.BytesIO()
    torch.save(weights, content)  # in memory: on a full disk torch raises a RuntimeError without an errno
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.getvalue())
        temporary.replace(path)
    except OSError as error:
        logger.warning("the base model could not be cached in %s: %s", path.parent, error)
        with suppress(OSError):
            temporary.unlink()
