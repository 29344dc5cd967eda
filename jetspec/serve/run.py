"""The server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from jetspec.engine.llm import LLM
from jetspec.serve.app import Server
from jetspec.serve.config import ServeConfig
from jetspec.serve.connection import Connection, most_connections
from jetspec.serve.errors import stopping
from jetspec.serve.guard import MAX_HEADERS
from jetspec.serve.log import set_up_log
from jetspec.types import SamplingParams

LAST_WORDS_S = 3.0
"""What clients have to read the end of their answers once the engine is done with them."""
AT_ONCE = 16
"""Connections that are taken before the first of them is looked at: each is an open file."""
BACKLOG = 1024
"""Connections that the system keeps until they are taken."""


def open_socket(config: ServeConfig) -> socket.socket:
    """Take the port.

    Only of a socket that says it is TCP does asyncio send every write at once. Otherwise the second part of an answer
    waits for the peer to acknowledge the first, which takes it some 40 ms.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise taken(config, error) from None
    return listener


def listen(listener: socket.socket, config: ServeConfig) -> None:
    """Take connections. Another program may have bound the same port and been faster."""
    try:
        listener.listen()
    except OSError as error:
        raise taken(config, error) from None


def taken(config: ServeConfig, error: OSError) -> ValueError:
    fix = "; --port 0 takes any free one" if error.errno == errno.EADDRINUSE else ""
    return ValueError(f"cannot listen on {config.host}, port {config.port}: {error.strerror}{fix}")


class Host(uvicorn.Server):
    """uvicorn with a graceful end: answers have `drain_s` to be finished, then their clients are told."""

    def __init__(self, server: Server) -> None:
        self.worker, self.drain_s = server.worker, server.config.drain_s
        self.num_signals = 0
        self.max_connections = most_connections(server.config)
        super().__init__(
            uvicorn.Config(
                server.app(),
                http=partial(Connection, server.config, self.max_connections),  # type: ignore[arg-type]  # only called
                ws="none",
                log_config=None,
                access_log=False,
                backlog=AT_ONCE,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(self.drain_s + LAST_WORDS_S),
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has one number for this and for what it takes at once

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.look(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.is_stopping = True
        deadline = self.loop.call_later(self.drain_s, self.give_up)
        await super().shutdown(sockets)
        deadline.cancel()

    def give_up(self) -> None:
        """Break off every answer; clients are told."""
        self.worker.is_stopping = True
        self.worker.refuse_all(stopping())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, the second breaks them off, a third waits for nobody."""
        self.num_signals += 1
        if self.num_signals == 2:
            self.loop.call_soon_threadsafe(self.give_up)
        else:
            super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal asks for a graceful end, and that is then the end: it is not raised again."""
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():  # only this one may listen to signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(llm: LLM, config: ServeConfig, listener: socket.socket) -> None:
    """Answer requests until told to stop. A first answer goes to nobody, so that no client waits for a cold start."""
    set_up_log()
    llm.generate([llm.tokenizer.encode("Hello")], SamplingParams(max_tokens=2))
    Host(Server(llm, config)).run(sockets=[listener])
