"""Pure: references of images, as users write them and as enroot takes them."""

from __future__ import annotations

import re
from typing import NamedTuple

SUFFIXES = (".sqsh", ".sqfs", ".squashfs")


class ImageError(Exception):
    """The image is unavailable."""


class ImageReference(NamedTuple):
    user: str | None
    registry: str | None  # None: Docker Hub
    name: str
    tag: str | None
    digest: str | None  # sha256:...

    def uri(self) -> str:
        """Form that both enroot 3 and 4 understand, for tags and for digests."""
        user = self.user + "@" if self.user else ""
        registry = self.registry + "#" if self.registry else ""
        version = self.digest or self.tag
        return "docker://" + user + registry + self.name + (":" + version if version else "")


def parse(text: str) -> ImageReference:
    """Parse [docker://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST], or Docker's own REGISTRY/IMAGE. Raises ImageError."""
    match = re.match(
        r"^(?:docker://)?(?:(?P<user>[^@#/]+)@(?!sha256:))?(?:(?P<registry>[^@#/]+)#)?(?P<name>[a-z0-9._/-]+?(?::\d+/[a-z0-9._/-]+?)?)"
        r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]*))?(?:[@:](?P<digest>sha256:[0-9a-f]{64}))?$",
        text,
    )
    if match is None and (daemon := re.match(r"(dockerd|podman)://", text)):
        raise ImageError(
            f"image {text!r}: {daemon[1]}:// reads the images of one machine, which the nodes do not see; push it to a "
            f"registry, or `enroot import -o IMAGE.sqsh {text}` and name that file"
        )
    if match is None:
        form = "[USER@][REGISTRY#]IMAGE[:TAG], such as nvcr.io#nvidia/pytorch:25.06-py3, or the path of a squashfs file"
        raise ImageError(f"image {text!r}: expected {form}")
    registry, name = match.group("registry"), match.group("name")
    first, slash, rest = name.partition("/")
    if registry is None and slash and ("." in first or ":" in first or first == "localhost"):
        registry, name = first, rest
    return ImageReference(match.group("user"), registry, name, match.group("tag"), match.group("digest"))


def is_path(reference: str) -> bool:
    """Whether a reference names a file, by pyxis's rule or its suffix; a recipe's are absolute, so pyxis agrees."""
    return reference.startswith(("/", "./", "../", "~")) or reference.endswith(SUFFIXES)
