"""One connection of a client: when it has waited, or is waited for, too long, and when there are too many."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from jetspec.serve.config import ServeConfig

MAX_WAITING = 256 << 20
"""Bytes of answers that wait for their clients, of all together. Beyond, the client that most waits for is cut off."""


def most_connections(config: ServeConfig) -> int:
    """Twice the requests that are let in, so that there is room to refuse some; half of the files that may be open."""
    most = 2 * config.max_requests
    try:
        import resource
    except ImportError:  # a system without such limits
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
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
        untaken = num_untaken(self.transport) if self.flow.write_paused or self.is_idle else 0
        if untaken == 0 or untaken != self._untaken:
            self._untaken, self._moved_s = untaken, now
        elif now - self._moved_s > self.limits.write_timeout_s:
            self.cut_off()

    def cut_off(self) -> None:
        """Forget what waits for this client; the system, too, is to forget what it has."""
        if self.scope is not None:
            self.scope["state"]["cut_off"] = True
        with suppress(OSError):
            at_once = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self.transport.abort()

    def _all(self) -> list[Connection]:
        return [other for other in self.connections if isinstance(other, Connection)]

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        """Of the others without a request, the one that has waited longest for its first goes; if there is none, this.

        So whoever asks at once is answered, however many connections somebody else opens.
        """
        others = [other for other in self._all() if other.is_idle and other is not self]
        others = [other for other in others if not other.transport.is_closing()]
        (min(others, key=lambda other: other._gives_up_s) if others else self).transport.abort()

    @property
    def _gives_up_s(self) -> float:
        return self._deadline.when() if self._deadline else math.inf

    def _watch(self) -> None:
        """Between requests time runs, and single bytes do not stop it."""
        if not self.is_idle:
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
    try:
        import fcntl
        import termios

        (kept,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (ImportError, OSError):  # a system that does not tell
        return size
    return size + int(kept)
