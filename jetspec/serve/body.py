"""The body of a request as JSON, read within bounds: whatever a client sends, others are not kept waiting."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from jetspec.serve.errors import MAX_QUOTE, ApiError

MAX_FIELDS = 1 << 15
"""Fields of all objects of a request together, an empty one counting as one: each costs microseconds to check."""


class JsonRoute(APIRoute):
    """A route that reads its body with `parse`, and says what is wrong with it in our words."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            if self.body_field is not None:
                request = JsonRequest(request.scope, request.receive)
                await request.json()
            return await handle(request)

        return handle_parsed


class JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            check_type(self.headers.get("content-type", ""), self.headers.get("content-encoding", "identity"))
            self._json = parse(await self.body())
        return self._json


def check_type(content_type: str, encoding: str) -> None:
    """Pages of other sites can send forms and plain text without asking; JSON they cannot."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_maintype() != "application" or header.get_content_subtype().split("+")[-1] != "json":
        raise ApiError("Content-Type must be application/json")
    if (header.get_content_charset() or "utf-8") not in ("utf-8", "utf8"):
        raise ApiError("the body must be in UTF-8, and its Content-Type may name no other charset", status=415)
    if encoding.lower() != "identity":
        raise ApiError("the body must come as it is; Content-Encoding is not supported", status=415)


def parse(body: bytes) -> Any:
    """The value that a body stands for."""
    num_fields = 0

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_fields
        num_fields += len(pairs) or 1
        if num_fields > MAX_FIELDS:
            raise ApiError(f"the request has more than {MAX_FIELDS} fields")
        made = dict(pairs)
        if len(made) < len(pairs):
            refuse_twice([name for name, _ in pairs])
        return made

    try:
        with without_collection():
            return json.loads(body.decode(), object_pairs_hook=make, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON, at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError:  # more digits than Python reads
        raise ApiError("a number in the body is too long") from None


@contextmanager
def without_collection() -> Iterator[None]:
    """A body of a million lists has no cycles, but looking for them again and again takes ten times its reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refuse_constant(name: str) -> NoReturn:
    raise ApiError(f"the body is not valid JSON: {name} is no number of JSON")


def refuse_twice(names: list[str]) -> NoReturn:
    seen: set[str] = set()
    twice = next(name for name in names if name in seen or seen.add(name))[:MAX_QUOTE]  # type: ignore[func-returns-value]
    raise ApiError(f"{twice} is given twice", param=twice)
