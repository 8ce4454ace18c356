"""megatron-core's linears without tensor parallelism: torch's linear instead of an autograd function that communicates.

Modules, names and sharded state are megatron-core's; only `forward` differs.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl.model.platform.device import Linears


class WholeColumnLinear(ColumnParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return _whole(self, input_)


class WholeRowLinear(RowParallelLinear):
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return _whole(self, input_)


def _whole(module: ColumnParallelLinear | RowParallelLinear, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    if module.skip_bias_add:
        return linear(input_, module.weight), module.bias
    return linear(input_, module.weight, module.bias), None


def whole_linears(config: TransformerConfig) -> Linears | None:
    """Linears for a rank that has whole layers; None if the layers are split."""
    if config.tensor_model_parallel_size > 1 or config.gradient_accumulation_fusion:
        return None
    return Linears(WholeColumnLinear, WholeRowLinear)
