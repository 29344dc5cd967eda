"""How the server listens, and where its patience ends."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path

from jetspec.files import read_text

ORIGIN = re.compile(r"https?://[a-z0-9.:\[\]_-]+")
"""As browsers send it: anything else would never match."""
MIN_KEY = 16
"""Shortest API key in characters: shorter ones can be guessed."""


@dataclass(frozen=True)
class ServeConfig:
    """Everything about the server that is not about the model."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    model_name: str | None = None
    """What clients call the model. None: its own name."""
    keys: tuple[str, ...] = ()
    """API keys. None at all: whoever reaches the port may ask."""
    origins: tuple[str, ...] = ()
    """Web pages of other hosts that may ask from a browser."""
    max_queue: int = 64
    """Answers that may wait while others are written; one more is refused with 429."""
    max_requests: int = 512
    """HTTP requests at a time, whatever they want."""
    max_body: int = 4 << 20
    """Bytes of a request."""
    max_prompt: int | None = None
    """Tokens of a prompt. None: what the context holds."""
    max_tokens: int | None = None
    """Tokens of an answer. None: what the context holds."""
    read_timeout_s: float = 30.0
    """A client that takes longer to send its request is cut off."""
    write_timeout_s: float = 60.0
    """A client that takes no byte of its answer for so long is cut off."""
    drain_s: float = 30.0
    """Time that answers have to come to their end when the server is told to stop. 0: they are broken off."""
    log_text: bool = False
    """Whether prompts and answers appear in the log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("max_queue", "max_requests", "max_body", "max_prompt", "max_tokens"):
            value, least = getattr(self, name), 0 if name == "max_queue" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        for name in ("read_timeout_s", "write_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain is {self.drain_s:g} seconds; it must be finite and at least 0")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; one is written as https://example.org, in small letters and with no "
                    "slash at its end, and there is no wildcard"
                )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def shown_host(self) -> str:
        """The host as addresses write it."""
        return f"[{self.host}]" if ":" in self.host else self.host


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys from a file, one per line. On a command line they would be visible to every user of the machine."""
    keys = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path} holds no key; write one per line")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY or not key.isascii() or " " in key:
            raise ValueError(f"key {number} of {path} needs at least {MIN_KEY} ASCII characters and no space")
    return keys
