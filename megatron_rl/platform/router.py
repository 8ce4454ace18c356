"""megatron-core's router of tokens to experts, where there is no Transformer Engine."""

from __future__ import annotations

from megatron.core.transformer.moe import moe_utils


def mend_router() -> None:
    """Define what the router's product asks for before it goes without: 0.16.1 knows the name only where Transformer
    Engine is."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
