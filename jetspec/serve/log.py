"""The server's log: one JSON object per line on stderr."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

facts: ContextVar[dict[str, Any]] = ContextVar("facts")
"""What the log line of the present request will say. Whoever handles it adds to them."""
MAX_LINES, LIMITED_S = 10, 60.0
"""How often the event loop may warn, and how often the web server."""


class JsonLines(logging.Formatter):
    """What happened and its facts. Of an exception the whole traceback: logs are for those who run the server."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Sparingly(logging.Filter):
    """Lets through the first lines of a minute, and says with the next minute's how many it kept back.

    Warnings and errors are counted apart: who provokes the one must not hide the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels: dict[int, tuple[float, int]] = {}
        """When the minute of each began, and its lines since."""

    def filter(self, record: logging.LogRecord) -> bool:
        began_s, count = self._levels.get(record.levelno, (-LIMITED_S, 0))
        if record.created - began_s >= LIMITED_S:
            if count > MAX_LINES:
                record.facts = {"left_out": count - MAX_LINES}
            began_s, count = record.created, 0
        self._levels[record.levelno] = began_s, count + 1
        return count < MAX_LINES


def set_up_log() -> None:
    """Our own lines, and the warnings of the web server and of the event loop, in one form.

    What the event loop warns of, such as a want of files, it may repeat thousands of times a second, and the web server
    warns of every request that is not HTTP.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    levels = {"jetspec.serve": logging.INFO, "uvicorn.error": logging.WARNING, "asyncio": logging.WARNING}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).filters = [Sparingly()]
