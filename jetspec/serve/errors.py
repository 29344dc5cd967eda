"""What clients are told when something is wrong: the cause and the fix, and nothing of the inside."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jetspec.serve.log import facts

MAX_QUOTE = 200
"""Characters of what a client wrote that an error repeats."""
FIELD = re.compile(r"(?!str$|list$|literal)[a-z0-9_]+")
"""A part of an error's place that names a field or an entry, and not one of the forms that it may have."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered, with the HTTP status that says so."""

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
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        # All ASCII: a message may quote what no encoding can write.
        return Response(json.dumps(self.body()), self.status, headers, "application/json")


def refuse(why: ApiError) -> Response:
    """Tell the client, and the log."""
    note(why)
    return why.response()


def note(why: ApiError) -> None:
    facts.get().update({name: value for name in ("code", "param") if (value := getattr(why, name))})


def failed() -> ApiError:
    """The engine broke down. What happened is in the server's log."""
    return ApiError("the engine has failed; the server needs a restart", status=500, code="engine_failed")


def broken() -> ApiError:
    """A mistake of ours."""
    return ApiError("something went wrong inside the server", status=500, code="internal_error")


def gone() -> ApiError:
    """For the log: the client is not there to read it."""
    return ApiError("the client went away", status=499, code="client_gone")


def unread() -> ApiError:
    return ApiError("the answer was read too slowly to be kept", status=503, code="read_too_slowly")


def stopping() -> ApiError:
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after=30)


def add_handlers(app: FastAPI) -> None:
    """Whatever goes wrong in a route is told in the same form."""
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_invalid)
    app.add_exception_handler(HTTPException, _refuse_http)
    app.add_exception_handler(Exception, _refuse_failure)


async def _refuse(request: Request, why: Exception) -> Response:
    assert isinstance(why, ApiError)
    return refuse(why)


async def _refuse_invalid(request: Request, error: Exception) -> Response:
    """One thing that is wrong, and where: of the forms that a field may have, the one that came closest."""
    assert isinstance(error, RequestValidationError)
    first = max(reversed(error.errors()), key=lambda found: len(found["loc"]))
    *place, last = [str(part) for part in first["loc"] if part != "body"] or [""]
    if place[:1] == ["response_format"]:
        del place[1:2]  # the value of its `type`, which is no field
    fields = [part for part in place if FIELD.fullmatch(part)]
    if first["type"] == "extra_forbidden":
        where = ".".join([*fields, last])[:MAX_QUOTE]
        return refuse(ApiError(f"{where} is not supported", param=where, code="unsupported_parameter"))
    where = ".".join([*fields, *filter(FIELD.fullmatch, [last])])[:MAX_QUOTE]
    text = str(first["msg"])[:MAX_QUOTE].removeprefix("Value error, ")
    if first["type"] == "too_long":
        text = f"there may be at most {first['ctx']['max_length']}"
    return refuse(ApiError(f"{where}: {text}" if where else text, param=where or None))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = refuse(ApiError(str(error.detail), status=error.status_code))
    if methods := (error.headers or {}).get("Allow"):
        response.headers["Allow"] = "GET, HEAD" if methods == "GET" else methods
    return response


async def _refuse_failure(request: Request, error: Exception) -> Response:
    return refuse(broken())
