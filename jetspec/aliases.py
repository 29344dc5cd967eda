"""Old names, accepted for one release with one warning line each. No other module knows them.

`RENAMED` maps an old name to the current one, section by section: `python` holds the public names of the package
`jetspec`; `command` the commands of `jetspec data`; `flag` the options of all commands and `flag NAME` those of one,
which are now settings without a flag. Every other section holds the fields of one config dataclass, which are also the
keys of that section in a recipe and in `--set section.field=value`. Rows go one release later.
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
    "command": {"invent": "synthesize"},
    "flag": {
        "--heat": "--set tree.draft_temperature",
        "--likely": "--set tree.shortlist_parents",
        "--shrink": "--set tree.batch_trees",
    },
    "flag serve": {"--allow-origin": "--set server.origins", "--drain": "--set server.drain_s"},
    "flag eval_head_command": {"--batch": "--set engine.max_batch"},
    "flag regenerate": {},
    "flag synthesize": {"--opening": "--set prompts.prefix", "--openings": "--set prompts.prefixes"},
    "flag profile": {"--head-layers": "--set head.num_layers", "--block": "--set head.block_size"},
    "flag op": {},
}
FLAGS = {
    "flag tree": "budget width depth expand draft_temperature shortlist shortlist_parents batch_trees",
    "flag model": "drafter dtype device",
    "flag sampling": "temperature top_p top_k min_p presence_penalty frequency_penalty seed max_tokens stop",
    "flag serve server": "log_text max_queue max_prompt max_tokens max_body",
    "flag regenerate prompts": "split shard on_bad",
    "flag regenerate answers": "responses top_p seed max_len",
    "flag regenerate machine": "batch",
    "flag synthesize prompts": "system top_p seed",
    "flag synthesize machine": "jobs batch",
    "flag profile profile": "dtype device rounds max_len temperature",
    "flag op profile": "dtype device shortlist window max_len",
}
"""Settings that had a flag of their own name, by its section and the group of the settings."""
for place, names in FLAGS.items():
    section, _, group = place.rpartition(" ")
    RENAMED[section] |= {f"--{name.replace('_', '-')}": f"--set {group}.{name}" for name in names.split()}

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
            setattr(cls, old, property(lambda config, old=old: getattr(config, current(old, section))))  # type: ignore[misc]
        return cls

    return decorate
