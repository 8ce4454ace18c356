"""What a run reads from the internet, whether the cluster has it already, and how it gets there.

    run_root/cache/images/        container images (launcher.host.image.cache)
    run_root/cache/huggingface/   models, tokenizers and data sets: HF_HOME of the job, which runs with HF_HUB_OFFLINE=1
                      mrl/        one record a fetched thing, written last, so that half a download never counts

For the cluster `local` the cache is the user's own HF_HOME.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.host.image import cache
from launcher.host.image.reference import is_path
from megatron_rl.agent.registry import required_datasets
from megatron_rl.config import RunConfig
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import CachedRepository
from megatron_rl.model.config import is_hub_name

Kind = Literal["image", "model", "tokenizer", "dataset"]


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that the job reads and does not fetch itself."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Cache:
    """Where a cluster keeps what was fetched."""

    images: Path
    huggingface: Path

    @classmethod
    def of(cls, profile: Profile | None, environ: Mapping[str, str] = os.environ) -> Cache:
        """The cache of a cluster; None is this machine."""
        if profile is None:
            home = own_huggingface_home(environ)
            return cls(home / "mrl" / "images", home)
        root = Path(profile.run_root) / "cache"
        return cls(root / "images", root / "huggingface")

    def find(self, need: Need) -> Path | None:
        """Where it is; None where it would have to be fetched. Looks at a file or two."""
        if need.kind == "image":
            return cache.find(need.name, self.images)
        # One that cannot be read is fetched again, which costs little where its files are there.
        known = if_readable(read(CachedRepository, record_of(self.huggingface, need.kind, need.name)))
        path = known and self.huggingface / known.path
        return path if path and path.is_dir() else None


def needs(config: RunConfig, profile: Profile | None) -> list[Need]:
    """Everything that a run of `config` reads from the internet, each once."""
    found: list[Need] = []
    container = profile.container if profile else None
    if container:
        found.append(Need("image", config.image.reference or container.image))
    model = config.model.huggingface if config.model.init == "huggingface" else None
    if model and is_hub_name(model):
        found.append(Need("model", model))
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    if path and is_hub_name(path) and path != model:
        found.append(Need("tokenizer", path))
    return [*found, *(Need("dataset", name) for name in required_datasets(config.environment))]


def missing(config: RunConfig, profile: Profile | None) -> list[str]:
    """Notes for a dry run: what the cluster does not have yet, and what to do about it."""
    cache = Cache.of(profile)
    absent = [need for need in needs(config, profile) if cache.find(need) is None]
    notes = [_about(need, config, cache) for need in absent if need.kind == "image"]
    of_the_hub = [str(need) for need in absent if need.kind != "image"]
    if of_the_hub:
        where = f"not in {cache.huggingface}, and the job runs offline"
        notes.append(f"{where}: {', '.join(of_the_hub)}; `mrl prefetch` fetches them")
    return notes


def _about(need: Need, config: RunConfig, cache: Cache) -> str:
    if is_path(need.name):
        return f"{need} is not here, or is no whole squashfs file"
    if config.image.import_on == "login":
        return f"{need} is not in {cache.images} yet: mrl-submit imports it first"
    return f"{need} is not in {cache.images} yet: the job's first node imports it, or `mrl prefetch` does now"


def fetch(need: Need, cache: Cache) -> bool:
    """Fetch in a child process, which tells the user what it does and, where it fails, why; whether it succeeded.

    Nothing is fetched twice, but a tag or a branch is looked up again.
    """
    if need.kind == "image":
        command = ["launcher.host.image", "--reference", need.name, "--cache", str(cache.images), "--refresh"]
    else:
        command = ["launcher.fetch.hub", need.kind, need.name]
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        env=_environment(cache, os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return ran.returncode == 0


def import_image_on_login(config: RunConfig, profile: Profile) -> None:
    """Before a submission: what `image.import_on: login` asks for, unless the cache has it.

    Raises:
        BadInput: the image cannot be had.
    """
    if config.image.import_on != "login":
        return
    cache = Cache.of(profile)
    for need in needs(config, profile):
        if need.kind == "image" and cache.find(need) is None and not fetch(need, cache):
            raise BadInput(f"{need} cannot be imported here (image.import_on: login); the reason stands above")


def record_of(huggingface: Path, kind: str, name: str) -> Path:
    """CachedRepository of something fetched whole."""
    return huggingface / "mrl" / f"{kind}--{name.replace('/', '--')}.json"


def own_huggingface_home(environ: Mapping[str, str]) -> Path:
    """Where the Hugging Face libraries keep things unless told otherwise."""
    default = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(environ.get("HF_HOME") or default).expanduser()


def _environment(cache: Cache, environ: Mapping[str, str]) -> dict[str, str]:
    own = own_huggingface_home(environ)
    return {
        **environ,
        "HF_HOME": str(cache.huggingface),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN_PATH": environ.get("HF_TOKEN_PATH")
        or str(own / "token"),  # `hf auth login` left it in the user's own
    }
