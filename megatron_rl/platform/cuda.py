"""NVIDIA GPUs: one device per rank, NCCL, megatron-core as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.platform.api import UnsupportedPlatform
from megatron_rl.platform.attention import Layout, PackedSequences
from megatron_rl.platform.dense_attention import FanOut, dense_layout

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class CudaPlatform:
    backend = "nccl"
    # A look reads twice, which rows ended and what they sampled: at most one wait per 8 tokens. The last row of a batch
    # is computed up to 15 times in vain, which is nothing beside answers of thousands of tokens.
    tokens_between_looks = 16
    transformer_overrides: dict[str, Any] = {}

    def __init__(self, *, local_rank: int, threads: int) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedPlatform("job.device is cuda but torch sees no GPU: use a GPU node or job.device=cpu")
        if local_rank >= torch.cuda.device_count():
            raise UnsupportedPlatform(
                f"rank {local_rank} of this node has no GPU: torch sees {torch.cuda.device_count()} "
                "(job.gpus_per_node is what every node must have)"
            )
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")  # fp32 means fp32: NVIDIA's image allows TF32
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)

    def attention_layout(self, packed: PackedSequences) -> Layout:
        return dense_layout(packed, self.device)

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return FanOut.of(rows, len(tokens)).gather(tokens)

    def linears(self, config: TransformerConfig) -> tuple[type, type] | None:
        # Here and below, because the health check chooses a device too, and has no time for megatron-core.
        from megatron_rl.platform.whole_linears import whole_linears

        return whole_linears(config)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def seed(self, seed: int) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)
