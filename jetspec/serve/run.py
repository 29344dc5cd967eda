"""The server process: its socket, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from functools import partial
from types import FrameType

import uvicorn

from jetspec.serve.app import Server
from jetspec.serve.config import ServeConfig
from jetspec.serve.connection import Connection, connections_of, max_connections
from jetspec.serve.errors import shutting_down
from jetspec.serve.log import set_up_log
from jetspec.serve.middleware import MAX_HEADERS
from jetspec.types import SamplingParams

LAST_READ_S = 3.0
"""Time for clients to read the end of their responses once the engine is done."""
ACCEPT_BATCH = 16
"""Connections accepted before the first of them is served; each is an open file."""
BACKLOG = 1024
"""Connections that the system queues until they are accepted."""


def open_socket(config: ServeConfig) -> socket.socket:
    """Bind the port.

    The protocol is named because asyncio sets TCP_NODELAY only then. Without it the second part of a response waits
    some 40 ms for the acknowledgement of the first.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    return listener


def listen(listener: socket.socket, config: ServeConfig) -> None:
    """Accept connections. It fails if another program has bound the same port and listens already."""
    try:
        listener.listen()
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _cannot_listen(config: ServeConfig, error: OSError) -> ValueError:
    fix = "; --port 0 takes any free one" if error.errno == errno.EADDRINUSE else ""
    return ValueError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}{fix}")


class HttpServer(uvicorn.Server):
    """uvicorn with a graceful shutdown: completions have `drain_s` to finish, then clients get an error."""

    def __init__(self, server: Server) -> None:
        self.worker, self.drain_s = server.worker, server.config.drain_s
        self.num_signals = 0
        super().__init__(
            uvicorn.Config(
                server.app(),
                http=partial(Connection, server.config, max_connections(server.config)),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                backlog=ACCEPT_BATCH,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(self.drain_s + LAST_READ_S),
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio uses one number for the backlog and for what it accepts at once

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        for connection in connections_of(self.server_state):
            connection.check_timeouts(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.is_stopping = True
        deadline = self.loop.call_later(self.drain_s, self.abort_all)
        await super().shutdown(sockets)
        deadline.cancel()

    def abort_all(self) -> None:
        """End every request with an error."""
        self.worker.is_stopping = True
        self.worker.abort_all(shutting_down())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown, the second aborts all requests, the third exits at once.

        Unlike uvicorn's method, it does not have the signal raised again after the shutdown: the exit status is 0.
        """
        self.num_signals += 1
        self.should_exit, self.force_exit = True, self.num_signals > 2
        if self.num_signals == 2:
            self.loop.call_soon_threadsafe(self.abort_all)


def serve(server: Server, listener: socket.socket) -> None:
    """Serve requests until a signal. A warm-up request first spares clients the cold start."""
    set_up_log()
    llm = server.llm
    llm.generate([llm.tokenizer.encode("Hello")], SamplingParams(max_tokens=2))
    HttpServer(server).run(sockets=[listener])
