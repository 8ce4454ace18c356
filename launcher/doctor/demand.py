"""Demands of a job on the cluster, from the recipe and the profile. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image
from launcher.doctor.finding import count
from launcher.host.slurm.formats import time_limit_s
from megatron_rl.recipe.config import RunConfig


@dataclass(frozen=True, slots=True)
class Demand:
    who: str
    nodes: int
    """Fewest nodes that the job can start with, spare ones included."""
    most_nodes: int
    """Most nodes that the job can use; more than `nodes` if job.nodes is a range."""
    gpus: int
    """GPUs per node; 0: the ranks compute on CPUs."""
    ranks: int
    time_limit_s: int | None
    """Time limit of one attempt in seconds; None: neither the recipe nor the profile has one."""
    time_limit_key: str
    images: tuple[str, ...]
    save_every: int | Literal["auto"] | None
    """Steps between checkpoints; 0: only at the end; None: no recipe was given."""
    checkpoint_bytes: int | None
    kept: int
    """Largest number of checkpoints on disk, including the one being written."""
    write_s: float | None
    """Seconds to write a checkpoint; None: its size or the file system's speed is unknown."""
    write_basis: str

    @property
    def loss(self) -> str:
        if self.save_every == "auto":
            return "the steps since the last save"
        return f"up to {count(self.save_every, 'step')}" if self.save_every else "the steps of the attempt"

    @property
    def needed(self) -> str:
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
    """Return the demand of a run; without a recipe, of one node with all its GPUs. The measured write speed of one
    machine counts if the profile has no `fs_bandwidth`."""
    if config is None:
        images = (profile.container.image,) if profile.container else ()
        limit = time_limit_s(profile.time_limit)
        gpus = profile.gpus_per_node
        return Demand("a run", 1, 1, gpus, gpus, limit, "the profile's time_limit", images, None, None, 1, None, "")
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
        images=tuple(filter(None, (rank_image(config, profile), replica_image(config, profile)))),
        save_every=config.save.every,
        checkpoint_bytes=checkpoint_bytes,
        kept=config.save.most_kept(config.training) + 1,
        write_s=checkpoint_bytes / speed if checkpoint_bytes and speed else None,
        write_basis="fs_bandwidth"
        if profile.fs_bandwidth
        else f"{count(config.job.fewest_nodes, 'node')} at this speed",
    )
