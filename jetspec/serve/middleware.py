"""ASGI middleware for every request (request id, API key, limits, log line), and JSON bodies parsed within bounds."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from email.message import Message as Header
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetspec.gc_control import pause_collection
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import MAX_QUOTE, ApiError, client_disconnected, internal_error
from jetspec.serve.log import log, request_fields

OPEN_PATHS = ("/", "/health")
OPEN_FOLDER = "/static/"
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_HEADERS = 32 << 10
LINGER_S = 2.0
"""Time for which a client that is still sending can read its error response."""
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
MAX_FIELDS = 1 << 15
"""Fields of all objects in a body together; an empty object counts as one. Validating each takes microseconds."""


class Middleware:
    """Wraps the application. It counts the bytes of a body and does not parse it.

    `on_response(route, status, seconds)` is called once per request.
    """

    def __init__(self, app: Starlette, config: ServeConfig, on_response: Callable[[str, int, float], None]) -> None:
        self.app, self.config, self.on_response = app, config, on_response
        self.routes = app.routes
        self.digests = [_digest(key) for key in config.keys]
        self.names = (*LOCAL_NAMES, _host_name(config.shown_host))
        self.num_active = 0
        self.checked: ASGIApp = self._run_checked
        if config.origins:  # pages of these can read errors, too; a preflight request carries no key
            self.checked = CORSMiddleware(
                self._run_checked,
                allow_origins=config.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # client libraries send headers of their own; the origin decides
                expose_headers=["Retry-After", "X-Request-Id"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, send)
        if scope["method"] == "HEAD":  # h11 leaves the body out of the response
            scope = {**scope, "method": "GET"}
        scope = {**scope, "exchange": exchange}
        token = request_fields.set(exchange.fields)
        try:
            await self.checked(scope, receive, exchange.send)
        finally:
            request_fields.reset(token)
            exchange.finish(self._route(scope), self.on_response)
        if not exchange.is_read:
            await exchange.discard_body(receive)

    async def _run_checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        try:
            self._check(scope)
            self.num_active += 1
            try:
                body = await self._read_body(scope, receive)
                exchange.is_read = True
                await self.app(scope, body, send)
            finally:
                self.num_active -= 1
        except ApiError as error:
            await error.response()(scope, receive, send)
        except Exception as error:
            log.error("a handler failed", exc_info=error, extra={"fields": {"id": exchange.id}})
            if not exchange.status:
                await internal_error().response()(scope, receive, send)

    def _route(self, scope: Scope) -> str:
        """Returns the path of a known route, else "other": clients must not add labels to the metrics."""
        found = scope.get("route") or next((r for r in self.routes if r.matches(scope)[0] is not Match.NONE), None)
        return getattr(found, "path", "other")

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy and this server could see different requests in the same bytes.
            raise ApiError("a request has either Content-Length or Transfer-Encoding")
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            raise ApiError(f"the headers have more than {MAX_HEADERS} bytes")
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER)
        if self.digests:
            if not is_open:
                request_fields.get()["tenant"] = self._tenant(headers.get("authorization", ""))
        elif self.config.is_local and _host_name(headers.get("host", "localhost")) not in self.names:
            # DNS rebinding: a web page can point a name of its own at this machine and then call the API from its
            # visitor's browser. Browsers always send the name; HTTP/1.0 need not.
            raise ApiError("without API keys the server accepts local host names only")
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise ApiError("Expect may only be 100-continue", status=417)
        if self.num_active >= self.config.max_requests and not is_open:
            raise ApiError("too many requests at a time", status=429, code="too_many_requests", retry_after=1)

    def _tenant(self, authorization: str) -> str:
        """Returns the number of the request's key; the log must not hold even a hash of a key.

        Every key is compared, in constant time, so timing reveals nothing about any of them.
        """
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), 0
        for number, digest in enumerate(self.digests, 1):
            if hmac.compare_digest(given, digest):
                found = number
        if not found or scheme.lower() != "bearer":
            raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        return f"key {found}"

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the whole body, limited in bytes and time; routes receive it in one piece."""
        limit = self.config.max_body
        too_large = ApiError(f"the request is larger than {limit} bytes", status=413, code="request_too_large")
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > limit:
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self.config.read_timeout_s):
                while more:
                    message = await receive()
                    if scope.get("state", {}).get("badly_framed"):  # set by the connection
                        raise ApiError("the body comes in too many small chunks; send larger ones, or Content-Length")
                    if message["type"] == "http.disconnect":
                        raise client_disconnected()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError("the request did not arrive in time", status=408, code="request_timeout") from None
        first: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal first
            message, first = first, None
            return message or await receive()

        return replay


class Exchange:
    """One request and its response: request id, status, duration, fields of the log line."""

    def __init__(self, scope: Scope, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.fields: dict[str, Any] = {"id": self.id, "method": scope["method"]}
        self.scope, self._send = scope, send
        self.start_s = time.perf_counter()
        self.status = 0
        self.is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.id
            headers["X-Content-Type-Options"] = "nosniff"
            if not self.is_read:  # the next request starts behind the unread rest of the body
                headers["Connection"] = "close"
        elif not self.is_read:
            message = {**message, "more_body": True}
        await self._send(message)

    async def discard_body(self, receive: Receive) -> None:
        """Discard the rest of a body for a while, then end the response and with it the connection. To close at once
        would reset it, and the client, still sending, could not read the response."""
        self.scope.get("state", {})["is_refused"] = True  # read by the connection
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await self._send({"type": "http.response.body"})

    def finish(self, route: str, on_response: Callable[[str, int, float], None]) -> None:
        if self.scope.get("state", {}).get("cut_off"):  # set by the connection
            self.fields["cut_off"] = True
        seconds = time.perf_counter() - self.start_s
        on_response(route, self.status, seconds)
        log.info("request", extra={"fields": self.fields | {"route": route, "status": self.status, "s": seconds}})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _host_name(host: str) -> str:
    return re.sub(r":\d+$", "", host).lower()


class JsonRoute(APIRoute):
    """A route whose body is parsed by `parse_json`, with its error messages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            if self.body_field is not None:
                headers = request.headers
                _check_type(headers.get("content-type", ""), headers.get("content-encoding", "identity"))
                request._json = parse_json(await request.body())  # the value that `request.json()` returns
            return await handle(request)

        return handle_parsed


def _check_type(content_type: str, encoding: str) -> None:
    """Only JSON is accepted: a page of another site can send forms and plain text without a CORS preflight."""
    header = Header()
    header["content-type"] = content_type
    if header.get_content_maintype() != "application" or header.get_content_subtype().split("+")[-1] != "json":
        raise ApiError("Content-Type must be application/json")
    if (header.get_content_charset() or "utf-8") not in ("utf-8", "utf8"):
        raise ApiError("the body must be UTF-8, and Content-Type may name no other charset", status=415)
    if encoding.lower() != "identity":
        raise ApiError("the body must not be compressed; Content-Encoding is not supported", status=415)


def parse_json(body: bytes) -> Any:
    """Parses a body. Duplicate names, NaN and too many fields are refused."""
    num_fields = 0

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_fields
        num_fields += len(pairs) or 1
        if num_fields > MAX_FIELDS:
            raise ApiError(f"the request has more than {MAX_FIELDS} fields")
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise ApiError(f"{name[:MAX_QUOTE]} is given twice", param=name[:MAX_QUOTE])
            made[name] = value
        return made

    def refuse_constant(name: str) -> NoReturn:
        raise ApiError(f"the body is not valid JSON: {name} is not a JSON number")

    try:
        # A body of a million lists has no cycles, but collections during its parsing take ten times as long as that.
        with pause_collection():
            return json.loads(body.decode(), object_pairs_hook=make_object, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON, at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError:  # more digits than Python converts
        raise ApiError("a number in the body is too long") from None
