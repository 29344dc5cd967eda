"""The server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import resource
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
MAX_WAITING = 256 << 20
"""Bytes of answers that wait for their clients, of all together. Beyond, the client that most waits for is cut off."""
AT_ONCE = 32
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


def most_connections(config: ServeConfig) -> int:
    """Twice the requests that are let in, so that there is room to refuse some; half of the files that may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * config.max_requests
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)


class Connection(H11Protocol):
    """uvicorn's, which by itself waits for ever: for the head of a request, and for a client to read its answer."""

    def __init__(self, limits: ServeConfig, most: int, **given: Any) -> None:
        super().__init__(**given)
        self.limits, self.most = limits, most
        self._deadline: asyncio.TimerHandle | None = None
        self._untaken, self._moved_s = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits for this client than is sent ahead. All that waits is in memory."""
        super().pause_writing()
        waiting = {other: other.transport.get_write_buffer_size() for other in self._all()}
        if sum(waiting.values()) > MAX_WAITING:
            max(waiting, key=lambda other: waiting[other]).cut_off()

    def look(self, now: float) -> None:
        """Cut off a client that has taken nothing for too long.

        While writing pauses and after the end of an answer nothing is added, so whatever changes was taken.
        """
        is_waiting = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        untaken = num_untaken(self.transport) if is_waiting else 0
        if untaken == 0 or untaken != self._untaken:
            self._untaken, self._moved_s = untaken, now
        elif now - self._moved_s > self.limits.write_timeout_s:
            self.cut_off()

    def cut_off(self) -> None:
        """Forget what waits for this client; the system, too, is to forget what it has."""
        if self.scope is not None:
            self.scope["state"]["cut_off"] = True
        at_once = struct.pack("ii", 1, 0)
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _all(self) -> list[Connection]:
        return [other for other in self.connections if isinstance(other, Connection)]

    def _make_room(self) -> None:
        """Of the connections that wait for a request, the one that has waited longest goes; if there is none, this."""
        waiting = [other for other in self._all() if other._deadline is not None and not other.transport.is_closing()]
        min(waiting, key=lambda other: other._deadline.when() if other._deadline else 0).transport.abort()

    def _watch(self) -> None:
        """Between requests time runs, and single bytes do not stop it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.read_timeout_s, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def num_untaken(transport: asyncio.Transport) -> int:
    """Bytes that were written and that the other side has not acknowledged, in our buffer and the system's."""
    size, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        size += struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    return size


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
