"""What an evaluation is asked for: by `mrl evaluate` for this machine, and as a section of the recipe of its job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.inference.config import Sampling
from megatron_rl.section import Day, HubPath, LaterPath, NonNegativeInt, PositiveInt, Section


class EvaluateConfig(Section):
    """A job with this section evaluates and trains nothing; `mrl evaluate --cluster` writes it."""

    checkpoint: HubPath
    """What is evaluated: a run directory, a checkpoint, or Hugging Face weights, by directory or name on the hub."""
    sets: tuple[str, ...] | None = Field(default=None, strict=False)
    """Evaluation sets of the environment; default: all."""
    k: PositiveInt = 32
    """AnswerFile to each problem."""
    prompts: PositiveInt | None = None
    """Problems of each set at most, the first ones; default: all."""
    greedy: bool = True
    """Also answer each problem once at temperature 0."""
    seed: NonNegativeInt = 0
    """Of the answers' random numbers."""
    out: LaterPath | None = None
    """File of the result; default: named after the settings, in `evaluations/` of the run or of the current
    directory. The answers are kept beside it."""
    date: Day | None = None
    """Day that a chat template takes for today; default: the run's (tokenizer.date), and of no run the clock's."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Of the weights; default: the run's, or that of the published weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    """Of each rank on a CPU; default: all processors that the process may use, among its ranks."""
    tp: PositiveInt = 1
    """Ranks of a node that hold the model together, as a layout of training does by tensor parallelism ..."""
    replicas: PositiveInt = 1
    """... and how many such copies of it share out the problems. What is found is the same with any number of them."""
    code: str = ""
    """Version of mrl and of the environment's code, for the record."""

    @property
    def ranks(self) -> int:
        return self.tp * self.replicas


class Evaluation(Section):
    """An evaluation in full."""

    evaluate: EvaluateConfig
    environment: EnvironmentConfig
    sampling: Sampling
