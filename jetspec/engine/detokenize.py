"""Text as it grows: whole characters only, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""Tokens that may hold the beginning of a character: it has at most three bytes before its last."""
MAX_UNCUT = 16
"""Tokens that are held at most. Between any two of them lies a character, which hardly happens."""

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Turns tokens into text one at a time.

    A few tokens before the new ones are decoded along with them, because a token's text may depend on what stands
    before it; the difference of two decodings is the new text. Text that might be the beginning of a stop string
    is held back until it is not.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = ()) -> None:
        self.decode, self.stop = decode, stop
        self.tokens: list[int] = []
        self.text = ""
        self.shown = 0
        self.first, self.read = 0, 0

    def push(self, token: int) -> bool:
        """Take one token; True when it completes a stop string, which is then cut off."""
        self.tokens.append(token)
        known = self.decode(self.tokens[self.first : self.read])
        longer = self.decode(self.tokens[self.first :])
        end = len(self.tokens)
        if longer.endswith(REPLACEMENT):
            end, longer = self._certain(longer)
        if len(longer) <= len(known):
            return False
        return self._append(longer[len(known) :], end)

    def _certain(self, text: str) -> tuple[int, str]:
        """Of tokens whose text ends with U+FFFD, how many do not depend on what comes, and their text.

        The last ones may be the beginning of a character. If there are more, what stands before those is broken, or is
        a token for U+FFFD itself, and will not change.
        """
        end = len(self.tokens)
        if end - self.read > MAX_HELD:
            for cut in range(end - MAX_HELD, end):
                before = self.decode(self.tokens[self.first : cut])
                if text.startswith(before) and (cut == end - MAX_HELD or not before.endswith(REPLACEMENT)):
                    return cut, before
        return (end, text) if end - self.read > MAX_UNCUT else (self.read, "")

    def take(self) -> str:
        """Text that became certain since the last call."""
        end = len(self.text) - overlap(self.text, self.stop)
        new = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        known = self.decode(self.tokens[self.first : self.read])
        self._append(self.decode(self.tokens[self.first :])[len(known) :], len(self.tokens))
        new, self.shown = self.text[self.shown :], len(self.text)
        return new

    def _append(self, piece: str, end: int) -> bool:
        """Add the text of the tokens before `end`."""
        before = len(self.text)
        self.text += piece
        self.first, self.read = self.read, end
        cuts = [self.text.find(s, max(0, before - len(s) + 1)) for s in self.stop]
        cuts = [cut for cut in cuts if cut >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        return bool(cuts)


def overlap(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of the text that one of the strings begins with."""
    longest = 0
    for string in strings:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
