"""Settings mean what they say, and what cannot be meant is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.config import BatchTree, TreeConfig


def test_smaller_trees_begin_with_their_batch() -> None:
    tree = TreeConfig(64, width=6, batch_trees=BatchTree.parse("8:32,24:16:8"))
    assert [tree.at(batch).budget for batch in (1, 7, 8, 23, 24, 64)] == [64, 64, 32, 32, 16, 16]
    assert [tree.at(batch).depth for batch in (1, 8, 24)] == [None, None, 8]
    assert tree.at(24).width == 6 and TreeConfig(batch_trees=BatchTree.parse("none")).at(64) == TreeConfig()


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 64), st.integers(1, 9), st.integers(1, 16))
def test_no_batch_makes_a_tree_larger(budget: int, depth: int, other: int, other_depth: int, batch: int) -> None:
    tree = TreeConfig(budget, depth=depth, batch_trees=(BatchTree(8, other, other_depth),))
    shape = tree.at(batch)
    assert shape.budget <= budget and shape.depth is not None and shape.depth <= depth
    assert shape.at(batch) == shape or batch < 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8", "write BATCH:BUDGET"),
        ("8:x", "write BATCH:BUDGET"),
        ("8:16:4:2", "write BATCH:BUDGET"),
        ("", "write BATCH:BUDGET"),
        ("0:16", "batch of a shrink is 0"),
        ("8:0", "budget is 0"),
        ("8:16:0", "depth is 0"),
        ("16:8,8:16", "name each once, in order"),
        ("8:8,8:16", "name each once, in order"),
    ],
)
def test_what_is_no_shrink_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TreeConfig(batch_trees=BatchTree.parse(text))
