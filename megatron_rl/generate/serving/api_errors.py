"""Errors of the server, in the format of OpenAI's errors. Environments import them, also where the libraries of the
server are missing."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megatron_rl.model.chat.conversation import ConversationError

MOST_SAID = 500
"""Characters of an error about a text, since it may quote the text."""


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """
        param: the parameter of the request that is wrong.
        code: a word for programs.
        """
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ClientGone(Exception):
    """The client has disconnected: nobody waits for the answer."""


def unsupported(name: str, why: str = "is not supported here; leave it out") -> ApiError:
    """Refuse a parameter that this server does not support, since ignoring it would change the answer."""
    return ApiError(400, f"{name} {why}", param=name, code="unsupported_parameter")


def internal_error() -> ApiError:
    return ApiError(500, "the server has failed; its log says how", code="internal_error")


def invalid(error: ValidationError, names: dict[str, str] | None = None) -> ApiError:
    """Report the deepest error that pydantic finds in a body. If a value may have several types, errors of the types
    that do not fit at all are shallower.

    names: our field name -> the client's name, if they differ.
    """
    found = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    path = [part for part in found["loc"] if not (isinstance(part, str) and not part.isidentifier())]
    if found["type"] == "string_type" and path[-1:] == ["str"]:
        path.pop()  # the type, one of several
    where = ".".join(map(str, path))
    for ours, theirs in (names or {}).items():
        where = where.replace(ours, theirs, 1) if where.startswith(ours) else where
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return unsupported(where, "is not a parameter of this server; leave it out")
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None, code="invalid_value")


def invalid_conversation(error: ConversationError) -> ApiError:
    return ApiError(400, str(error)[:MOST_SAID], param=error.field, code="invalid_value")


def context_exceeded(prompt: int, answer: int, limit: int, param: str) -> ApiError:
    """A request that can never fit. prompt, answer, limit: numbers of tokens."""
    return ApiError(
        400,
        f"the context is {limit} tokens long, but the request needs {prompt} for the prompt and {answer} for the "
        "answer: shorten the prompt or max_tokens",
        param=param,
        code="context_length_exceeded",
    )
