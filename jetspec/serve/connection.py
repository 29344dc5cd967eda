"""One connection of a client: when it has waited, or is waited for, too long, and when there are too many."""

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

MAX_WAITING = 256 << 20
"""Bytes of answers that wait for their clients, of all together. Beyond, the client that most waits for is cut off."""
PIECE = 8 << 10
"""Bytes that are parsed before the next look at what they were. The event loop stands still meanwhile."""
SPARE_FRAMING, PER_FRAMING = 16 << 10, 64
"""Bytes around the chunks of a body that are always let through, and how many of the body itself pay for one more."""
LINGER_S = 2.0
"""What a client that is still sending has to read why it was refused."""


def most_connections(config: ServeConfig) -> int:
    """Twice the requests that are let in, so that there is room to refuse some; half of the files that may be open."""
    most = 2 * config.max_requests
    try:
        import resource
    except ImportError:  # a system without such limits
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)


class Closing:
    """A transport that asks somebody else to close it. uvicorn closes as soon as it has written."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's, which by itself waits for ever: for the head of a request, and for a client to read its answer.

    It also stops listening to a client that sends more than one request, and so would not hear it leave. Here what
    comes ahead of its turn is kept, up to the size of a request.
    """

    def __init__(self, limits: ServeConfig, most: int, **given: Any) -> None:
        super().__init__(**given)
        self.limits, self.most = limits, most
        self._deadline: asyncio.TimerHandle | None = None
        self._untaken, self._moved_s = 0, 0.0
        self._ahead = bytearray()
        """What the client has sent after the request that is being answered."""
        self._framing, self._payload = 0, 0
        """Bytes around the parts of the present body, and of these."""
        self._is_deaf, self._is_parting = False, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(cast(asyncio.Transport, Closing(transport, self._part)))
        self._watch()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if not self._is_deaf:
            self._ahead += data
            self._read_on()
            if len(self._ahead) > self.limits.max_body:
                self.cut_off()
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        if self._has_asked:
            self.flow.resume_reading()  # to hear the client leave

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._framing = self._payload = 0
        self._read_on()

    @property
    def _has_asked(self) -> bool:
        """Whether there is a whole request, and its answer is not complete."""
        return not self.is_idle and not self.cycle.more_body

    def _read_on(self) -> None:
        """Parse what has come, up to the end of a request that is not answered yet."""
        while self._ahead and not (self._is_deaf or self._has_asked or self._socket.is_closing()):
            piece = bytes(self._ahead[:PIECE])
            del self._ahead[:PIECE]
            is_body = not self.is_idle
            before = len(self.cycle.body) if is_body else 0
            super().data_received(piece)
            if is_body:
                self._weigh(len(piece), len(self.cycle.body) - before)
        if self._has_asked and self.conn.their_state is h11.MUST_CLOSE:
            self._ahead.clear()  # the client said that this is its last request

    def _weigh(self, size: int, payload: int) -> None:
        """A body in many small chunks is refused: each takes as long to parse as thousands of bytes in one."""
        self._payload += payload
        self._framing += size - payload
        if self._framing > SPARE_FRAMING + self._payload // PER_FRAMING and self.cycle.more_body:
            self._is_deaf = True
            self.scope["state"]["badly_framed"] = True
            self.cycle.message_event.set()

    def _part(self) -> None:
        """Close. To a client in the midst of its body the system would say so before it has read its answer."""
        is_unread = self.cycle is not None and self.cycle.more_body
        if not is_unread or self._is_parting or self._socket.is_closing():
            self._socket.close()
            return
        self._is_deaf = self._is_parting = True
        self._ahead.clear()
        self.flow.resume_reading()  # what still comes is dropped
        self._socket.write_eof()
        self.loop.call_later(LINGER_S, self._socket.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """A client may offer another protocol; going on with this one is an answer."""

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
