"""The builders on the device return the tree of the heap, and that tree is the best one."""

from __future__ import annotations

import importlib
import itertools
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.config import MAX_BUDGET, MAX_DEPTH, MAX_WIDTH, Expand, Score, TreeConfig
from jetspec.ops.select import force
from jetspec.tree import Candidates, DraftTree, GrowingTree, build_tree, build_tree_reference
from jetspec.types import EdgeFactors
from tests.trees import validate

VOCAB = 6

seeds = st.integers(0, 10**6)
sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, VOCAB))
"""Requests, depth, shortlist."""
configs = st.builds(
    lambda score, **kw: TreeConfig(score=score, entropy_weight=0.3 if score == "hybrid" else 0.0, **kw),
    budget=st.one_of(st.integers(1, 24), st.just(400)),
    width=st.integers(1, VOCAB + 1),
    expand=st.sampled_from(get_args(Expand)),
    score=st.sampled_from(get_args(Score)),
)
logprob_configs = configs.filter(lambda config: config.score == "accum_logp")


@dataclass(frozen=True)
class LookupCandidates(Candidates):
    """Candidates looked up by parent in a table; `token_BDC` is not read."""

    token_BDVC: Tensor = field(kw_only=True)
    logprob_BDVC: Tensor = field(kw_only=True)

    def expand(
        self, depth: int, parent_BW: Tensor, width: int, state_BWS: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        row_B1 = torch.arange(len(parent_BW))[:, None]
        token_BWC = self.token_BDVC[row_B1, depth - 1, parent_BW]
        return token_BWC[..., :width], self.logprob_BDVC[row_B1, depth - 1, parent_BW][..., :width], state_BWS


def random_candidates(seed: int, batch: int, depth: int, shortlist: int, ties: bool, own: bool) -> Candidates:
    """Return distinct tokens with falling log-probabilities, some absent. `ties`: few values. `own`: per parent."""
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, depth, VOCAB, VOCAB)
    token = torch.rand(shape, generator=rng).argsort(-1)[..., :shortlist]
    logprob = (2 * torch.randn(shape, generator=rng)).log_softmax(-1)
    if ties:
        logprob = (logprob / 2).round() / 2
    absent = torch.rand(shape, generator=rng) < 0.15 * (seed % 3)
    logprob = logprob.masked_fill(absent, -torch.inf).sort(-1, descending=True).values[..., :shortlist]
    entropy = torch.rand(batch, depth, generator=rng)
    if ties:
        entropy = (entropy * 2).round() / 2
    shared = Candidates(token[:, :, 0], logprob[:, :, 0], entropy)
    if not own:
        return shared
    return LookupCandidates(shared.token_BDC, shared.logprob_BDC, entropy, token_BDVC=token, logprob_BDVC=logprob)


def one_request(candidates: Candidates, row: int) -> Candidates:
    mine: dict[str, Any] = {k: v[row : row + 1] for k, v in vars(candidates).items() if isinstance(v, Tensor)}
    return replace(candidates, **mine)


def heap_tree(anchor: int, candidates: Candidates, config: TreeConfig, depth: int, row: int = 0) -> DraftTree:
    mine = one_request(candidates, row)

    def children(d: int, parent: int) -> tuple[list[int], list[float]]:
        token_BWK, logprob_BWK = mine.children(d, torch.tensor([[parent]]), config.width)
        return token_BWK[0, 0].tolist(), logprob_BWK[0, 0].tolist()

    entropy = None if mine.entropy_BD is None else mine.entropy_BD[0].tolist()
    return build_tree_reference(anchor, children, config, depth, entropy)


def assert_same(tree: DraftTree, row: int, other: DraftTree, other_row: int = 0) -> None:
    """Assert equal nodes, bit by bit; paddings may differ in length."""
    size = int(tree.size_B[row])
    assert size == other.size_B[other_row]
    for name in ("token_BN", "parent_BN", "depth_BN", "score_BN"):
        assert torch.equal(getattr(tree, name)[row, :size], getattr(other, name)[other_row, :size]), name


@settings(max_examples=300)
@given(seeds, configs, sizes, st.booleans(), st.booleans())
def test_device_builder_equals_the_heap(
    seed: int, config: TreeConfig, size: tuple[int, int, int], ties: bool, own: bool
) -> None:
    batch, depth, _ = size
    candidates = random_candidates(seed, *size, ties, own)
    anchor_B = torch.arange(batch)
    tree = build_tree(anchor_B, candidates, config, depth)
    validate(tree)
    assert tree.token_BN.shape[1] <= config.budget
    for row in range(batch):
        assert_same(tree, row, heap_tree(row, candidates, config, depth, row))
        assert_same(tree, row, build_tree(anchor_B[row : row + 1], one_request(candidates, row), config, depth))


def grow(candidates: Candidates, batch: int, depth: int, width: int, frontier: int, budget: int) -> GrowingTree:
    tree = GrowingTree(torch.arange(batch), frontier, budget)
    for d in range(1, depth + 1):
        tree.extend(*candidates.children(d, tree.frontier_BW, width))
    return tree


@settings(max_examples=100)
@given(seeds, st.integers(1, 40), st.integers(1, VOCAB), sizes, st.booleans())
def test_growing_tree_with_a_wide_frontier_is_the_best_tree(
    seed: int, budget: int, width: int, size: tuple[int, int, int], ties: bool
) -> None:
    batch, depth, _ = size
    candidates = random_candidates(seed, *size, ties, own=True)
    grown = grow(candidates, batch, depth, width, frontier=budget, budget=budget).tree()
    best = build_tree(torch.arange(batch), candidates, TreeConfig(budget=budget, width=width), depth)
    validate(grown)
    for row in range(batch):
        assert_same(grown, row, best, row)


@settings(max_examples=100)
@given(seeds, st.integers(1, 40), st.integers(1, 4), sizes, st.booleans())
def test_growing_tree_of_a_smaller_budget_is_a_prefix(
    seed: int, budget: int, frontier: int, size: tuple[int, int, int], ties: bool
) -> None:
    batch, depth, width = size
    candidates = random_candidates(seed, *size, ties, own=True)
    growing = grow(candidates, batch, depth, width, frontier, budget=40)
    small, large = growing.tree(budget), growing.tree()
    validate(small)
    validate(large)
    alone = grow(candidates, batch, depth, width, frontier, budget).tree()
    for row in range(batch):
        assert_same(small, row, alone, row)
        kept = int(small.size_B[row])
        assert torch.equal(small.token_BN[row, :kept], large.token_BN[row, :kept])
        assert torch.equal(small.parent_BN[row, :kept], large.parent_BN[row, :kept])


@settings(max_examples=60)
@given(seeds, configs, sizes, st.integers(1, 24))
def test_smaller_budget_gives_a_prefix(seed: int, config: TreeConfig, size: tuple[int, int, int], budget: int) -> None:
    batch, depth, _ = size
    candidates = random_candidates(seed, *size, ties=True, own=False)
    tree = build_tree(torch.arange(batch), candidates, config, depth)
    smaller = build_tree(torch.arange(batch), candidates, replace(config, budget=min(budget, config.budget)), depth)
    for row in range(batch):
        assert_same(smaller, row, replace(tree, size_B=tree.size_B.clamp(max=smaller.token_BN.shape[1])), row)


@pytest.mark.parametrize("expand", get_args(Expand))
@pytest.mark.parametrize(
    ("budget", "width", "depth", "num_nodes"),
    [(1, 3, 4, 1), (2, 1, 1, 2), (9, 1, 4, 5), (3, 1, 4, 3), (400, 3, 3, 40), (7, 6, 3, 7)],
)
def test_trees_have_no_needless_padding(expand: Expand, budget: int, width: int, depth: int, num_nodes: int) -> None:
    candidates = random_candidates(0, 2, depth, VOCAB, ties=False, own=False)
    tree = build_tree(torch.tensor([1, 2]), candidates, TreeConfig(budget=budget, width=width, expand=expand), depth)
    validate(tree)
    assert tree.token_BN.shape == (2, num_nodes) and tree.size_B.tolist() == [num_nodes] * 2
    if width == 1:
        assert torch.equal(tree.parent_BN[0], torch.arange(-1, num_nodes - 1).clamp(min=0))


def test_budget_1_needs_no_candidates() -> None:
    empty = Candidates(torch.empty(2, 0, 0, dtype=torch.long), torch.empty(2, 0, 0))
    tree = build_tree(torch.tensor([3, 4]), empty, TreeConfig(budget=1), 15)
    assert tree.token_BN.tolist() == [[3], [4]] and tree.max_depth == 0


def closed_subsets(tree: DraftTree, count: int) -> list[tuple[int, ...]]:
    """Return all sets of `count` nodes with the root that contain the parents of their nodes."""
    parents = tree.parent_BN[0].tolist()
    subsets = (({0} | set(rest)) for rest in itertools.combinations(range(1, len(parents)), count - 1))
    return [tuple(nodes) for nodes in subsets if all(parents[node] in nodes for node in nodes)]


@settings(max_examples=20)
@given(seeds, st.integers(2, 8), st.booleans())
def test_optimal_keeps_the_most_probability(seed: int, budget: int, own: bool) -> None:
    candidates = random_candidates(3 * seed, 1, 3, 2, ties=False, own=own)
    anchor_B = torch.tensor([0])
    everything = build_tree(anchor_B, candidates, TreeConfig(budget=15, width=2), 3)
    tree = build_tree(anchor_B, candidates, TreeConfig(budget=budget, width=2), 3)
    assert everything.score_BN is not None and tree.score_BN is not None
    prob_N = everything.score_BN[0].exp()
    best = max(float(prob_N[list(nodes)].sum()) for nodes in closed_subsets(everything, budget))
    assert float(tree.score_BN.exp().sum()) == pytest.approx(best, rel=1e-5)


@settings(max_examples=30)
@given(seeds, st.integers(2, 40), st.integers(1, VOCAB))
def test_paper_expands_few_nodes(seed: int, budget: int, width: int) -> None:
    candidates = random_candidates(3 * seed, 1, 8, VOCAB, ties=False, own=False)
    tree = build_tree(torch.tensor([0]), candidates, TreeConfig(budget=budget, width=width, expand="paper"), 8)
    expanded = -(-(budget - 1) // width)
    assert tree.depth_BN.max() <= expanded
    assert len(tree.parent_BN[0, 1:].unique()) <= expanded


def test_entropy_scores_need_entropies() -> None:
    candidates = replace(random_candidates(0, 1, 2, 3, ties=False, own=False), entropy_BD=None)
    with pytest.raises(ValueError, match="accum_logp"):
        build_tree(torch.tensor([0]), candidates, TreeConfig(score="entropy"), 2)


# ---- edges ----


def edge_candidates(seed: int, batch: int, depth: int, shortlist: int, scale: float = 1.0) -> tuple[Candidates, Tensor]:
    """Return candidates with an edge term, and the full logits of the head."""
    rng = torch.Generator().manual_seed(seed)
    logits_BDV = 2 * torch.randn(batch, depth, VOCAB, generator=rng)
    logprob_BDC, token_BDC = logits_BDV.log_softmax(-1).topk(shortlist)
    gate_BDR = torch.randn(batch, depth, 4, generator=rng)
    predecessor_VR, successor_VR = torch.randn(2, VOCAB, 4, generator=rng)
    edge = EdgeFactors(gate_BDR, predecessor_VR, scale * successor_VR)
    return Candidates(token_BDC, logprob_BDC, None, edge), logits_BDV


@settings(max_examples=30)
@given(seeds, st.integers(1, VOCAB))
def test_whole_vocabulary_as_shortlist_is_exact(seed: int, width: int) -> None:
    candidates, logits_BDV = edge_candidates(seed, 2, 3, VOCAB)
    assert candidates.edge is not None
    parent_BW = torch.tensor([[0, 3, 5], [1, 1, 2]])
    for d in (1, 2, 3):
        token_BWK, logprob_BWK = candidates.children(d, parent_BW, width)
        gated_BWR = candidates.edge.predecessor_VR[parent_BW] * candidates.edge.gate_BDR[:, d - 1, None]
        exact_BWV = (logits_BDV[:, d - 1, None] + gated_BWR @ candidates.edge.successor_VR.T).log_softmax(-1)
        torch.testing.assert_close(logprob_BWK, exact_BWV.topk(width).values, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(logprob_BWK, exact_BWV.gather(-1, token_BWK), atol=2e-5, rtol=1e-5)


@settings(max_examples=30)
@given(seeds, st.integers(1, VOCAB))
def test_edges_keep_the_mass_of_the_shortlist(seed: int, shortlist: int) -> None:
    candidates, _ = edge_candidates(seed, 2, 1, shortlist)
    token_BWK, logprob_BWK = candidates.children(1, torch.tensor([[0, 3], [1, 2]]), shortlist)
    mass_B1 = candidates.logprob_BDC[:, 0].exp().sum(-1, keepdim=True)
    torch.testing.assert_close(logprob_BWK.exp().sum(-1), mass_B1.expand(2, 2))
    assert torch.equal(token_BWK.sort(-1).values, candidates.token_BDC[:, :1].sort(-1).values.expand_as(token_BWK))


@settings(max_examples=30)
@given(seeds, logprob_configs, sizes)
def test_zero_edge_gives_the_tree_without_edges(seed: int, config: TreeConfig, size: tuple[int, int, int]) -> None:
    batch, depth, _ = size
    candidates, _ = edge_candidates(seed, *size, scale=0.0)
    tree = build_tree(torch.arange(batch), candidates, config, depth)
    plain = build_tree(torch.arange(batch), replace(candidates, edge=None), config, depth)
    for row in range(batch):
        assert_same(tree, row, plain, row)


@pytest.mark.parametrize("expand", get_args(Expand))
def test_building_needs_no_host_sync(expand: Expand) -> None:
    """Meta tensors have no values: reading one raises."""
    candidates, _ = edge_candidates(0, 2, 4, 5)
    assert candidates.edge is not None
    shapes = Candidates(
        token_BDC=candidates.token_BDC.to("meta"),
        logprob_BDC=candidates.logprob_BDC.to("meta"),
        edge=EdgeFactors(**{k: v.to("meta") for k, v in vars(candidates.edge).items()}),
    )
    tree = build_tree(torch.arange(2, device="meta"), shapes, TreeConfig(budget=12, width=3, expand=expand), 4)
    assert tree.token_BN.shape == (2, 12)


# ---- the kernels ----


def to(candidates: Candidates, device: str) -> Candidates:
    moved: dict[str, Any] = {k: v.to(device) for k, v in vars(candidates).items() if isinstance(v, Tensor)}
    if candidates.edge is not None:
        moved["edge"] = EdgeFactors(**{k: v.to(device) for k, v in vars(candidates.edge).items()})
    return replace(candidates, **moved)


def compare_builders(candidates: Candidates, config: TreeConfig, device: str = "cpu") -> None:
    """Compare kernel and torch to the last bit; with edges up to the rounding of scores."""
    batch, depth, _ = candidates.token_BDC.shape
    anchor_B, candidates = torch.arange(batch, device=device), to(candidates, device)
    with force("reference"):
        expected = build_tree(anchor_B, candidates, config, depth)
    with force("triton"):
        tree = build_tree(anchor_B, candidates, config, depth)
    validate(tree)
    tolerance = 0.0 if candidates.edge is None else 1e-5
    assert tree.max_depth == expected.max_depth
    for name in ("token_BN", "parent_BN", "depth_BN", "ancestor_BNW", "size_B"):
        torch.testing.assert_close(getattr(tree, name), getattr(expected, name), rtol=0, atol=0)
    torch.testing.assert_close(tree.score_BN, expected.score_BN, rtol=tolerance, atol=tolerance)


def score_config(score: Score, budget: int, width: int, expand: Expand) -> TreeConfig:
    return TreeConfig(budget, width, None, expand, score, entropy_weight=0.3 if score == "hybrid" else 0.0)


@pytest.mark.parametrize("expand", get_args(Expand))
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(("budget", "width"), [(4, 1), (16, 3)])
def test_kernel_equals_torch(interpreter: Executor, expand: Expand, score: Score, budget: int, width: int) -> None:
    for seed, ties in ((0, True), (1, True), (2, False)):
        candidates = random_candidates(seed, 1, 3, VOCAB, ties, own=False)
        interpreter.submit(compare_builders, candidates, score_config(score, budget, width, expand)).result()


def check_keys() -> None:
    """Keys of the extreme values of every field decode to them and rise in the order of nodes."""
    import triton
    import triton.language as tl

    kernel: Any = importlib.import_module("jetspec.tree.build_triton")

    def keys_kernel(node_ptr, key_ptr, read_ptr):  # type: ignore[no-untyped-def]
        node = tl.arange(0, 32)
        depth = tl.load(node_ptr + 32 + node).to(tl.int32)
        parent = tl.load(node_ptr + 64 + node).to(tl.int32)
        rank = tl.load(node_ptr + 96 + node).to(tl.int32)
        key = kernel._key(tl.load(node_ptr + node), depth, parent, rank)
        score, depth, parent, rank = kernel._read_key(key)
        tl.store(key_ptr + node, key)
        tl.store(read_ptr + node, score)
        tl.store(read_ptr + 32 + node, depth.to(tl.float32))
        tl.store(read_ptr + 64 + node, parent.to(tl.float32))
        tl.store(read_ptr + 96 + node, rank.to(tl.float32))

    ends = ((0.0, -1e-3, -1e9, -3e38), (0, MAX_DEPTH), (0, MAX_BUDGET - 1), (0, MAX_WIDTH - 1))
    node_4N = torch.tensor(list(itertools.product(*ends))).T.contiguous()
    key_N, read_4N = torch.empty(32, dtype=torch.int64), torch.empty(4, 32)
    keys_kernel.__globals__.update(tl=tl, kernel=kernel)
    triton.jit(keys_kernel)[(1,)](node_4N, key_N, read_4N)
    assert torch.equal(read_4N, node_4N) and (key_N.diff() > 0).all() and key_N[-1] < kernel.EMPTY.value


def test_keys_hold_every_node_of_the_largest_tree(interpreter: Executor) -> None:
    interpreter.submit(check_keys).result()


@pytest.mark.gpu
def test_deep_trees_on_a_gpu() -> None:
    token = torch.arange(VOCAB).expand(1, 600, VOCAB)
    logprob = torch.tensor([-1e-3, -0.5, -0.7, -2.0, -3.0, -4.0]).expand(1, 600, VOCAB)
    compare_builders(Candidates(token, logprob), TreeConfig(610, 2), "cuda")


def nan_candidates() -> Candidates:
    """Return candidates with NaN at the second depth."""
    candidates = random_candidates(0, 1, 3, VOCAB, ties=False, own=False)
    logprob_BDC = candidates.logprob_BDC.clone()
    logprob_BDC[:, 1] = torch.nan
    return replace(candidates, logprob_BDC=logprob_BDC)


@pytest.mark.parametrize("expand", get_args(Expand))
def test_kernel_treats_nan_as_absent(interpreter: Executor, expand: Expand) -> None:
    interpreter.submit(compare_builders, nan_candidates(), TreeConfig(12, 3, expand=expand)).result()


@pytest.mark.gpu
@pytest.mark.parametrize("expand", get_args(Expand))
def test_nan_is_absent_on_a_gpu(expand: Expand) -> None:
    compare_builders(nan_candidates(), TreeConfig(12, 3, expand=expand), "cuda")


@pytest.mark.parametrize("expand", get_args(Expand))
@pytest.mark.parametrize(("shortlist", "width", "scale"), [(1, 1, 1.0), (VOCAB, 3, 0.0), (VOCAB, VOCAB, 1.0)])
def test_kernel_ranks_children_by_their_edges(
    interpreter: Executor, expand: Expand, shortlist: int, width: int, scale: float
) -> None:
    candidates, _ = edge_candidates(width, 2, 3, shortlist, scale)
    absent_BDC = torch.rand(candidates.logprob_BDC.shape, generator=torch.Generator().manual_seed(width)) < 0.2
    for logprob_BDC in (candidates.logprob_BDC, candidates.logprob_BDC.masked_fill(absent_BDC, -torch.inf)):
        problem = replace(candidates, logprob_BDC=logprob_BDC)
        interpreter.submit(compare_builders, problem, TreeConfig(12, width, expand=expand)).result()


def wide_candidates(batch: int, depth: int, shortlist: int, rank: int, dtype: torch.dtype) -> Candidates:
    """Return candidates of the size of a real head; `rank` 0 omits the edges."""
    rng = torch.Generator().manual_seed(shortlist)
    logits_BDV = 2 * torch.randn(batch, depth, 5000, generator=rng)
    logprob_BDC, token_BDC = logits_BDV.log_softmax(-1).topk(shortlist)
    if not rank:
        return Candidates(token_BDC, logprob_BDC, torch.rand(batch, depth, generator=rng))
    predecessor_VR, successor_VR = 0.3 * torch.randn(2, 5000, rank, generator=rng)
    gate_BDR = torch.randn(batch, depth, rank, generator=rng)
    return Candidates(
        token_BDC, logprob_BDC, None, EdgeFactors(gate_BDR, predecessor_VR.to(dtype), successor_VR.to(dtype))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("expand", get_args(Expand))
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(("batch", "budget", "width"), [(1, 128, 8), (32, 64, 8), (4, 1024, 64)])
def test_search_on_a_gpu(expand: Expand, score: Score, batch: int, budget: int, width: int) -> None:
    candidates = wide_candidates(batch, 15, width, 0, torch.float32)
    compare_builders(candidates, score_config(score, budget, width, expand), "cuda")
