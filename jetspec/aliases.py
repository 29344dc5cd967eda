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
        "--depth": "--set tree.depth",
        "--draft-temperature": "--set tree.draft_temperature",
        "--heat": "--set tree.draft_temperature",
        "--shortlist": "--set tree.shortlist",
        "--shortlist-parents": "--set tree.shortlist_parents",
        "--likely": "--set tree.shortlist_parents",
        "--batch-trees": "--set tree.batch_trees",
        "--shrink": "--set tree.batch_trees",
        "--budget": "--set tree.budget",
        "--width": "--set tree.width",
        "--expand": "--set tree.expand",
        "--drafter": "--set model.drafter",
        "--dtype": "--set model.dtype",
        "--device": "--set model.device",
        "--temperature": "--set sampling.temperature",
        "--top-p": "--set sampling.top_p",
        "--top-k": "--set sampling.top_k",
        "--min-p": "--set sampling.min_p",
        "--presence-penalty": "--set sampling.presence_penalty",
        "--frequency-penalty": "--set sampling.frequency_penalty",
        "--seed": "--set sampling.seed",
        "--max-tokens": "--set sampling.max_tokens",
        "--stop": "--set sampling.stop",
    },
    "flag serve": {
        "--allow-origin": "--set server.origins",
        "--log-text": "--set server.log_text",
        "--max-queue": "--set server.max_queue",
        "--max-prompt": "--set server.max_prompt",
        "--max-tokens": "--set server.max_tokens",
        "--max-body": "--set server.max_body",
        "--drain": "--set server.drain_s",
    },
    "flag eval_head_command": {"--batch": "--set engine.max_batch"},
    "flag regenerate": {
        "--split": "--set prompts.split",
        "--shard": "--set prompts.shard",
        "--on-bad": "--set prompts.on_bad",
        "--responses": "--set answers.responses",
        "--top-p": "--set answers.top_p",
        "--seed": "--set answers.seed",
        "--max-len": "--set answers.max_len",
        "--batch": "--set machine.batch",
    },
    "flag synthesize": {
        "--opening": "--set prompts.prefix",
        "--openings": "--set prompts.prefixes",
        "--system": "--set prompts.system",
        "--jobs": "--set machine.jobs",
        "--top-p": "--set prompts.top_p",
        "--seed": "--set prompts.seed",
        "--batch": "--set machine.batch",
    },
    "flag profile": {
        "--dtype": "--set profile.dtype",
        "--device": "--set profile.device",
        "--rounds": "--set profile.rounds",
        "--max-len": "--set profile.max_len",
        "--temperature": "--set profile.temperature",
        "--head-layers": "--set head.num_layers",
        "--block": "--set head.block_size",
    },
    "flag op": {
        "--dtype": "--set profile.dtype",
        "--device": "--set profile.device",
        "--shortlist": "--set profile.shortlist",
        "--window": "--set profile.window",
        "--max-len": "--set profile.max_len",
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
