"""API errors in OpenAI's format. Messages name the cause and the fix, and nothing of the server's internals."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jetspec.serve.log import request_fields

MAX_QUOTE = 200
"""Characters of a client's text that an error quotes."""
FIELD = re.compile(r"(?!str$|list$|literal)[a-z0-9_]+")
"""Parts of a validation error's location that are field names or indices, not alternatives of a union."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refused or failed request: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the HTTP response, and adds the error to the request's log line."""
        self.log()
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        # ASCII only: a message may quote a lone surrogate, which has no encoding.
        return Response(json.dumps(self.body()), self.status, headers, "application/json")

    def log(self) -> None:
        request_fields.get().update({name: value for name in ("code", "param") if (value := getattr(self, name))})


engine_failed = partial(ApiError, "the engine has failed; restart the server", status=500, code="engine_failed")
internal_error = partial(ApiError, "internal server error", status=500, code="internal_error")
client_disconnected = partial(ApiError, "the client disconnected", status=499, code="client_gone")  # for the log only
read_too_slowly = partial(ApiError, "the response was read too slowly", status=503, code="read_too_slowly")
shutting_down = partial(ApiError, "the server shuts down", status=503, code="shutting_down", retry_after=30)


def add_handlers(app: FastAPI) -> None:
    """Give the errors of all routes the same format."""
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return _validation_error(error).response()
    if isinstance(error, HTTPException):
        response = ApiError(str(error.detail), status=error.status_code).response()
        if methods := (error.headers or {}).get("Allow"):
            response.headers["Allow"] = "GET, HEAD" if methods == "GET" else methods
        return response
    return (error if isinstance(error, ApiError) else internal_error()).response()


def _validation_error(error: RequestValidationError) -> ApiError:
    """Reports one validation error: of a union, that of the alternative that matched furthest."""
    first = max(reversed(error.errors()), key=lambda found: len(found["loc"]))
    *place, last = [str(part) for part in first["loc"] if part != "body"] or [""]
    if place[:1] == ["response_format"]:
        del place[1:2]  # the value of its `type`, not a field
    fields = [part for part in place if FIELD.fullmatch(part)]
    if first["type"] == "extra_forbidden":
        where = ".".join([*fields, last])[:MAX_QUOTE]
        return ApiError(f"{where} is not supported", param=where, code="unsupported_parameter")
    where = ".".join([*fields, *filter(FIELD.fullmatch, [last])])[:MAX_QUOTE]
    text = str(first["msg"])[:MAX_QUOTE].removeprefix("Value error, ")
    if first["type"] == "too_long":
        text = f"there may be at most {first['ctx']['max_length']}"
    return ApiError(f"{where}: {text}" if where else text, param=where or None)
