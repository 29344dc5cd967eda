"""Incremental detokenization: complete characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""Most tokens with an incomplete character: a character has at most three bytes before its last."""
MAX_UNCUT = 16
"""Most tokens without a character boundary that are held back. More of them hardly occur."""

MAX_CONTEXT = 8
"""Most tokens that are decoded along with new ones."""

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Turns tokens into text, one at a time.

    A token's text may depend on the tokens before it, so a few of those are decoded along with new ones; the new text
    is what comes after theirs. Text that may begin a stop string is held back.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = ()) -> None:
        self.decode, self.stop = decode, stop
        self.tokens: list[int] = []
        self.text = ""
        self.shown = 0
        self.first, self.read = 0, 0
        self.known = ""
        """Text of the tokens from `first` to `read`."""

    def push(self, token: int) -> bool:
        """Appends a token. Returns True when it completes a stop string, which is cut off."""
        self.tokens.append(token)
        longer = self.decode(self.tokens[self.first :])
        end = len(self.tokens)
        if longer.endswith(REPLACEMENT):
            end, longer = self._final(longer)
        return len(longer) > len(self.known) and self._append(longer, end)

    def _final(self, text: str) -> tuple[int, str]:
        """For tokens whose text ends with U+FFFD: the number of them with final text, and that text.

        The last tokens may begin a character. Text before those is final: an invalid byte, or U+FFFD itself.
        """
        end = len(self.tokens)
        if end - self.read > MAX_HELD:
            for cut in range(end - MAX_HELD, end):
                before = self.decode(self.tokens[self.first : cut])
                if text.startswith(before) and (cut == end - MAX_HELD or not before.endswith(REPLACEMENT)):
                    return cut, before
        return (end, text) if end - self.read > MAX_UNCUT else (self.read, "")

    def take(self) -> str:
        """Returns the text that became final since the last call."""
        end = len(self.text) - overlap(self.text, self.stop)
        new = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def finish(self) -> str:
        """Returns the remaining text, incomplete characters included."""
        self._append(self.decode(self.tokens[self.first :]), len(self.tokens))
        new, self.shown = self.text[self.shown :], len(self.text)
        return new

    def _append(self, longer: str, end: int) -> bool:
        """Appends what is new in the text of the tokens from `first` to `end`. Returns True when it contains a stop
        string."""
        before = len(self.text)
        self.text += longer[len(self.known) :]
        if end - self.first > MAX_CONTEXT:
            self.first = self.read
            longer = self.decode(self.tokens[self.first : end])
        self.known, self.read = longer, end
        if not self.stop:
            return False
        cuts = [self.text.find(s, max(0, before - len(s) + 1)) for s in self.stop]
        cuts = [cut for cut in cuts if cut >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        return bool(cuts)


def overlap(text: str, strings: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of one of the strings."""
    longest = 0
    for string in strings:
        for size in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:size]):
                longest = size
                break
    return longest
