"""What the rest of a rank asks of its device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from megatron_rl.errors import ConfigurationError
from megatron_rl.platform.attention import Layout, PackedSequences
from megatron_rl.platform.paged_attention import PagedAttention, PagedRows

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig  # who only asks for a device has no time for it


AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


class UnsupportedPlatform(ConfigurationError):
    """This machine or its packages cannot run the recipe; the message says what to install."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device says of itself."""

    peak_memory: int
    """Bytes: the most that torch's tensors held at once since it was asked before."""
    power: float | None
    """Watts, now; None where the driver does not say."""


@dataclass(frozen=True, slots=True)
class Linears:
    """Classes that stand for megatron-core's own in a layer, with the same names, weights and sharded state."""

    column: type
    """Column-parallel linear."""
    row: type
    """Row-parallel linear."""
    norm: type | None = None
    """What stands in the place of a norm where the column-parallel linear behind it computes it."""


class GraphRecorder(Protocol):
    """Records what a function has the device do, to have it done again without the host saying so operation by
    operation: with the same sizes and numbers of the host's, on the same tensors."""

    def warm_up(self, function: Callable[[], None]) -> None:
        """Call it in the way in which it will be recorded: what libraries need for that they take before."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call it, and have the device do nothing of it. Returns what has it done, now and whenever it is called.

        The function has been called by `warm_up` before, never makes the host wait for the device, and what it makes
        is not needed when it is through. Raises RuntimeError where it does what cannot be recorded.
        """

    def release(self) -> None:
        """Let go of the memory of what was recorded, none of which may be done again."""


class Platform(Protocol):
    device: torch.device
    backend: str
    """torch.distributed backend."""
    transformer_overrides: dict[str, Any]
    """Fields of TransformerConfig that this device dictates."""
    tokens_between_syncs: int
    """Tokens that the engine decodes until the host looks which answers have ended: to look is to wait until the device
    has done all it was told."""
    rows_multiple: int
    """A multiple up to which the rows of matrix products are filled in generation, so that one of them does not depend
    on how many others there are."""
    transfers_beside_collectives: bool
    """Whether weights may be on their way between worlds while the ranks of one use the device together."""
    computes_on_host: bool
    """Whether operators run on the cores that tell of them: few long ones are then better than many short ones."""
    page_tokens: int
    """Places of a page of the key/value cache, where the recipe says nothing else."""

    def attention_layout(self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None) -> Layout:
        """How this device's kernels for queries of this type attend within packed sequences.

        part: [part] the packed tokens whose attention, to all that they see, is asked for, ascending, on the CPU; all
            where None.
        """

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        """How this device's kernels for queries of this type attend to what lies in pages."""

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which keys and values lie in pages, of a model of this type."""

    def gathers_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        """Whether the tokens of a head lie together in each page of so many: so they are best gathered."""

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> GraphRecorder | None:
        """Records decode steps of a model of this type; None where they cannot be: the device knows no such thing, or
        `paged_attention` to pages of so many tokens depends on what the host knows of their rows."""

    def gathers_branches(self, dtype: torch.dtype, *, in_parts: bool) -> bool:
        """Whether such layouts may hold what the branches of a tree share once for each of them, in memory that packing
        has to count.

        in_parts: whether they are of parts of the packed tokens.
        """

    @property
    def attention_kernels(self) -> str:
        """By what, in words."""

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> [rows, ...], a token as often as it is asked for. Its gradient is the sum of those, added up
        in an order that does not change, and not in bf16 by many where the device would."""

    def linears(self, config: TransformerConfig) -> Linears | None:
        """None where megatron-core's own are to be used."""

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        """The module that `make` makes, on this device, its weights of this type."""

    def host_memory(self, size: int) -> torch.Tensor:
        """[size] bytes of the host that this device copies from and to by itself while the host goes on: pinned."""

    def synchronize(self) -> None:
        """Wait for queued device work, so that a clock read afterwards is honest."""

    def beside(self) -> AbstractContextManager[None]:
        """What a thread enters whose copies to and from the device are beside the work of others; when it leaves, they
        are done."""
        ...

    def device_use(self) -> DeviceUse | None:
        """What the device held and draws, without waiting for it; None of a device that does not say."""

    def peak_flops(self, dtype: str) -> float | None:
        """Floating-point operations per second that the device can do at most on the model's dtype; None where that is
        not known."""

    def seed(self, seed: int) -> None:
        """Seed what initial weights are drawn from. Needs megatron-core's parallel state."""

    def rng_state(self) -> dict[str, torch.Tensor]:
        """States of this device's generators, on the CPU."""

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Set those of this device's generators that `state` has: it may come from another kind of device."""
