"""Draft temperatures, and trees of the n-gram drafter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetspec.config import TreeConfig
from jetspec.engine.choices import ChoiceTable
from jetspec.engine.drafter import NgramDrafter, RoundState
from jetspec.models.choices import ChoiceFits, Fit, Weights
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


FITS = ChoiceFits((Fit(1.0, depths=(Weights(1.1, 0.8), Weights(0.9, 0.6, 0.5))),))


@pytest.mark.parametrize("fits", [ChoiceFits(), FITS], ids=["no fits", "fits"])
@pytest.mark.parametrize("greedy", [0.75, 1.0])
def test_choice_model_is_that_of_the_tree_or_the_request(fits: ChoiceFits, greedy: float) -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 0.5, 2.0)]
    entry_R = torch.zeros(4, dtype=torch.int64)
    table = ChoiceTable(fits, greedy, entry_R, 3)
    for row, sampling in enumerate(params):
        entry_R[row] = table.enter(row, sampling)
    table.flush()
    row_B, length_B = torch.arange(3), torch.tensor([4, 5, 6])
    of_greedy = table.model(row_B, RowSampling.of([SamplingParams()] * 3, [0] * 3, "cpu"), length_B, 2)
    assert (of_greedy is None) == (greedy == 1)
    assert of_greedy is None or of_greedy.temperature_BD.flatten().tolist() == [greedy] * 3
    mixed = table.model(row_B, RowSampling.of(params, [0] * 3, "cpu"), length_B, 2)
    assert mixed is not None and mixed.temperature_BD[0].tolist() == [greedy] * 2
    if not fits.fits:
        assert mixed.temperature_BD[:, 0].tolist() == [greedy, 0.5, 2.0] and mixed.weight_BD is None
        return
    assert mixed.weight_BD is not None and mixed.position_BD is not None
    assert mixed.position_BD.tolist() == [[5, 6], [6, 7], [7, 8]]
    torch.testing.assert_close(mixed.weight_BD, torch.tensor([[0.0, 0.0], [0.4, 0.3], [0.8, 0.6]]))
    torch.testing.assert_close(mixed.temperature_BD[1], torch.tensor([(greedy + 1.1) / 2, (greedy + 0.9) / 2]))


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
