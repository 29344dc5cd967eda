"""Numbers on a page come from records: a program writes them between two marks."""

from __future__ import annotations


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def put_between(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name, whatever was there before."""
    begin, end = marks(name)
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
