"""Regular expressions in JSON schemas: those that xgrammar follows, and our own for the formats of strings.

xgrammar's formats accept dates and addresses that do not exist. Ours are subsets of the standards: no leap seconds, no
quoted mailboxes.
"""

from __future__ import annotations

import re

UNSUPPORTED = re.compile(r"\(\?(?!:|<\w|P<\w)|(?<=[^|(])\^|\$(?=[^|)])|\)\{0*([2-9]|[1-9]\d+),\}")
"""Syntax that xgrammar ignores (lookahead, flags, anchors inside), or compiles wrongly (groups with {2,})."""
REPEATED = re.compile(r"\\.|\[(?:\\.|[^]\\])*\]|\)(?:\?|\{0*([01]),\})|[$^]", re.DOTALL)
"""An optional or unbounded group, or an anchor; also escapes and classes, which must not be changed."""

YEAR = r"(\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
LEAP = r"(0[48]|[2468][048]|[13579][26])"
"""Two digits divisible by 4, without 00."""
MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
DATE = rf"({YEAR}-{MONTHS}|(\d\d{LEAP}|{LEAP}00)-02-29)"
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"

CLOCK = r"T(\d{1,6}H(\d{1,6}M(\d{1,6}S)?)?|\d{1,6}M(\d{1,6}S)?|\d{1,6}S)"
DAYS = r"(\d{1,4}Y(\d{1,4}M(\d{1,6}D)?)?|\d{1,4}M(\d{1,6}D)?|\d{1,6}D)"

LABEL = r"[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?"
ATOM = r"[A-Za-z0-9_+-]{1,20}"

BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
HEX = "[0-9a-fA-F]"
WORD = rf"{HEX}{{1,4}}"
SHORT = "|".join(rf"({WORD}:){{{n}}}(:{WORD}){{1,{7 - n}}}" for n in range(1, 7))
"""Addresses of at most seven words with `::` in the middle."""

PATTERNS = {
    "date": DATE,
    "time": TIME,
    "date-time": rf"{DATE}T{TIME}",
    "duration": rf"P({DAYS}({CLOCK})?|{CLOCK}|\d{{1,6}}W)",
    "uuid": rf"{HEX}{{8}}(-{HEX}{{4}}){{3}}-{HEX}{{12}}",
    **{f"uuid{n}": rf"{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}" for n in range(1, 9)},
    "hostname": rf"{LABEL}(\.{LABEL}){{0,6}}",
    "email": rf"{ATOM}(\.{ATOM}){{0,2}}@({LABEL}\.){{1,6}}[a-z]{{2,20}}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": rf"(({WORD}:){{7}}{WORD}|{SHORT}|({WORD}:){{1,7}}:|:(:{WORD}){{1,7}}|::)",
}
LIBRARY = frozenset({"uri", "uri-reference", "uri-template"})
"""Formats of which xgrammar's own expressions are right."""
FREE = frozenset({"password", "binary", "path"})
"""Formats that every text satisfies; they describe its use."""


def is_safe(pattern: str) -> bool:
    """Returns true if xgrammar follows an expression exactly.

    It ignores `UNSUPPORTED` syntax, reads unknown escapes as letters, and generates characters without JSON escapes.
    """
    escapes = re.findall(r"\\(.)", pattern, re.DOTALL)
    bare = re.sub(r"\[[^]]*\]", "x", re.sub(r"\\.", "x", pattern))  # without escapes and character classes
    is_known = all(e in "dDsSwW" or not (e.isalnum() or e == "\\") for e in escapes)
    return pattern.isprintable() and '"' not in pattern and is_known and not UNSUPPORTED.search(bare)


def spelled_out(pattern: str) -> str:
    """Returns an equal expression that xgrammar follows: it would drop the beginning of `(ab+)?`.

    Anchors are removed: it matches whole texts only, and prints a warning for each anchor.
    """

    def spell(found: re.Match[str]) -> str:
        if found[0][0] != ")":
            return "" if found[0] in "^$" else found[0]
        return {"0": ")*", "1": ")+", None: "){0,1}"}[found[1]]

    return REPEATED.sub(spell, pattern)
