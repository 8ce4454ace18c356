"""Pure: what a job demands of the cluster, by the recipe and the profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.cluster.profile import Profile
from launcher.doctor.finding import count
from launcher.host.slurm.formats import time_limit_s
from megatron_rl.config import RunConfig


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job needs, takes and costs."""

    who: str
    """How findings call the run."""
    nodes: int
    """Without which the job cannot start, spare ones included."""
    most_nodes: int
    """That it takes where it can; more than `nodes` where job.nodes is a range."""
    gpus: int
    """Per node; 0: the ranks compute on CPUs."""
    ranks: int
    """Per node."""
    time_limit_s: int | None
    """Of one attempt; None: neither the recipe nor the profile names one."""
    time_limit_key: str
    """Where to change it."""
    image: str | None
    """Container image; None: no containers."""
    save_every: int | Literal["auto"] | None
    """Steps between checkpoints, 0: none on the way; None: no recipe was given."""
    checkpoint_bytes: int | None
    """Size of one checkpoint, where it is known."""
    kept: int
    """Checkpoints on disk at once, the one being written included."""
    write_s: float | None
    """Seconds that writing a checkpoint takes, where its size and the file system's speed are known."""
    write_basis: str
    """Which speed that is."""

    @property
    def loss(self) -> str:
        """What a stop without a save costs: `up to 20 steps`."""
        if self.save_every == "auto":
            return "the steps since the last save"
        return f"up to {count(self.save_every, 'step')}" if self.save_every else "the steps of the attempt"

    @property
    def needed(self) -> str:
        """`8 nodes with 8 GPUs each`, `1 node`."""
        nodes = (
            f"{self.nodes} to {self.most_nodes} nodes" if self.most_nodes > self.nodes else count(self.nodes, "node")
        )
        return f"{nodes} with {count(self.gpus, 'GPU')}{' each' * (self.most_nodes > 1)}" if self.gpus else nodes


def demand_of(
    config: RunConfig | None,
    profile: Profile,
    checkpoint_bytes: int | None = None,
    node_bytes_per_s: float | None = None,
) -> Demand:
    """The demand of a run; without a recipe one node with all its GPUs.

    Args:
        checkpoint_bytes: size of one checkpoint, where it is known.
        node_bytes_per_s: what one machine can write to the run root; counts where the profile has no `fs_bandwidth`.
    """
    image = profile.container.image if profile.container else None
    if config is None:
        limit = time_limit_s(profile.time_limit)
        gpus = profile.gpus_per_node
        return Demand("a run", 1, 1, gpus, gpus, limit, "the profile's time_limit", image, None, None, 1, None, "")
    measured = node_bytes_per_s * config.job.fewest_nodes if node_bytes_per_s else None
    speed = profile.fs_bandwidth * 1e9 if profile.fs_bandwidth else measured
    return Demand(
        who=config.name,
        nodes=config.job.fewest_nodes + config.job.spare_nodes,
        most_nodes=config.job.most_nodes + config.job.spare_nodes,
        gpus=0 if config.job.device == "cpu" else config.job.gpus_per_node,
        ranks=config.job.gpus_per_node,
        time_limit_s=time_limit_s(config.job.time_limit or profile.time_limit),
        time_limit_key="job.time_limit" if config.job.time_limit else "the profile's time_limit",
        image=(config.image.reference or image) if image else None,
        save_every=config.save.every,
        checkpoint_bytes=checkpoint_bytes,
        kept=config.save.most_kept(config.training.steps) + 1,
        write_s=checkpoint_bytes / speed if checkpoint_bytes and speed else None,
        write_basis="fs_bandwidth"
        if profile.fs_bandwidth
        else f"{count(config.job.fewest_nodes, 'node')} at this speed",
    )
