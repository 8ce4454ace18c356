"""What the server refuses or cannot do, in the format of OpenAI's errors."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse


class ApiError(Exception):
    """An error that the client is told, with an HTTP status."""

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
        param: of the request's body, that is wrong.
        code: one word for programs.
        """
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def unsupported(name: str, why: str = "is not supported here; leave it out") -> ApiError:
    """What a request asks for and no server of ours does: refused, where ignoring it would change the answer."""
    return ApiError(400, f"{name} {why}", param=name, code="unsupported_parameter")


def internal_error() -> ApiError:
    """What nobody has foreseen; the log has it."""
    return ApiError(500, "the server has failed; its log says how", code="internal_error")


def invalid(error: ValidationError, names: dict[str, str] | None = None) -> ApiError:
    """What pydantic finds wrong with a body, where it looked deepest: of what may be of several kinds the others are
    wrong from the outset.

    names: of the fields, by the client's, where they differ.
    """
    found = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
    path = [part for part in found["loc"] if not (isinstance(part, str) and not part.isidentifier())]
    if found["type"] == "string_type" and path[-1:] == ["str"]:
        path.pop()  # one of several kinds
    where = ".".join(map(str, path))
    for ours, theirs in (names or {}).items():
        where = where.replace(ours, theirs, 1) if where.startswith(ours) else where
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return unsupported(where, "is no parameter of this server; leave it out")
    return ApiError(400, f"{where}: {message}" if where else message, param=where or None, code="invalid_value")


def context_exceeded(prompt: int, answer: int, limit: int, param: str) -> ApiError:
    """A request that can never fit. prompt, answer, limit: tokens."""
    return ApiError(
        400,
        f"the context is {limit} tokens long, and {prompt} of the prompt and {answer} of the answer were asked for: "
        "shorten the prompt or max_tokens",
        param=param,
        code="context_length_exceeded",
    )
