"""Old names, accepted for one release with one warning line each. No other module knows them.

`RENAMED` maps an old name to the current one, section by section. `python` holds the public names of the package
`jetspec`, `flag` the options of the command line. Every other section holds the fields of one config dataclass; they
are also the keys of that section in a recipe and in `--set section.field=value`. Whoever renames one of these adds a
row; rows go one release later.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

RENAMED: dict[str, dict[str, str]] = {
    "python": {"Shrink": "BatchTree"},
    "tree": {"heat": "draft_temperature", "likely": "shortlist_parents", "shrink": "batch_trees"},
    "engine": {"patience": "max_admission_delay", "ahead": "overlap_rounds"},
    "flag": {
        "--heat": "--draft-temperature",
        "--likely": "--shortlist-parents",
        "--shrink": "--batch-trees",
        "--patience": "--max-admission-delay",
        "--ahead": "--overlap-rounds",
    },
}

_warned: set[tuple[str, str]] = set()
"""(section, old name) of the warnings given in this process."""


def current(name: str, section: str, where: str | None = None, stacklevel: int = 2) -> str:
    """Returns the current name of `name`, with a warning when it was renamed.

    `where` is the file or the command in which a user wrote it: the warning is then one line on stderr. Without it the
    warning is a `FutureWarning` about Python code: at `stacklevel` 1 that of the caller, at 2 that of its caller.
    """
    new = RENAMED[section].get(name)
    if new is None:
        return name
    if (section, name) not in _warned:
        _warned.add((section, name))
        line = f"{name} is now called {new}; the old name works until the next release"
        if where is None:
            warnings.warn(line, FutureWarning, stacklevel=stacklevel + 1)
        else:
            print(f"warning: {where}: {line}", file=sys.stderr)
    return new


def renamed(values: Mapping[str, T], section: str, where: str | None = None, stacklevel: int = 2) -> dict[str, T]:
    """Returns `values` under their current names. An old name overrides the current one: it is what the user wrote."""
    result, old = dict(values), [name for name in values if name in RENAMED[section]]
    for name in old:
        result[current(name, section, where, stacklevel + 1)] = result.pop(name)
    return result


def accepts_old_names(section: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the old names of a dataclass's fields work as constructor arguments and as attributes."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def __init__(self: T, *args: Any, **fields: Any) -> None:
            init(self, *args, **renamed(fields, section))

        cls.__init__ = __init__  # type: ignore[assignment]
        for old in RENAMED[section]:
            setattr(cls, old, property(functools.partial(_read_old, section, old)))
        return cls

    return decorate


def _read_old(section: str, old: str, config: Any) -> Any:
    return getattr(config, current(old, section))
