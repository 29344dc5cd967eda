"""Draft temperatures, and trees of the n-gram drafter."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from jetspec.config import TreeConfig
from jetspec.engine.drafter import DraftTemperature, NgramDrafter, RoundState
from jetspec.tree import DraftTree
from jetspec.types import Request, RowSampling, SamplingParams
from tests.trees import validate

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def state(rows: list[list[int]]) -> RoundState:
    params = SamplingParams()
    requests = [Request(i, tokens, len(tokens), params, 0, 99) for i, tokens in enumerate(rows)]
    for request in requests:
        request.row = len(rows) - request.id
    sampling = RowSampling.of([params] * len(rows), [0] * len(rows), "cpu")
    row_B = torch.tensor([request.row for request in requests])
    return RoundState(row_B, torch.tensor([t[-1] for t in rows]), sampling, requests)


def tree_of(batch: RoundState, tree: TreeConfig) -> DraftTree:
    drafter = NgramDrafter(tree, len(batch.requests) + 1, torch.device("cpu"))
    drafter.prepare(batch.requests)
    return drafter.build(batch, drafter.draft(batch))


def test_draft_temperature_is_that_of_the_tree_or_the_request() -> None:
    greedy, cpu = state([[1], [2], [3]]), torch.device("cpu")
    params = [SamplingParams(temperature=t) for t in (0.0, 0.5, 2.0)]
    mixed = replace(greedy, sampling=RowSampling.of(params, [0] * 3, "cpu"))
    for draft_temperature in (0.75, 1.0):
        temperature = DraftTemperature(draft_temperature, cpu)
        of_mixed, of_greedy = temperature.of(mixed), temperature.of(greedy)
        assert of_mixed is not None and of_mixed.tolist() == [draft_temperature, 0.5, 2.0]
        assert (of_greedy is None) == (draft_temperature == 1)
        assert of_greedy is None or of_greedy.tolist() == [draft_temperature] * 3


@given(st.lists(texts, min_size=1, max_size=3), st.integers(2, 20), st.integers(1, 3), st.integers(1, 6))
def test_every_ngram_path_occurs_in_the_text(rows: list[list[int]], budget: int, width: int, depth: int) -> None:
    tree = tree_of(state(rows), TreeConfig(budget=budget, width=width, depth=depth))
    validate(tree)
    for row, tokens in enumerate(rows):
        size = int(tree.size_B[row])
        assert size <= budget and int(tree.depth_BN[row].max()) <= depth
        parents = tree.parent_BN[row, 1:size].tolist()
        assert all(parents.count(p) <= width for p in parents)
        for node in range(1, size):
            path: list[int] = []
            at = node
            while at:
                path.insert(0, int(tree.token_BN[row, at]))
                at = int(tree.parent_BN[row, at])
            needle = tokens[-2:] + path
            starts = range(len(tokens) - len(needle) + 1)
            assert any(tokens[i : i + len(needle)] == needle for i in starts)


def test_a_long_match_outranks_a_recent_short_one() -> None:
    tokens = [1, 2, 3, 4, 9, 0, 3, 4, 8, 0, 1, 2, 3, 4]
    tree = tree_of(state([tokens]), TreeConfig(budget=2, width=1))
    assert tree.token_BN.tolist() == [[4, 9]]


def test_ngram_rows_are_overwritten() -> None:
    repeats, other = state([[1, 2, 3, 1, 2]]), state([[1, 2, 3, 4, 5]])
    drafter = NgramDrafter(TreeConfig(budget=16), 2, torch.device("cpu"))
    for batch, expected in ((repeats, [[2, 3, 1, 2]]), (other, [[5]])):
        drafter.prepare(batch.requests)
        assert drafter.build(batch, drafter.draft(batch)).token_BN.tolist() == expected
