"""The kernel that ranks a shortlist for every parent equals a stable sort per parent."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from dataclasses import replace

import pytest
import torch

from jetspec.config import TreeConfig
from jetspec.ops.select import force
from jetspec.tree import Candidates, build_tree
from jetspec.types import EdgeFactors
from tests.tree.test_build import to, wide_candidates
from tests.trees import validate


def compare(candidates: Candidates, width: int, tile: tuple[int, int, int] | None = None, exact: bool = True) -> None:
    """Compare for the parents of every depth. `tile` overrides the tiling. `exact`: the order must be equal, too."""
    assert candidates.edge is not None
    atol = 1e-4 if candidates.edge.successor_VR.dtype == torch.bfloat16 else 2e-5  # bf16 or fp32 factors
    module = importlib.import_module("jetspec.tree.edge_triton")
    batch, depth, _ = candidates.token_BDC.shape
    anchor_B = torch.arange(batch, device=candidates.token_BDC.device)
    tiling = None if tile is None else module.Tiling(*tile)
    index_BDCK, logprob_BDCK = module.edge_children_triton(anchor_B, candidates, width, depth, tiling)
    for d in range(1, depth + 1):
        parent_BW = candidates.token_BDC[:, d - 2] if d > 1 else anchor_B[:, None]
        rows = slice(0, parent_BW.shape[1])
        token_BWK, expected_BWK = candidates.children(d, parent_BW, width)
        found_BWK = logprob_BDCK[:, d - 1, rows]
        torch.testing.assert_close(found_BWK, expected_BWK, rtol=1e-5, atol=atol, equal_nan=True)
        if exact:
            token_BWC = candidates.token_BDC[:, d - 1, None].expand(-1, parent_BW.shape[1], -1)
            chosen_BWK = token_BWC.gather(-1, index_BDCK[:, d - 1, rows].long())
            assert torch.equal(chosen_BWK[expected_BWK > -torch.inf], token_BWK[expected_BWK > -torch.inf])


@pytest.mark.parametrize(("shortlist", "rank", "width"), [(1, 3, 1), (40, 20, 8), (70, 16, 3), (33, 5, 33)])
def test_children_of_all_parents_equal_a_sort(interpreter: Executor, shortlist: int, rank: int, width: int) -> None:
    """Shortlist and rank are no multiples of the tile."""
    candidates = wide_candidates(2, 3, shortlist, rank, torch.float32)
    interpreter.submit(compare, candidates, width, (16, 16, 16)).result()


@pytest.mark.parametrize("shortlist", [257, 512])
def test_children_of_long_shortlists_equal_a_sort(interpreter: Executor, shortlist: int) -> None:
    candidates = wide_candidates(1, 2, shortlist, 16, torch.float32)
    interpreter.submit(compare, candidates, 8).result()


def test_equal_children_keep_the_order_of_the_shortlist(interpreter: Executor) -> None:
    """Log-probabilities and edges have few values, so that children tie within a tile and across tiles."""
    candidates = wide_candidates(2, 3, 60, 4, torch.float32)
    assert candidates.edge is not None
    edge = EdgeFactors(*(x.sign() for x in vars(candidates.edge).values()))
    logprob_BDC = (2 * candidates.logprob_BDC).round() / 2
    for successor_VR in (edge.successor_VR, torch.zeros_like(edge.successor_VR)):
        tied = replace(candidates, logprob_BDC=logprob_BDC, edge=replace(edge, successor_VR=successor_VR))
        interpreter.submit(compare, tied, 8, (16, 16, 16)).result()


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_absent_and_nan_candidates_stay_so(interpreter: Executor, value: float) -> None:
    """Replace a few children of the first depth, most of the second, all of the third."""
    candidates = wide_candidates(1, 3, 40, 8, torch.float32)
    logprob_BDC = candidates.logprob_BDC.clone()
    for depth, kept in enumerate((37, 3, 0)):
        logprob_BDC[:, depth, kept:] = value
    interpreter.submit(compare, replace(candidates, logprob_BDC=logprob_BDC), 8, (16, 16, 16)).result()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "shortlist", "rank", "width"),
    [
        (1, 128, 64, 8),
        (8, 128, 64, 8),
        (1, 512, 128, 8),
        (2, 1000, 256, 8),
        (1, 512, 300, 64),
        (64, 257, 40, 5),
    ],
)
def test_children_on_a_gpu(dtype: torch.dtype, batch: int, shortlist: int, rank: int, width: int) -> None:
    compare(to(wide_candidates(batch, 15, shortlist, rank, dtype), "cuda"), width, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "shortlist"), [(1, 128), (8, 128), (1, 512), (2, 1024)])
def test_trees_with_edges_on_a_gpu(dtype: torch.dtype, batch: int, shortlist: int) -> None:
    """Scores agree up to rounding, which may exchange nodes that nearly tie."""
    candidates = to(wide_candidates(batch, 15, shortlist, 64, dtype), "cuda")
    anchor_B = torch.arange(batch, device="cuda")
    tree = build_tree(anchor_B, candidates, TreeConfig(128, 8), 15)
    validate(tree)
    with force("reference"):
        expected = build_tree(anchor_B, candidates, TreeConfig(128, 8), 15)
    torch.testing.assert_close(tree.score_BN, expected.score_BN, rtol=1e-4, atol=1e-4)
