"""What every request passes before a route sees it: a name, a key, and limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import ApiError, broken, gone, refuse
from jetspec.serve.log import facts

OPEN_PATHS = ("/", "/health")
OPEN_FOLDER = "/static/"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_HEADERS = 32 << 10
GIVEN_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)

log = logging.getLogger("jetspec.serve")


def shared(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application whose answers pages of these origins may read."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients in browsers send headers of their own; the origin is what counts
        expose_headers=["Retry-After", "X-Request-Id"],
    )


class Guard:
    """Wraps the application. It never looks into a body; it only counts its bytes."""

    def __init__(self, app: Starlette, config: ServeConfig, answered: Callable[[str, int, float], None]) -> None:
        self.app, self.config, self.answered = shared(app, config.origins), config, answered
        self.routes = app.routes
        self.digests = [_digest(key) for key in config.keys]
        self.names = (*LOCAL_NAMES, _host_name(config.shown_host))
        self.num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # who sends the answer leaves its body out
            scope = {**scope, "method": "GET"}
        visit = Visit(scope, method, send)
        token = facts.set(visit.facts)
        try:
            self._check(scope, visit)
            self.num_inside += 1
            try:
                body = await self._body(scope, receive)
                visit.is_read = True
                await self.app(scope, body, visit.send)
            finally:
                self.num_inside -= 1
        except ApiError as why:
            await self._refuse(why, scope, receive, visit.send)
        except Exception as error:
            log.error("a handler failed", exc_info=error, extra={"facts": {"id": visit.id}})
            if not visit.status:
                await self._refuse(broken(), scope, receive, visit.send)
        finally:
            facts.reset(token)
            visit.report(self._route(scope), self.answered)

    def _route(self, scope: Scope) -> str:
        """Only known routes are named: what a client makes up must not fill the metrics."""
        found = scope.get("route") or next((r for r in self.routes if r.matches(scope)[0] is not Match.NONE), None)
        return getattr(found, "path", "other")

    async def _refuse(self, why: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Pages that may ask may also read why they are refused."""
        await shared(refuse(why), self.config.origins)(scope, receive, send)

    def _check(self, scope: Scope, visit: Visit) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # Two that read the same bytes could see different requests in them.
            raise ApiError("a request has either Content-Length or Transfer-Encoding")
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            raise ApiError(f"the headers have more than {MAX_HEADERS} bytes")
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER)
        if self.digests:
            if not (is_open or self._asks_permission(scope, headers)):
                visit.facts["tenant"] = self._tenant(headers.get("authorization", ""))
        elif self.config.is_local and _host_name(headers.get("host", "localhost")) not in self.names:
            # A web page can point a name of its own at this machine, and then ask in the name of who looks at it.
            # Browsers always say the name; HTTP/1.0 need not.
            raise ApiError("without API keys, this server answers to localhost only")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise ApiError("nothing can be expected but 100-continue", status=417)
        if self.num_inside >= self.config.max_requests and not is_open:
            raise ApiError("too many requests at a time", status=429, code="too_many_requests", retry_after=1)

    def _asks_permission(self, scope: Scope, headers: Headers) -> bool:
        """Whether a browser only asks what a page may do. It sends no key then, and no route is reached."""
        asks = "origin" in headers and "access-control-request-method" in headers
        return bool(self.config.origins) and scope["method"] == "OPTIONS" and asks

    def _tenant(self, authorization: str) -> str:
        """Who asks: the number of the key, because logs name it, and of a key they must not hold even a hash.

        Every key is compared, in constant time, so that time tells nothing about any of them.
        """
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), 0
        for number, digest in enumerate(self.digests, 1):
            if hmac.compare_digest(given, digest):
                found = number
        if not found or scheme.lower() != "bearer":
            raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return f"key {found}"

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body, within bytes and time; the routes get it in one piece."""
        most = self.config.max_body
        too_large = ApiError(f"the request is larger than {most} bytes", status=413, code="request_too_large")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > most:
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self.config.read_timeout_s):
                while more:
                    message = await receive()
                    if scope.get("state", {}).get("badly_framed"):  # says the connection
                        raise ApiError("the body comes in too many small chunks; send larger ones, or its length")
                    if message["type"] == "http.disconnect":
                        raise gone()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError("the request did not arrive in time", status=408, code="request_timeout") from None
        first: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal first
            message, first = first, None
            return message or await receive()

        return replay


class Visit:
    """One request on its way: its id, how it was answered, and when."""

    def __init__(self, scope: Scope, method: str, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self.id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        self.facts: dict[str, Any] = {"id": self.id, "method": method}
        self.scope, self._send = scope, send
        self.began = time.perf_counter()
        self.status = 0
        self.is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.id
            headers["X-Content-Type-Options"] = "nosniff"
            if not self.is_read:  # the rest of the body would have to be read to find the next request
                headers["Connection"] = "close"
        await self._send(message)

    def report(self, route: str, answered: Callable[[str, int, float], None]) -> None:
        if self.scope.get("state", {}).get("cut_off"):  # by the connection
            self.facts["cut_off"] = True
        seconds = time.perf_counter() - self.began
        answered(route, self.status, seconds)
        log.info("request", extra={"facts": self.facts | {"route": route, "status": self.status, "s": seconds}})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _host_name(host: str) -> str:
    return re.sub(r":\d+$", "", host).lower()
