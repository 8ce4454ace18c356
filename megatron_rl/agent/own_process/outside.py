"""Exceptions whose cause is outside a function: a network, a server or a limit of time."""

from __future__ import annotations

INSIDE = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that a repetition does not heal."""
CLIENTS = frozenset({"aiohttp", "anthropic", "grpc", "httpcore", "httpx", "litellm", "openai", "websockets"})
"""Packages that speak to servers and whose exceptions are not of the operating system's kind, as those of requests and
urllib are."""


def is_outside(error: BaseException) -> bool:
    """Whether an exception says that a server, a network or a limit of time failed, not the code that raised it."""
    if isinstance(error, OSError):
        return not isinstance(error, INSIDE)
    return any(kind.__module__.partition(".")[0] in CLIENTS for kind in type(error).__mro__)
