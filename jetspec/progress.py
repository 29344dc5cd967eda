"""Progress of long work on stderr: a bar on a terminal, plain lines now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

LINE_S = 10.0
"""Seconds between two lines in a log."""
LINE_FORMAT = "{desc}{n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def progress_bar(
    items: Iterable[Any] | None = None,
    *,
    total: int | None = None,
    desc: str | None = None,
    unit: str = "it",
    initial: int = 0,
    leave: bool = True,
    disable: bool = False,
) -> tqdm[Any]:
    """A progress bar over `items`, or one that `update` advances. In a log a bar that does not `leave` is silent
    unless it takes longer than `LINE_S`."""
    options: Any = {"total": total, "initial": initial, "leave": leave, "disable": disable}
    if sys.stderr is not None and sys.stderr.isatty():
        return tqdm(items, desc=desc, unit=unit, **options)
    return LineProgress(items, desc=desc and f"{desc}: ", unit=f" {unit.strip()}", **options)


def print_above(line: str, file: TextIO | None = None) -> None:
    """Prints a line above the bars on the terminal; to stdout if no file is given."""
    tqdm.write(line, file=file)


class LineProgress(tqdm):
    """Progress as whole lines without carriage returns: one per `LINE_S` seconds, and the last state."""

    def __init__(self, items: Any, **options: Any) -> None:
        self.last_line_s = time.monotonic()
        super().__init__(items, bar_format=LINE_FORMAT, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() - self.last_line_s >= LINE_S:
            self._print()

    def close(self) -> None:
        leaves, self.leave = self.leave, False
        if not self.disable and leaves:
            self._print()
        super().close()

    def clear(self, nolock: bool = False) -> None:
        """Nothing: lines of a log stay."""

    def _print(self) -> None:
        self.last_line_s = time.monotonic()
        self.fp.write(f"{self}\n")
        self.fp.flush()
