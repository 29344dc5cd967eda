"""The server's log: one JSON object per line on stderr."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("jetspec.serve")
request_fields: ContextVar[dict[str, Any]] = ContextVar("request_fields")
"""Fields of the log line of the current request; handlers add to them."""
MAX_LINES, WINDOW_S = 10, 60.0
"""Lines per time window that the event loop and uvicorn may log."""


class JsonFormatter(logging.Formatter):
    """Formats a record with its `fields`, and the whole traceback of an exception: operators read the log."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RateLimit(logging.Filter):
    """Passes the first lines of each window; the first line of the next window counts the suppressed ones.

    Levels are limited separately: warnings that a client provokes must not hide errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels: dict[int, tuple[float, int]] = {}
        """Level -> start of its window, lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        start_s, count = self._levels.get(record.levelno, (-WINDOW_S, 0))
        if record.created - start_s >= WINDOW_S:
            if count > MAX_LINES:
                record.fields = {"left_out": count - MAX_LINES}
            start_s, count = record.created, 0
        self._levels[record.levelno] = start_s, count + 1
        return count < MAX_LINES


def set_up_log() -> None:
    """Send the server's lines and the warnings of uvicorn and asyncio to stderr, as JSON.

    The last two are rate-limited: out of file descriptors asyncio warns thousands of times per second, and uvicorn
    warns of every request that is not HTTP.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in ((log.name, logging.INFO), ("uvicorn.error", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
        if name != log.name:
            logger.filters = [RateLimit()]
