"""Streaming shows whole characters, all of them, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from jetspec.engine.detokenize import TextStream


def utf8(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_bytes_become_characters_when_they_are_complete(text: str) -> None:
    stream, shown = TextStream(utf8), ""
    for byte in text.encode():
        stream.push(byte)
        shown += stream.take()
        assert text.startswith(shown)
    assert shown + stream.finish() == text == stream.text


@given(st.binary(max_size=20))
def test_broken_bytes_are_shown_at_the_end_at_the_latest(data: bytes) -> None:
    stream, shown = TextStream(utf8), ""
    for byte in data:
        stream.push(byte)
        shown += stream.take()
    assert shown + stream.finish() == stream.text
    assert len(stream.text) >= bool(data)


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
