"""First words of user messages. They set the kind of work that a synthesized prompt asks for."""

from __future__ import annotations

from pathlib import Path

from jetspec.files import read_text
from jetspec.settings import read_settings

BUILTIN_FILE = Path(__file__).with_name("prefixes.yaml")


def builtin_prefixes() -> tuple[str, ...]:
    """Prefixes of all kinds in turn, so that any stretch is balanced. Every second one is empty: a free prompt."""
    kinds: dict[str, list[str]] = read_settings(BUILTIN_FILE)
    in_turn = [prefix for row in zip(*kinds.values(), strict=True) for prefix in row]
    return tuple(one for prefix in in_turn for one in (prefix, ""))


def read_prefixes(name: str) -> tuple[str, ...]:
    """The prefixes `builtin` or `none`, or those of a text file: one per line, an empty line for a free prompt."""
    if name == "builtin":
        return builtin_prefixes()
    if name == "none":
        return ("",)
    prefixes = tuple(read_text(Path(name)).splitlines())
    if not prefixes:
        raise ValueError(f"{name} holds no prefixes")
    return prefixes
