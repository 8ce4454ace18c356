"""Responses to errors of a route, in the format of OpenAI's errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megatron_rl.server.errors import ApiError, internal_error
from megatron_rl.server.event_stream import ClientGone


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    return ApiError(
        error.status_code, f"{what}: {error.detail}", headers=dict(error.headers or {}), code="unknown_url"
    ).response()


async def _leave(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fail(request: Request, error: Exception) -> Response:
    return internal_error().response()


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _refuse,
    HTTPException: _refuse_route,
    ClientGone: _leave,
    Exception: _fail,
}
"""Handlers for Starlette, by the class of the error."""
