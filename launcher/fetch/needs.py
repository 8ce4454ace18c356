"""Files that a run reads from the internet: which are needed, whether the cluster has them, and how they get there.

    run_root/cache/images/        container images (launcher.host.image.cache)
    run_root/cache/huggingface/   models, tokenizers and data sets: HF_HOME of the job, which runs with HF_HUB_OFFLINE=1
                      mrl/        a record per fetched repository, written last, so that half a download does not count
                      mrl/packages/   files from Python packages (package:NAME), exported once

The cluster `local` uses the user's own HF_HOME.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from launcher.cluster.choice import Clusters
from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image
from launcher.errors import BadInput
from launcher.host.image import cache
from megatron_rl.contract.children import module_command
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import CachedRepository
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import POLICY
from megatron_rl.recipe.hub import exported_folder, is_hub_name, is_prefetched, package_of
from megatron_rl.recipe.registry import required_datasets

Kind = Literal["image", "model", "tokenizer", "dataset"]


@dataclass(frozen=True, slots=True)
class Need:
    kind: Kind
    name: str

    @property
    def of_the_hub(self) -> bool:
        return self.kind != "image" and not self.package

    @property
    def package(self) -> str | None:
        """Python package that contains it; None: it comes from elsewhere."""
        return package_of(self.name) if self.kind in ("model", "tokenizer") else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Cache:
    images: Path
    huggingface: Path

    @classmethod
    def of(cls, profile: Profile | None, environ: Mapping[str, str] = os.environ) -> Cache:
        if profile is None:
            home = own_huggingface_home(environ)
            return cls(home / "mrl" / "images", home)
        root = Path(profile.run_root) / "cache"
        return cls(root / "images", root / "huggingface")

    def find(self, need: Need) -> Path | None:
        """Return the path of an item, or None if it must be fetched. Reads at most two files."""
        if need.kind == "image":
            return cache.find(need.name, self.images)
        if need.package:
            exported = exported_folder(need.package, self.huggingface)
            return exported if exported.is_dir() else None
        # An unreadable record means fetching again, which costs little if the files are there.
        known = if_readable(read(CachedRepository, record_of(self.huggingface, need.kind, need.name)))
        path = known and self.huggingface / known.path
        return path if path and os.path.isdir(path) else None  # noqa: PTH112 - no error without permission

    def holds(self, need: Need) -> bool:
        """Whether a run finds the item here, fetched by `mrl prefetch` or by another program."""
        if self.find(need) is not None or need.kind == "image" or need.package:
            return self.find(need) is not None
        kind = "datasets" if need.kind == "dataset" else "models"
        return os.path.isdir(self.huggingface / "hub" / f"{kind}--{need.name.replace('/', '--')}" / "snapshots")  # noqa: PTH112


def needs(config: RunConfig, profile: Profile | None) -> list[Need]:
    found: list[Need] = []
    images = (rank_image(config, profile), replica_image(config, profile))
    found += [Need("image", image) for image in images if image is not None]
    model = config.model.huggingface if config.model.init == "huggingface" else None
    if model and is_prefetched(model):
        found.append(Need("model", model))
    path = config.tokenizer.path if config.tokenizer.type == "huggingface" else None
    if path and is_prefetched(path) and path != model:
        found.append(Need("tokenizer", path))
    for distill in config.teachings.each:
        need = Need("tokenizer" if distill.server else "model", distill.teacher)
        if distill.teacher not in (POLICY, model) and is_prefetched(need.name) and need not in found:
            found.append(need)
    if config.reward and is_prefetched(config.reward.model):
        found.append(Need("model", config.reward.model))
    sets = [path for path in config.data.paths if is_hub_name(path)] if config.data else []
    sets += required_datasets(config.task) if config.generates else []
    return [*found, *(Need("dataset", name) for name in sets)]


def absent(config: RunConfig, profile: Profile) -> list[Need]:
    cache = Cache.of(profile)
    return [need for need in needs(config, profile) if cache.find(need) is None]


def only_begins(need: Need, config: RunConfig) -> bool:
    return need.kind == "model" and not config.keeps_initial_weights and need.name != config.tokenizer.path


def fetch(need: Need, cache: Cache) -> bool:
    """Fetch an item in a child process, which reports progress and errors itself; return whether it succeeded. Complete
    items are not fetched again, except that a tag or branch is looked up again."""
    if need.kind == "image":
        command = ["launcher.host.image", "--reference", need.name, "--cache", str(cache.images), "--refresh"]
    elif need.package:
        command = ["megatron_rl.model.packaged", need.package, str(exported_folder(need.package, cache.huggingface))]
    else:
        command = ["launcher.fetch.hub", need.kind, need.name]
    ran = subprocess.run(
        [*module_command(command[0]), *command[1:]],
        env=_environment(cache, os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return ran.returncode == 0


HUB = "https://huggingface.co"
REACHED_S = 10.0
"""Seconds in which the hub must answer before anything is fetched: its library tries again and again for a minute."""


def unreachable(environ: Mapping[str, str] = os.environ) -> str:
    """Return why the hub of Hugging Face cannot be reached from here, with the library's variables; empty if it can."""
    from urllib.error import HTTPError  # slow to import, and only for this
    from urllib.request import Request, urlopen

    hub = environ.get("HF_ENDPOINT") or HUB
    try:
        with urlopen(Request(hub, method="HEAD"), timeout=REACHED_S):
            return ""
    except HTTPError:  # an answer, whatever it says
        return ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"{hub} cannot be reached from here: {getattr(reason, 'strerror', None) or reason}"


def import_image_on_login(config: RunConfig, profile: Profile) -> None:
    """Import the image before a submission, if `image.import_on: login` and the cache lacks it. Raises BadInput."""
    if config.image.import_on != "login":
        return
    for need in absent(config, profile):
        if need.kind == "image" and not fetch(need, Cache.of(profile)):
            raise BadInput(f"{need} could not be imported here (image.import_on: login); the reason is above")


def export_packages(config: RunConfig, profile: Profile | None) -> None:
    """Export files of Python packages that a run reads and the cache lacks, with a line on stderr. Raises BadInput."""
    cache = Cache.of(profile)
    for need in needs(config, profile):
        if need.package and cache.find(need) is None and not export(need, cache):
            raise BadInput(f"{need} could not be exported here; the reason is above")


def export(need: Need, cache: Cache) -> bool:
    """Export an item from its Python package, after a line on stderr; return whether it succeeded."""
    click.echo(
        f"exporting {need} to {cache.huggingface}, once: its quantised weights are written in fp32, which takes a "
        "minute or two for 100 million weights",
        err=True,
    )
    return fetch(need, cache)


def record_of(huggingface: Path, kind: str, name: str) -> Path:
    return huggingface / "mrl" / f"{kind}--{name.replace('/', '--')}.json"


def own_huggingface_home(environ: Mapping[str, str]) -> Path:
    default = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(environ.get("HF_HOME") or default).expanduser()


def known_caches(clusters: Clusters) -> list[Path]:
    """Caches of the Hugging Face libraries that this machine sees: its own and those of the user's clusters."""
    found = [own_huggingface_home(clusters.environ)]
    for name in clusters.own:
        with suppress(BadInput):  # an unset variable in a profile: reported when that cluster is chosen
            found.append(Cache.of(clusters.profile(name)).huggingface)
    return found


def _environment(cache: Cache, environ: Mapping[str, str]) -> dict[str, str]:
    own = own_huggingface_home(environ)
    return {
        **environ,
        "HF_HOME": str(cache.huggingface),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN_PATH": environ.get("HF_TOKEN_PATH")
        or str(own / "token"),  # `hf auth login` stores it in the user's own HF_HOME
    }
