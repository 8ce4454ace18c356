"""Request of an evaluation, which `mrl evaluate` writes: for a process here, or into the folder of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import Day, HubPath, LaterPath, NonNegativeInt, PathMark, PositiveInt, Section


class Evaluation(Section):
    """A checkpoint, the problems it answers, and how."""

    checkpoint: HubPath  # run directory, checkpoint, or Hugging Face weights (directory or name on the hub) to evaluate
    sets: tuple[str, ...] | None = Field(default=None, strict=False)  # evaluation sets of the environment; default: all
    k: PositiveInt = 32  # answers per problem
    prompts: PositiveInt | None = None  # problems per set, the first ones; default: all
    greedy: bool = True  # also answer each problem once at temperature 0
    keep: bool = False
    """Write the pass rates of training problems, which are then the default of `sets`."""
    seed: NonNegativeInt = 0
    out: LaterPath | None = None
    """File of the result; default: a name made of the settings, in `evaluations/` of the run or of the current
    directory. The answers are kept beside it."""
    date: Day | None = None
    """Day, as YYYY-MM-DD, that chat templates use as today; default: the run's (tokenizer.date), or the current day
    where no run is known."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of the weights; default: that of the run or of the published weights."""
    engine: Literal["native", "vllm"] = "native"
    """native: the engine of this project; on a CPU the result is the same bit for bit. vllm: vLLM, which `mrl evaluate`
    starts on this machine."""
    vllm_python: Annotated[str, PathMark("program", read=False)] | None = None
    """Python that has vLLM, for `engine: vllm`."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: PositiveInt | None = None
    """CPU threads per rank; default: all processors available to the process, shared between its ranks."""
    tp: PositiveInt = 1  # tensor parallel size: ranks of a node that hold one copy of the model together
    replicas: PositiveInt = 1
    """Copies of the model that share the problems. The result is the same with any number of them."""
    environment: EnvironmentConfig
    sampling: Sampling
    code: str = ""  # version of mrl and of the environment's code, for the record

    @property
    def ranks(self) -> int:
        """Processes of the evaluation; vLLM's own do not count."""
        return 1 if self.engine == "vllm" else self.tp * self.replicas

    @model_validator(mode="after")
    def _vllm_fits(self) -> Evaluation:
        if self.engine == "vllm" and self.replicas > 1:
            raise ValueError(f"replicas is {self.replicas}, and vLLM is one: leave it out, or use engine native")
        return self


def read_evaluation(run_dir: RunDir) -> Evaluation | None:
    """Read the request of a job that evaluates; None for a run that trains. Raises ConfigurationError."""
    try:
        return Evaluation.model_validate_json(read_bytes(run_dir.evaluation_request))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ConfigurationError(f"{run_dir.evaluation_request}: {error}") from error
