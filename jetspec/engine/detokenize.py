"""Text as it grows: whole characters only, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

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
        if longer.endswith(REPLACEMENT) or len(longer) <= len(known):
            return False
        return self._append(longer[len(known) :])

    def take(self) -> str:
        """Text that became certain since the last call."""
        end = len(self.text) - overlap(self.text, self.stop)
        new = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def finish(self) -> str:
        """The rest, incomplete characters included."""
        known = self.decode(self.tokens[self.first : self.read])
        self._append(self.decode(self.tokens[self.first :])[len(known) :])
        new, self.shown = self.text[self.shown :], len(self.text)
        return new

    def _append(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        self.first, self.read = self.read, len(self.tokens)
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
