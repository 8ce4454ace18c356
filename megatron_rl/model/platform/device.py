"""Interface of a device for the rest of a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from megatron_rl.model.platform.attention import Layout, PackedSequences
from megatron_rl.model.platform.delta_rule import DeltaKernels, PlainDelta
from megatron_rl.model.platform.layer_kernels import LayerKernels
from megatron_rl.model.platform.paged_attention import PagedAttention, PagedChunks, PagedRows
from megatron_rl.recipe.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig  # slow to import, and not needed to select a device


AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


class UnsupportedPlatform(ConfigurationError):
    """This machine or its packages cannot run the recipe. The message says what to install."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    peak_memory: int  # bytes: the largest sum of torch's tensors since the last query
    power: float | None  # watts at the moment; None if the driver does not report them


@dataclass(frozen=True, slots=True)
class Linears:
    """Replacements of megatron-core's layer classes, with the same names, weights and sharded state."""

    column: type
    row: type
    norm: type | None = None  # placeholder for a norm that the following column-parallel linear computes


class GraphRecorder(Protocol):
    """Records the device work of a function and replays it without the host launching each operation: with the same
    sizes and host values, on the same tensors."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Call the function the way it will be recorded, so that libraries allocate what they need."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record the function without executing its device work. Returns a function that executes it, any number of
        times.

        `warm_up` has called the function before. It never makes the host wait for the device, and tensors it creates
        are not needed after it returns. Raises RuntimeError for work that cannot be recorded.
        """

    def release(self) -> None:
        """Free the memory of this recorder's recordings, which may not be replayed again."""


class Kernels(Protocol):
    """Operations of the model on a device: attention, linears, sums over ranks, and recorded graphs of them. Methods
    with a body are those of a device without kernels of its own for them."""

    transformer_overrides: dict[str, Any]  # fields of TransformerConfig required by this device
    tokens_between_syncs: int
    """Tokens that the engine decodes before the host checks for finished answers. The check waits for all queued device
    work."""
    rows_multiple: int
    """Number whose multiples the rows of generation's matrix products are padded to, so that a row's result does not
    depend on the number of other rows."""
    computes_on_host: bool
    """Whether operators run on the host's own cores: few long ones are then better than many short ones."""
    page_tokens: int  # default tokens per page of the key/value cache

    def attention_layout(
        self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None, *, sinks: bool = False
    ) -> Layout:
        """Return the attention layout of packed sequences for queries of this dtype.

        part: [part] indices of the packed tokens whose attention, to all that they see, is computed; ascending, on the
            CPU. All tokens if None.
        sinks: whether any layer has sinks, see `AttentionForm`.
        """

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        """Return the attention of single new tokens to a paged cache for queries of this dtype."""

    def chunk_attention(self, chunks: PagedChunks, dtype: torch.dtype) -> PagedAttention | None:
        """Return the attention of several new tokens to a paged cache; None if no kernel of this device supports it,
        and `attention_layout` of a part must attend to keys and values that are read from the cache."""
        return None

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of cached keys and values for a model of this dtype."""

    def gathers_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        """Whether pages of this size store the tokens of a head contiguously, which is best for gathering."""
        return True

    @property
    def layer_kernels(self) -> LayerKernels | None:
        """Kernels between the products of a layer in generation; None if the training layers generate as well."""
        return None

    @property
    def delta_kernels(self) -> DeltaKernels:
        return PlainDelta()

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> GraphRecorder | None:
        """Recorder of decode steps for a model of this dtype; None if the device has none or if `paged_attention`
        depends on values that only the host knows."""
        return None

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        """Return why this device multiplies the experts of a layer one by one; None if it multiplies all at once: see
        grouped_product.py."""

    def release_graphs(self) -> None:
        """Free all recordings of this process, which may not be replayed again, and with them what they hold of the
        communicators whose collectives they contain."""
        return

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool, sinks: bool) -> bool:
        """Whether layouts may copy shared tokens for each branch of a tree, so that packing must count that memory.

        in_parts: whether the layouts are for parts of the packed tokens. sinks: whether any layer has sinks.
        """
        return True

    @property
    def attention_kernels(self) -> str:
        """Description of the attention kernels, for people."""

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> [rows, ...], with repetitions. The gradient of a repeated token is summed in a fixed order,
        and not in bf16."""
        return tokens.index_select(0, rows)

    def linears(self, config: TransformerConfig) -> Linears | None: ...


class Device(Protocol):
    """The device of a rank: its memory, time, streams and seeds."""

    device: torch.device
    backend: str
    transfers_beside_collectives: bool
    """Whether weights may be transferred between worlds while the ranks of one run collectives on the device."""
    kernels: Kernels

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule: ...

    def host_memory(self, size: int) -> torch.Tensor:
        """[size] bytes of host memory, pinned if the device can then copy while the host continues."""

    def synchronize(self) -> None:
        """Wait for queued device work, so that clock readings are meaningful."""
        return

    def release_memory(self) -> None:
        """Give memory that no tensor uses back to the device, where other processes may need it."""
        return

    def beside(self) -> AbstractContextManager[None]:
        """Context of a thread whose device copies run beside other work. Exit waits for the copies."""
        return nullcontext()

    def watch_memory(self, watch: bool) -> None:
        """Record each allocation of the device's memory, or stop that; no-op for devices without such a history."""
        return

    def memory_snapshot(self) -> bytes | None:
        """Return the recorded allocations, pickled for torch's viewer of memory; None without a history."""
        return None

    def device_use(self) -> DeviceUse | None:
        """Peak memory and power of the device, without waiting for it; None if unknown."""
        return None

    def peak_flops(self, dtype: str) -> float | None:
        """Peak floating-point operations per second for the model's dtype; None if unknown."""
        return None

    def seed(self, seed: int) -> None:
        """Seed the generators of initial weights. Needs megatron-core's parallel state."""

    def rng_state(self) -> dict[str, torch.Tensor]:
        """Return the states of this device's generators, as CPU tensors."""
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Set the generators of this device that `state` contains. It may come from another kind of device."""
        torch.set_rng_state(state["cpu"])
