"""Whether a cluster has what a run reads and does not fetch itself: images, and models and data of the hub."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image, replica_image
from launcher.doctor.finding import DoctorFinding, error, note
from launcher.fetch.needs import Cache, Need, needs, only_begins
from launcher.host.image.cache import check
from launcher.host.image.reference import ImageError, is_path
from launcher.recipe.load import Recipe, place_of


def fetched(recipe: Recipe, profile: Profile, resumes: bool = False) -> Iterator[DoctorFinding]:
    """Yield an error for each item without which the job surely fails, and a note for each that it gets at its start. A
    run that resumes has its own checkpoint."""
    cache, config = Cache.of(profile), recipe.config
    for need in needs(config, profile):
        if need.kind == "image":
            yield from _image(need, recipe, profile, cache)
        elif cache.find(need) is not None or (resumes and only_begins(need, config)):
            continue
        elif need.package:
            yield note("files", f"{need} is not in {cache.huggingface} yet: mrl-submit will export it first")
        else:
            text = f"{need} is missing in {cache.huggingface}, and the job runs offline"
            yield error("files", text, "`mrl prefetch RECIPE` fetches it")


def _image(need: Need, recipe: Recipe, profile: Profile, cache: Cache) -> Iterator[DoctorFinding]:
    try:
        check(need.name)
    except ImageError as bad:
        yield _unusable(_named(need.name, recipe, profile), bad)
        return
    if is_path(need.name) or cache.find(need) is not None:
        return
    if recipe.config.image.import_on == "login":
        yield note("image", f"{need} is not in {cache.images} yet: mrl-submit will import it first")
    else:
        text = f"{need} is not in {cache.images} yet: the job's first node will import it, which takes minutes"
        yield note("image", text, "`mrl prefetch RECIPE` imports it now")


def image_of(profile: Profile) -> Iterator[DoctorFinding]:
    if profile.container is not None:
        try:
            check(profile.container.image)
        except ImageError as bad:
            yield _unusable(OF_PROFILE, bad)


def _unusable(named: str, bad: ImageError) -> DoctorFinding:
    return error("image", f"{named}: {bad}", "build or import it again, or name another one: containers/README.md")


OF_PROFILE = "container.image of the cluster's profile"


def _named(image: str, recipe: Recipe, profile: Profile) -> str:
    if image == replica_image(recipe.config, profile):
        kinds = {"inference.vllm.image": recipe.config.inference.vllm}
        key = next((key for key, vllm in kinds.items() if vllm and vllm.image == image), "distill.replicas.vllm.image")
        return f"{place_of(recipe, key)}: {key}"
    if recipe.config.image.reference == rank_image(recipe.config, profile):
        return f"{place_of(recipe, 'image.reference')}: image.reference"
    return OF_PROFILE
