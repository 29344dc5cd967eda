"""The server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jetspec.engine.llm import LLM
from jetspec.serve.app import Server
from jetspec.serve.config import ServeConfig
from jetspec.serve.errors import stopping
from jetspec.serve.guard import MAX_HEADERS
from jetspec.serve.log import set_up_log
from jetspec.types import SamplingParams

LAST_WORDS_S = 3.0
"""What clients have to read the end of their answers once the engine is done with them."""


def open_socket(config: ServeConfig) -> socket.socket:
    """Take the port. Where the system can, a connection whose peer takes no bytes is dropped by it after a while.

    Only of a socket that says it is TCP does asyncio send every write at once. Otherwise the second part of an answer
    waits for the peer to acknowledge the first, which takes it some 40 ms.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.write_timeout_s * 1000))
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


class Connection(H11Protocol):
    """uvicorn's, which by itself waits for ever for the head of a request."""

    def __init__(self, patience_s: float, **given: Any) -> None:
        super().__init__(**given)
        self.patience_s = patience_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Between requests time runs, and single bytes do not stop it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.patience_s, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Host(uvicorn.Server):
    """uvicorn with a graceful end: answers have `drain_s` to be finished, then their clients are told."""

    def __init__(self, server: Server) -> None:
        self.worker, self.drain_s = server.worker, server.config.drain_s
        self.num_signals = 0
        super().__init__(
            uvicorn.Config(
                server.app(),
                http=partial(Connection, server.config.read_timeout_s),  # type: ignore[arg-type]  # it is only called
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(self.drain_s + LAST_WORDS_S),
                h11_max_incomplete_event_size=MAX_HEADERS,
            )
        )

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
