"""One client connection: timeouts, memory limits and eviction, on top of uvicorn's HTTP/1.1 protocol."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jetspec.serve.config import ServeConfig

MAX_UNSENT = 256 << 20
"""Bytes of responses that wait for their clients, over all connections. Beyond it the largest is dropped."""
PIECE = 8 << 10
"""Bytes parsed before the limits are checked again. The event loop is blocked meanwhile."""
SPARE_FRAMING, PER_FRAMING = 16 << 10, 64
"""Chunk framing allowed per body: a constant number of bytes, and one more per this many bytes of payload."""


def max_connections(config: ServeConfig) -> int:
    """Twice the request limit, so that requests beyond it get a response; at most half of the file descriptors."""
    limit = 2 * config.max_requests
    try:
        import resource
    except ImportError:  # not a POSIX system
        return limit
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if files == resource.RLIM_INFINITY else min(limit, files // 2)


class Connection(H11Protocol):
    """uvicorn's protocol with the timeouts it lacks: for the head of a request, and for a client to read a response.

    uvicorn also stops reading from a client that pipelines requests, and so misses its disconnect. Here reading goes
    on: pipelined bytes are buffered, up to the size limit of a request.
    """

    def __init__(self, limits: ServeConfig, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self.limits, self.max_connections = limits, max_connections
        self._deadline_s = math.inf
        """End of the read timeout, which runs between requests."""
        self._unacked, self._progress_s = 0, 0.0
        self._pipelined = bytearray()
        """Received bytes behind the request that is being answered."""
        self._framing, self._payload = 0, 0
        """Bytes of chunk framing and of payload in the current body."""
        self._is_badly_framed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_deadline()
        if len(self.connections) > self.max_connections:
            self._evict_idle()

    def data_received(self, data: bytes) -> None:
        if not self._is_badly_framed:
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
        while self._pipelined and not (self._is_badly_framed or self._awaits_response or self.transport.is_closing()):
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
        """Refuse a body in many small chunks, and read no more of it: parsing one of them takes as long as thousands of
        bytes of a large chunk."""
        self._payload += payload
        self._framing += size - payload
        if self._framing > SPARE_FRAMING + self._payload // PER_FRAMING and self.cycle.more_body:
            self._is_badly_framed = True
            self._pipelined.clear()
            self.scope["state"]["badly_framed"] = True
            self.cycle.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: the server may ignore an offered upgrade."""

    def pause_writing(self) -> None:
        """Called when this client's write buffer is full. All unsent bytes are in memory."""
        super().pause_writing()
        unsent = {other: other.transport.get_write_buffer_size() for other in connections_of(self.server_state)}
        if sum(unsent.values()) > MAX_UNSENT:
            max(unsent, key=lambda other: unsent[other]).cut_off()

    def check_timeouts(self, now: float) -> None:
        """Close if the read timeout has passed. Disconnect a client that has read nothing for too long.

        Nothing is added while writing pauses or after the end of a response, so any change is progress of the client.
        """
        if now > self._deadline_s:
            self.transport.close()
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

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_evictable(self) -> bool:
        return self.is_idle or self.scope["state"].get("is_refused", False)

    def _evict_idle(self) -> None:
        """Close the connection that has been idle longest, or this one if no other is idle.

        A client that sends its request at once is served however many connections another one opens.
        """
        others = [other for other in connections_of(self.server_state) if other is not self]
        idle = [other for other in others if other.is_evictable and not other.transport.is_closing()]
        (min(idle, key=lambda other: other._deadline_s) if idle else self).transport.abort()

    def _update_deadline(self) -> None:
        """Single bytes do not restart the timeout."""
        if not self.is_idle:
            self._deadline_s = math.inf
        elif self._deadline_s == math.inf:
            self._deadline_s = time.monotonic() + self.limits.read_timeout_s


def connections_of(state: ServerState) -> list[Connection]:
    return [one for one in state.connections if isinstance(one, Connection)]


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
