"""Pure: how an image is called, and what enroot wants to hear."""

from __future__ import annotations

import re
from typing import NamedTuple


class ImageError(Exception):
    """The image cannot be had; the message says which, why and what to do."""


class Reference(NamedTuple):
    """An image in a registry."""

    user: str | None
    registry: str | None  # None: Docker Hub
    name: str
    tag: str | None
    digest: str | None  # sha256:...

    def uri(self) -> str:
        """In the one form that enroot 3 and 4 both understand, for tags and for digests."""
        user = self.user + "@" if self.user else ""
        registry = self.registry + "#" if self.registry else ""
        version = self.digest or self.tag
        return "docker://" + user + registry + self.name + (":" + version if version else "")


def parse(text: str) -> Reference:
    """[docker://][USER@][REGISTRY#]IMAGE[:TAG][@DIGEST]; Docker's own REGISTRY/IMAGE is understood too.

    Raises:
        ImageError: it is none of that.
    """
    match = re.match(
        r"^(?:docker://)?(?:(?P<user>[^@#/]+)@(?!sha256:))?(?:(?P<registry>[^@#/]+)#)?(?P<name>[a-z0-9._/-]+?(?::\d+/[a-z0-9._/-]+?)?)"
        r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]*))?(?:[@:](?P<digest>sha256:[0-9a-f]{64}))?$",
        text,
    )
    if match is None:
        form = "[USER@][REGISTRY#]IMAGE[:TAG], such as nvcr.io#nvidia/pytorch:25.06-py3, or the path of a squashfs file"
        raise ImageError(f"image {text!r}: expected {form}")
    registry, name = match.group("registry"), match.group("name")
    first, slash, rest = name.partition("/")
    if registry is None and slash and ("." in first or ":" in first or first == "localhost"):
        registry, name = first, rest
    return Reference(match.group("user"), registry, name, match.group("tag"), match.group("digest"))


def is_path(reference: str) -> bool:
    """Whether this names a file, as pyxis sees it."""
    return reference.startswith(("/", "./", "../", "~"))
