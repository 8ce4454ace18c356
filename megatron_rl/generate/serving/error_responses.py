"""Responses to errors of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron_rl.generate.serving.api_errors import ApiError, ClientGone, internal_error


def response_to(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response_to(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    return response_to(
        ApiError(error.status_code, f"{what}: {error.detail}", headers=dict(error.headers or {}), code="unknown_url")
    )


async def _leave(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fail(request: Request, error: Exception) -> Response:
    return response_to(internal_error())


ERROR_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _refuse,
    HTTPException: _refuse_route,
    ClientGone: _leave,
    Exception: _fail,
}
