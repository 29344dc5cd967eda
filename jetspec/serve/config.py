"""Settings of the server: address, access and limits."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from pathlib import Path

from jetspec.files import read_text
from jetspec.settings import at_least, positive

ORIGIN = re.compile(r"https?://[a-z0-9.:\[\]_-]+")
"""An origin as browsers send it; any other spelling would never match."""
MIN_KEY = 16
"""Minimum length of an API key, in characters: shorter ones can be guessed."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of the HTTP server. `EngineConfig` has those of the engine."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 interface."""
    port: int = 8000
    """TCP port; 0 selects a free one."""
    model_name: str | None = None
    """Name of the model in the API; by default the model's own name."""
    keys: tuple[str, ...] = ()
    """API keys; without any, every client that reaches the port is served."""
    origins: tuple[str, ...] = ()
    """Origins whose web pages may call the API from a browser (CORS), such as https://example.org; by default none."""
    max_queue: int = 64
    """Completions that may wait for the batch; a request beyond them is refused with status 429."""
    max_requests: int = 512
    """HTTP requests at a time; one beyond them is refused with status 429."""
    max_body: int = 4 << 20
    """Size limit of a request body, in bytes."""
    max_prompt: int | None = None
    """Length limit of a prompt, in tokens; by default one less than the context."""
    max_tokens: int | None = None
    """Length limit of a completion, in tokens, at most the context; by default the context."""
    read_timeout_s: float = 30.0
    """Seconds in which a client has to send its request."""
    write_timeout_s: float = 60.0
    """Seconds after which a client that reads nothing of its response is disconnected."""
    drain_s: float = 30.0
    """Seconds that running completions have to finish at shutdown; 0 aborts them at once."""
    log_text: bool = False
    """Write prompts and completions to the log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be between 0 and 65535")
        for name in ("max_queue", "max_requests", "max_body", "max_prompt", "max_tokens"):
            at_least(0 if name == "max_queue" else 1, name, getattr(self, name))
        for name in ("read_timeout_s", "write_timeout_s"):
            positive(name, getattr(self, name))
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s is {self.drain_s:g}; it must be finite and at least 0")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write it as https://example.org, in lower case and without a "
                    "trailing slash; there is no wildcard"
                )

    @property
    def is_local(self) -> bool:
        """The server is reachable from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def shown_host(self) -> str:
        """The host as URLs write it."""
        return f"[{self.host}]" if ":" in self.host else self.host


def read_keys(path: Path) -> tuple[str, ...]:
    """Returns the API keys in a file, one per line. On a command line every user of the machine could see them."""
    keys = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path} holds no key; write one per line")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY or not key.isascii() or " " in key:
            raise ValueError(f"key {number} of {path} needs at least {MIN_KEY} ASCII characters and no space")
    return keys
