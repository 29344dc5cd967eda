"""Packed rows hold every document once per pass and depend only on documents and seed; bad rows are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.data.corpus import Document, Documents, PackedData, Prefetch, Tally, read_documents

sizes = st.lists(st.integers(2, 12), min_size=1, max_size=20)


def numbered(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are their number."""
    return [Document(np.full(n, i), np.arange(n) > 0) for i, n in enumerate(lengths)]


@given(sizes, st.integers(12, 30), st.integers(0, 5))
def test_every_pass_holds_every_document_once(lengths: list[int], row_len: int, seed: int) -> None:
    data = PackedData(numbered(lengths), row_len, seed)
    first = 0
    for number in range(3):
        count = len(data._pass(number))
        batch = data.batch(first, count)
        first += count
        seen = {}
        for row in range(count):
            document = batch.document_RT[row].numpy()
            for i in range(document.max() + 1):
                inside = document == i
                token = batch.token_RT[row].numpy()[inside]
                assert len(set(token.tolist())) == 1 and token[0] not in seen
                seen[token[0]] = inside.sum()
                assert batch.position_RT[row].numpy()[inside].tolist() == list(range(inside.sum()))
                assert batch.written_RT[row].numpy()[inside].tolist() == [j > 0 for j in range(inside.sum())]
            assert not batch.written_RT[row].numpy()[document < 0].any()
        assert seen == dict(enumerate(lengths))


@given(sizes, st.integers(0, 40))
def test_rows_do_not_depend_on_earlier_reads(lengths: list[int], number: int) -> None:
    one, other = PackedData(numbered(lengths), 12, 7), PackedData(numbered(lengths), 12, 7)
    for i in range(number):
        other.row(i)
    assert all(np.array_equal(a, b) for a, b in zip(one.row(number), other.row(number), strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not a row"),
        pytest.param(b"[" * 100_000, "not a row", id="deep"),
        (b'{"token_ids": [1, 2]}', "spans"),
        (b'{"turns": ["Why?"]}', "token_ids and spans"),
        (b'{"token_ids": [1, 99], "spans": [[0, 1]]}', "vocabulary"),
        (b'{"token_ids": [1, 2], "spans": [[1, 5]]}', "outside"),
        (b'{"token_ids": [1.5, 2], "spans": [[1, 2]]}', "whole numbers"),
        (b'{"id": "\xff", "token_ids": [1, 2, 3], "spans": [[1, 3]]}', "not UTF-8"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path, tally = tmp_path / "a.jsonl", Tally()
    good = b'{"token_ids": [1, 2, 3], "spans": [[1, 3]]}\n'
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}.* on_bad: skip"):
        read_documents([path], 10, 50)
    assert len(read_documents([path], 10, 50, on_bad="skip", tally=tally)) == 2
    assert tally.summary(10) == f"1 of 3 rows left out: broken ({path}:2)"


@given(sizes, st.data())
def test_flat_documents_equal_the_documents(lengths: list[int], data: st.DataObject) -> None:
    documents = numbered(lengths)
    flat = Documents.join(list(enumerate(documents)))
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1))
    taken = flat.take(np.array(index))
    assert taken.file_D.tolist() == index
    for found, i in zip(taken, index, strict=True):
        assert np.array_equal(found.tokens, documents[i].tokens) and found.tokens.dtype == np.int32
        assert np.array_equal(found.written, documents[i].written)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=3), st.integers(1, 20), st.integers(0, 9))
def test_held_out_prompts_are_not_trained_on(counts: list[int], most: int, seed: int) -> None:
    """Several files hold answers to the same prompts."""
    documents = [
        (file, Document(np.array([i, file]), np.array([False, True]), f"p{i}"))
        for file, count in enumerate(counts)
        for i in range(count)
    ]
    held_out, rest = Documents.join(documents).hold_out(most, seed)
    held, trained = ({int(document.tokens[0]) for document in part} for part in (held_out, rest))
    assert not held & trained and 1 <= len(held) <= most and trained
    assert len(held_out) + len(rest) == len(documents)
    nameless = Documents.join(list(enumerate(numbered([3] * 20)))).hold_out(5, 0)
    assert [len(part) for part in nameless] == [2, 18], "documents without an id are held out one by one"


BAD_DATA = [
    {"id": "long", "token_ids": [1, 2, 3, 4, 5, 6], "spans": [[2, 6]]},
    {"id": "lost", "token_ids": [1, 2, 3, 4, 5, 6], "spans": [[4, 6]]},
    {"id": "none", "token_ids": [1, 2], "spans": []},
    {"id": "mask", "token_ids": [1, 2, 9], "spans": [[1, 3]]},
    {"id": "broken", "token_ids": [1, 99], "spans": [[1, 2]]},
    {"id": "one each", "token_ids": [1, 2, 3, 4], "spans": [[1, 2], [3, 4]]},
    {"id": "good", "token_ids": [1, 2, 3], "spans": [[1, 3]]},
]


def test_changed_rows_are_counted_and_named(tmp_path: Path) -> None:
    path, tally = tmp_path / "a.jsonl", Tally()
    path.write_text("".join(json.dumps(row) + "\n" for row in BAD_DATA))
    documents = read_documents([path], 4, 50, mask_token=9, on_bad="skip", tally=tally)
    assert sorted(document.tokens.tolist() for document in documents) == [[1, 2, 3], [1, 2, 3, 4]]
    assert documents[1].written.tolist() == [False, False, True, True], "the rest of a cut row"
    assert tally.summary(4).splitlines() == [
        f"2 of 7 rows cut: longer than row_len 4 ({path}:1, {path}:2)",
        f"1 of 7 rows left out: the cut took all answers ({path}:2)",
        f"1 of 7 rows left out: the target wrote nothing ({path}:3)",
        f"1 of 7 rows left out: answers of one token only ({path}:6)",
        f"1 of 7 rows left out: broken ({path}:5)",
        f"1 of 7 rows left out: the mask token occurs ({path}:4)",
    ]
    listed = [line.partition(" ")[0] for line in tally.listing(4).splitlines()]
    assert listed == [f"{path}:{line}" for line in (1, 2, 2, 3, 6, 5, 4)]
    assert Tally(rows=6).summary(4) == ""


def test_padding_adds_rows_without_documents() -> None:
    batch = PackedData(numbered([5, 9, 3]), 12, seed=0).batch(0, 2)
    padded = batch.padded(5)
    assert len(padded.token_RT) == 5 and len(list(padded.documents())) == len(list(batch.documents()))
    assert (padded.document_RT[2:] == -1).all() and not padded.written_RT[2:].any()


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none"):
        read_documents([tmp_path / "none.jsonl"], 10, 50)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="no row"):
        read_documents([tmp_path / "empty.jsonl"], 10, 50)


def test_prefetch_makes_the_next_item_early() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number * number

    prefetch = Prefetch(make, stride=3)
    assert [prefetch.take(number) for number in (1, 4, 7, 20, 23)] == [1, 16, 49, 400, 529]
    prefetch.pool.shutdown()
    assert made == [1, 4, 7, 10, 20, 23, 26]


@given(st.permutations(range(6)), st.permutations(range(4)))
def test_documents_do_not_depend_on_the_order_of_rows(
    tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int]
) -> None:
    """Killed runs and runs with several processes write rows in another order. Files and rows without an id keep
    theirs."""

    def write(name: str, rows: list[dict[str, object]]) -> Path:
        path = folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def row(number: int) -> dict[str, object]:
        return {"id": f"p{number}", "token_ids": [number] * (3 + number), "spans": [[1, 3 + number]]}

    folder = tmp_path_factory.mktemp("rows")
    nameless = {"token_ids": [9, 8, 7], "spans": [[0, 3]]}, {"token_ids": [7, 8, 9], "spans": [[0, 3]]}
    paths = [write("b.jsonl", [row(i) for i in first]), write("a.jsonl", [*nameless, *(row(10 + i) for i in second)])]
    found = read_documents(paths, 100, 100)
    told = [document.tokens.tolist() for document in found]
    assert told[:6] == [row(i)["token_ids"] for i in range(6)]
    assert told[6:8] == [one["token_ids"] for one in nameless]
    assert told[8:] == [row(10 + i)["token_ids"] for i in range(4)]
