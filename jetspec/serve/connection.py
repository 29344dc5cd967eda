"""One client connection: timeouts, memory limits and eviction, on top of uvicorn's HTTP/1.1 protocol."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jetspec.serve.config import ServeConfig

MAX_UNSENT = 256 << 20
"""Bytes of responses that wait for their clients, over all connections. Beyond it the largest is dropped."""
PIECE = 8 << 10
"""Bytes parsed before the limits are checked again. The event loop is blocked meanwhile."""
SPARE_FRAMING, PER_FRAMING = 16 << 10, 64
"""Chunk framing allowed per body: a constant number of bytes, and one more per this many bytes of payload."""
LINGER_S = 2.0
"""Time for which a client that is still sending can read its error response."""


def max_connections(config: ServeConfig) -> int:
    """Twice the request limit, so that requests beyond it get a response; at most half of the file descriptors."""
    limit = 2 * config.max_requests
    try:
        import resource
    except ImportError:  # not a POSIX system
        return limit
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if files == resource.RLIM_INFINITY else min(limit, files // 2)


class DelegatedClose:
    """A transport with another `close`. uvicorn closes as soon as it has written."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's protocol with the timeouts it lacks: for the head of a request, and for a client to read a response.

    uvicorn also stops reading from a client that pipelines requests, and so misses its disconnect. Here reading goes
    on: pipelined bytes are buffered, up to the size limit of a request.
    """

    def __init__(self, limits: ServeConfig, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self.limits, self.max_connections = limits, max_connections
        self._deadline: asyncio.TimerHandle | None = None
        self._unacked, self._progress_s = 0, 0.0
        self._pipelined = bytearray()
        """Received bytes behind the request that is being answered."""
        self._framing, self._payload = 0, 0
        """Bytes of chunk framing and of payload in the current body."""
        self._discards_input, self._is_lingering = False, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(cast(asyncio.Transport, DelegatedClose(transport, self._close)))
        self._update_deadline()
        if len(self.connections) > self.max_connections:
            self._evict_idle()

    def data_received(self, data: bytes) -> None:
        if not self._discards_input:
            self._pipelined += data
            self._parse()
            if len(self._pipelined) > self.limits.max_body:
                self.cut_off()
        self._update_deadline()

    def handle_events(self) -> None:
        super().handle_events()
        if self._awaits_response:
            self.flow.resume_reading()  # a disconnect is only noticed by reading

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._framing = self._payload = 0
        self._parse()

    @property
    def _awaits_response(self) -> bool:
        """The request is complete and its response is not."""
        return not self.is_idle and not self.cycle.more_body

    def _parse(self) -> None:
        """Parse received bytes up to the end of a request without a complete response."""
        while self._pipelined and not (self._discards_input or self._awaits_response or self._socket.is_closing()):
            piece = bytes(self._pipelined[:PIECE])
            del self._pipelined[:PIECE]
            is_body = not self.is_idle
            before = len(self.cycle.body) if is_body else 0
            super().data_received(piece)
            if is_body:
                self._check_framing(len(piece), len(self.cycle.body) - before)
        if self._awaits_response and self.conn.their_state is h11.MUST_CLOSE:
            self._pipelined.clear()  # the client has declared this its last request

    def _check_framing(self, size: int, payload: int) -> None:
        """Refuse a body in many small chunks: parsing one takes as long as thousands of bytes of a large chunk."""
        self._payload += payload
        self._framing += size - payload
        if self._framing > SPARE_FRAMING + self._payload // PER_FRAMING and self.cycle.more_body:
            self._discards_input = True
            self._pipelined.clear()
            self.scope["state"]["badly_framed"] = True
            self.cycle.message_event.set()

    def _close(self) -> None:
        """Close. In the middle of a body first stop writing only: a reset would discard the unread response."""
        is_unread = self.cycle is not None and self.cycle.more_body
        if not is_unread or self._is_lingering or self._socket.is_closing():
            self._socket.close()
            return
        self._discards_input = self._is_lingering = True
        self._pipelined.clear()
        self.flow.resume_reading()
        self._socket.write_eof()
        self.loop.call_later(LINGER_S, self._socket.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: the server may ignore an offered upgrade."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when this client's write buffer is full. All unsent bytes are in memory."""
        super().pause_writing()
        unsent = {other: other.transport.get_write_buffer_size() for other in self._all()}
        if sum(unsent.values()) > MAX_UNSENT:
            max(unsent, key=lambda other: unsent[other]).cut_off()

    def check_write_timeout(self, now: float) -> None:
        """Disconnect a client that has read nothing for too long.

        Nothing is added while writing pauses or after the end of a response, so any change is progress of the client.
        """
        unacked = num_unacked(self.transport) if self.flow.write_paused or self.is_idle else 0
        if unacked == 0 or unacked != self._unacked:
            self._unacked, self._progress_s = unacked, now
        elif now - self._progress_s > self.limits.write_timeout_s:
            self.cut_off()

    def cut_off(self) -> None:
        """Disconnect at once; unsent bytes are dropped, those in the system's buffer too."""
        if self.scope is not None:
            self.scope["state"]["cut_off"] = True
        with suppress(OSError):
            no_linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self.transport.abort()

    def _all(self) -> list[Connection]:
        return [other for other in self.connections if isinstance(other, Connection)]

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _evict_idle(self) -> None:
        """Close the connection that has been idle longest, or this one if no other is idle.

        A client that sends its request at once is served however many connections another one opens.
        """
        idle = [other for other in self._all() if other.is_idle and other is not self]
        idle = [other for other in idle if not other.transport.is_closing()]
        (min(idle, key=lambda other: other._deadline_s) if idle else self).transport.abort()

    @property
    def _deadline_s(self) -> float:
        return self._deadline.when() if self._deadline else math.inf

    def _update_deadline(self) -> None:
        """The read timeout runs between requests; single bytes do not restart it."""
        if not self.is_idle:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.read_timeout_s, self.transport.close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def num_unacked(transport: asyncio.Transport) -> int:
    """Bytes written that the client has not acknowledged, in the transport's buffer and the system's."""
    size, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    try:
        import fcntl
        import termios

        (kept,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (ImportError, OSError):  # the system does not report it
        return size
    return size + int(kept)
