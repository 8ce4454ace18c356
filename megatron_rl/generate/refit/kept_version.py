"""Weights of one version that a few replicas keep while the others get newer ones, for answers that must all be of that
version."""

from __future__ import annotations

from megatron_rl.generate.engine.interface import Completion, GenerationRequest, WeightsGone
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.replicas.links import Start
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.requests_in_flight import KeptWeights
from megatron_rl.rank.control import Control


class KeptVersion:
    """Implements `InferenceInterface`: every token is of the kept version."""

    def __init__(self, pool: ReplicaPool, kept: KeptWeights) -> None:
        self._pool, self._kept = pool, kept

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Raises WeightsGone if the replicas are lost, or took newer weights because no other replica could."""
        answers = await self._pool.generate(request, self._kept)
        version = self._kept.version
        if any(each != version for answer in answers for each in answer.versions):
            raise WeightsGone(f"the replicas that kept weights of version {version} took newer ones")
        return answers


class VersionKeeper:
    """Has replicas keep the newest version. All methods are collective over the training ranks."""

    def __init__(self, refit: OverlappedRefit, pool: ReplicaPool, control: Control, *, drives: bool) -> None:
        """drives: whether this rank has a driver, which queries the pool."""
        self._refit, self._pool, self._control, self._drives = refit, pool, control, drives

    def keep(self, most: int) -> tuple[KeptVersion, list[int]] | None:
        """Have some replicas keep the newest weights, which have arrived when this returns. Returns access to them, and
        the ranks whose drivers have it; None if fewer than two replicas have the weights.

        most: replicas that may keep them. At least one other takes newer weights.
        """
        self._refit.finish()
        ready = self._ready()
        if len(ready) <= most:  # those that kept a version until now have missed the newest one
            self._refit.renew()
            ready = self._ready()
        kept = KeptWeights(self._pool.policy_version, frozenset(ready[: min(most, len(ready) - 1)]))
        if not kept.starts:
            return None
        self._refit.keep(kept.starts)
        # With many replicas a driver is connected to some of them only.
        reaches = self._drives and bool(kept.starts & self._pool.starts().keys())
        ranks = [rank for rank, able in enumerate(self._control.gather(reaches)) if able]
        return KeptVersion(self._pool, kept), ranks

    def _ready(self) -> list[Start]:
        """Return the replicas that have the newest version, as rank 0 sees them."""
        return self._control.share(sorted(self._pool.ready()) if self._control.rank == 0 else [])

    def release(self) -> None:
        self._refit.keep(frozenset())
