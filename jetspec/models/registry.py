"""Published draft heads by target: the rows of heads.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jetspec.models.hub import HEADS
from jetspec.settings import from_dict

FILE = HEADS / "heads.toml"
ORDER = (
    *("DFly", "DSpark", "SpecForge DSpark", "speculators (dspark)", "DFlash2", "speculators (dflash2)"),
    *("Domino", "speculators (xpress)", "DFlash", "speculators (dflash)"),
    *("P-EAGLE", "speculators (peagle)", "EAGLE-3", "speculators (eagle3)"),
)
"""Kinds of heads, the first preferred where no figure decides: those whose children depend on their parent, then those
of one pass, then those of a pass per level."""
QUANTISED = re.compile(r"[-_.](gguf|(ud[-_])?i?q\d\w*|[bf]f?p?(8|16|32)|int[48])$")
"""Ending of a model's name that tells its number format."""


@dataclass(frozen=True)
class KnownHead:
    """A published head."""

    name: str
    """Hugging Face id, or the model for which the package ships the head."""
    targets: tuple[str, ...]
    """Models that it was trained for, and others of other names with the same weights."""
    kind: str
    """Its kind, as `kind_of` names it."""
    block_size: int | None = None
    """Slots of a block; EAGLE-3 has none."""
    tokens_per_round: float | None = None
    """Tokens per round that its authors publish, for GSM8K."""
    measured: str | None = None
    """Conditions of that figure."""
    license: str | None = None
    """Licence that its card names, in SPDX's spelling."""
    size_gb: float | None = None
    """Size of its files."""

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key, the best head first: the published figure, then the order of kinds."""
        return -(self.tokens_per_round or 0), ORDER.index(self.kind)


@cache
def known_heads() -> tuple[KnownHead, ...]:
    """Returns all rows, in the order of the file."""
    return tuple(from_dict(KnownHead, row) for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["head"])


def heads_of(model: str | Path) -> list[KnownHead]:
    """Returns the known heads of a model, the best first. Copies and quantisations are known by the model's name."""
    name = base_name(model)
    return sorted((head for head in known_heads() if name in map(base_name, head.targets)), key=lambda head: head.rank)


def base_name(model: str | Path) -> str:
    """Returns the name of a model without its owner, folder and number format."""
    name = Path(model).expanduser().name.lower()
    while (shorter := QUANTISED.sub("", name)) != name:
        name = shorter
    return name
