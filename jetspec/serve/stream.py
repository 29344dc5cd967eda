"""Answers that are sent while they grow, and clients that leave before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jetspec.serve.worker import RequestHandle


class EventStream(Response):
    """Server-sent events as they come. A client that goes away, or is cut off, gives its ticket back at once."""

    def __init__(self, events: AsyncGenerator[bytes], handle: RequestHandle, close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self.events, self.handle, self.close = events, handle, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.events) as events, watched(receive, self.handle):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.close()


@asynccontextmanager
async def watched(receive: Receive, handle: RequestHandle) -> AsyncIterator[None]:
    """Give the ticket back as soon as the client is gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        handle.give_back()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
