"""Streamed text has complete characters only, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jetspec.engine.detokenize import MAX_HELD, MAX_UNCUT, TextStream


def utf8(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


PIECES = [b"a", b"\xef\xbf\xbd", b"\xf0", b"\xf0\x9f", b"\x9f\x98", b"\x98\x80", b"\x80"]
PIECES += [b"\xe6\xbc", b"\xa2", b"\xa2\xe6"]
"""Tokens of a vocabulary: a letter, U+FFFD itself, and parts of characters, one of them of two."""


def spell(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=60))
def test_tokens_are_held_back_for_one_character_at_most(tokens: list[int]) -> None:
    """With any invalid bytes the text is that of all tokens, and the work per token is bounded."""
    work = 0

    def counted(some: Sequence[int]) -> str:
        nonlocal work
        work += len(some)
        return spell(some)

    stream, shown = TextStream(counted), ""
    for token in tokens:
        work = 0
        stream.push(token)
        shown += stream.take()
        assert work <= 5 * 2 * MAX_UNCUT
    assert shown + stream.finish() == stream.text == spell(tokens)


@given(st.integers(1, 50))
def test_generated_replacement_characters_are_kept(count: int) -> None:
    stream = TextStream(spell)
    for number in range(1, count + 1):
        stream.push(1)
        stream.take()
        assert stream.shown >= number - MAX_HELD
    stream.push(0)
    assert stream.text == "\ufffd" * count + "a"


@given(st.text("aé漢🙂", max_size=30))
def test_bytes_that_decode_only_together(text: str) -> None:
    """Some vocabularies decode neighbouring bytes all or none."""

    def all_or_none(tokens: Sequence[int]) -> str:
        said, run = "", b""
        for token in [*tokens, 0]:
            if token > 127:
                run += bytes([token])
                continue
            try:
                said += run.decode()
            except UnicodeDecodeError:
                said += "\ufffd" * len(run)
            said, run = said + chr(token), b""
        return said[:-1]

    stream, shown = TextStream(all_or_none), ""
    for byte in text.encode():
        stream.push(byte)
        shown += stream.take()
        assert text.startswith(shown)
    assert shown + stream.finish() == text


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_at_its_first_completion(text: str, stops: list[str]) -> None:
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    expected = text
    if ends:
        expected = min((text[: ends[0] - len(s)] for s in stops if text[: ends[0]].endswith(s)), key=len)
    stream, shown, used = TextStream(utf8, tuple(stops)), "", 0
    for byte in text.encode():
        used += 1
        stopped = stream.push(byte)
        shown += stream.take()
        assert expected.startswith(shown)
        if stopped:
            break
    assert used == (ends[0] if ends else len(text))
    assert shown + stream.finish() == expected == stream.text
