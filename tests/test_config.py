"""Tree settings per batch, and the values that are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.config import BatchTree, TreeConfig


def test_batch_trees_apply_from_their_batch_on() -> None:
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
    ("text", "name"),
    [
        *((text, "batch_trees") for text in ("8", "8:x", "8:16:4:2", "", "0:16", "16:8,8:16", "8:8,8:16")),
        ("8:0", "budget"),
        ("8:16:0", "depth"),
    ],
)
def test_invalid_batch_trees_are_rejected(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TreeConfig(batch_trees=BatchTree.parse(text))
