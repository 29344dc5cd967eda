"""What clients are told when something is wrong: the cause and the fix, and nothing of the inside."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
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


def failed() -> Refused:
    """The engine broke down. What happened is in the server's log."""
    return Refused("the engine has failed; the server needs a restart", status=500, code="engine_failed")


def broken() -> Refused:
    """A mistake of ours."""
    return Refused("something went wrong inside the server", status=500, code="internal_error")


def gone() -> Refused:
    """For the log: the client is not there to read it."""
    return Refused("the client went away", status=499, code="client_gone")


def stopping() -> Refused:
    return Refused("the server is shutting down", status=503, code="shutting_down", retry_after=30)
