"""Committed text does not depend on the tree: greedy or sampled, it is the target's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.ops.select import force
from jetspec.tree import Acceptance, Candidates, DraftTree, accept, build_tree
from jetspec.types import RowSampling, SamplingParams

VOCAB = 5
Draft = Callable[[Tensor, int], DraftTree]
Accept = Callable[[DraftTree, Tensor, RowSampling, Tensor], Acceptance]


def sampling_rows(batch: int, params: SamplingParams) -> RowSampling:
    return RowSampling.of([params] * batch, list(range(batch)), "cpu")


def random_candidates(seed: int, batch: int, depth: int, device: torch.device | str = "cpu") -> Candidates:
    rng = torch.Generator().manual_seed(seed)
    logprob_BDV = torch.randn(batch, depth, VOCAB, generator=rng).log_softmax(-1)
    cut_BDV = torch.rand(logprob_BDV.shape, generator=rng) < 0.3
    logprob_BDC, token_BDC = logprob_BDV.masked_fill(cut_BDV, -torch.inf).sort(-1, descending=True)
    return Candidates(token_BDC.to(device), logprob_BDC.to(device))


def walk(tree: DraftTree, choices: list[int], row: int) -> tuple[list[int], int]:
    """Return the path of one row and its bonus. `choices[node]` is the target's token after that node."""
    path = [0]
    while True:
        found = [
            node
            for node in range(1, int(tree.size_B[row]))
            if tree.parent_BN[row, node] == path[-1] and tree.token_BN[row, node] == choices[path[-1]]
        ]
        if not found:
            return path, choices[path[-1]]
        path += found


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(1, VOCAB))
def test_greedy_equals_a_walk_node_by_node(seed: int, batch: int, depth: int, budget: int, width: int) -> None:
    config = TreeConfig(budget=budget, width=width)
    tree = build_tree(torch.zeros(batch, dtype=torch.long), random_candidates(seed, batch, depth), config, depth)
    logits_BNV = torch.randn(*tree.token_BN.shape, VOCAB, generator=torch.Generator().manual_seed(seed + 1))
    out = accept(tree, logits_BNV, sampling_rows(batch, SamplingParams()), torch.full((batch,), 9))
    token_BD1 = out.token_BD1
    assert out.path_BD1.shape == token_BD1.shape == (batch, tree.max_depth + 1)
    for row in range(batch):
        path, bonus = walk(tree, logits_BNV[row].argmax(-1).tolist(), row)
        padding = tree.max_depth + 1 - len(path)
        assert out.path_BD1[row].tolist() == path + path[-1:] * padding
        assert (int(out.length_B[row]), int(out.bonus_B[row])) == (len(path) - 1, bonus)
        drafts = tree.token_BN[row, path[1:]].tolist()
        assert token_BD1[row].tolist() == drafts + [bonus] * (padding + 1)


def test_acceptance_needs_no_host_sync() -> None:
    """Meta tensors have no values: reading one raises."""
    tree = random_tree(torch.zeros(2, dtype=torch.long, device="meta"), 0)
    logits_BNV = torch.empty(*tree.token_BN.shape, VOCAB, device="meta")
    sampling = RowSampling.of([SamplingParams(1.0, top_p=0.9)] * 2, [0, 1], "meta")
    out = accept(tree, logits_BNV, sampling, torch.zeros(2, dtype=torch.long, device="meta"))
    assert out.path_BD1.shape == (2, tree.max_depth + 1)


# ---- decoding with a table as the target ----


def target_table(seed: int = 0) -> Tensor:
    """Return logits of the next token given the last two, flat enough that every triple of tokens occurs often."""
    return 1.3 * torch.rand(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def decode(table_VVV: Tensor, draft: Draft, sampling: RowSampling, num_tokens: int, accept_: Accept = accept) -> Tensor:
    """Return the tokens that rounds of draft, verify and accept commit after the prompt (0, 0), one row per request."""
    batch = len(sampling.seed_B)
    text_BT = torch.zeros(batch, 2, dtype=torch.long)
    cached_len_B = torch.ones(batch, dtype=torch.long)
    for turn in range(num_tokens):
        last_B1 = cached_len_B[:, None]
        anchor_B1, before_B1 = text_BT.gather(1, last_B1), text_BT.gather(1, last_B1 - 1)
        tree = draft(anchor_B1[:, 0], turn)
        parent_token_BN = tree.token_BN.gather(1, tree.parent_BN)
        parent_token_BN[:, :1] = before_B1
        out = accept_(tree, table_VVV[parent_token_BN, tree.token_BN], sampling, cached_len_B)
        new_BD1 = out.token_BD1
        text_BT = torch.cat((text_BT, torch.zeros_like(new_BD1)), dim=1)
        text_BT.scatter_(1, last_B1 + 1 + torch.arange(new_BD1.shape[1]), new_BD1)
        cached_len_B = cached_len_B + out.length_B + 1
    return text_BT[:, 2 : 2 + num_tokens]


def root_only(anchor_B: Tensor, turn: int) -> DraftTree:
    return DraftTree.root(anchor_B)


def chain(anchor_B: Tensor, turn: int) -> DraftTree:
    return DraftTree.chain(torch.stack((anchor_B, anchor_B, (anchor_B + 1) % VOCAB, anchor_B), dim=1))


def random_tree(anchor_B: Tensor, turn: int) -> DraftTree:
    candidates = random_candidates(turn, len(anchor_B), 3, anchor_B.device)
    return build_tree(anchor_B, candidates, TreeConfig(budget=9, width=3), 3)


def full_tree(anchor_B: Tensor, turn: int) -> DraftTree:
    """Return all continuations of two tokens: each round commits three."""
    token_BDC = torch.arange(VOCAB).expand(len(anchor_B), 2, -1)
    even = Candidates(token_BDC, torch.full(token_BDC.shape, -1.0))
    return build_tree(anchor_B, even, TreeConfig(budget=1 + VOCAB + VOCAB**2, width=VOCAB), 2)


def unlikely_tree(anchor_B: Tensor, turn: int) -> DraftTree:
    """Return the anchor with one child: the target's least probable token."""
    worst_B = target_table()[0, anchor_B].argmin(-1)
    return DraftTree.chain(torch.stack((anchor_B, worst_B), dim=1))


drafts = pytest.mark.parametrize("draft", [root_only, chain, random_tree, full_tree, unlikely_tree])


def chi_square_excess(token_BT: Tensor, prob_X: Tensor) -> float:
    """Return the distance of the counts of whole rows from a distribution, in standard deviations (Wilson and Hilferty,
    1931)."""
    length = token_BT.shape[1]
    cell_B = (token_BT * VOCAB ** torch.arange(length)).sum(1)
    expected_X = prob_X * len(token_BT)
    assert expected_X.min() > 10
    statistic = ((cell_B.bincount(minlength=len(prob_X)) - expected_X) ** 2 / expected_X).sum()
    spread = 2 / (9 * (len(prob_X) - 1))
    return float(((statistic / (len(prob_X) - 1)) ** (1 / 3) - (1 - spread)) / spread**0.5)


def joint_of_three(table_VVV: Tensor) -> Tensor:
    """Return the joint probability of the first three tokens, the first one varying fastest."""
    p = table_VVV.softmax(-1)
    return torch.einsum("a,ab,abc->cba", p[0, 0], p[0], p).flatten()


@drafts
def test_sampled_tokens_follow_the_target(draft: Draft) -> None:
    sampling = sampling_rows(24_000, SamplingParams(temperature=1.0))
    token_BT = decode(target_table(), draft, sampling, 3)
    assert chi_square_excess(token_BT, joint_of_three(target_table())) < 4


def first_child(tree: DraftTree, logits_BNV: Tensor, sampling: RowSampling, cached_len_B: Tensor) -> Acceptance:
    """A wrong acceptance: it always keeps the anchor's first child."""
    kept_B = torch.ones_like(cached_len_B)
    path_BD1 = torch.stack((0 * kept_B, *[kept_B] * tree.max_depth), dim=1)
    return Acceptance.of(tree, path_BD1, kept_B, accept(tree, logits_BNV, sampling, cached_len_B).bonus_B)


@pytest.mark.parametrize("draft", [chain, full_tree])
def test_wrong_acceptance_is_detected(draft: Draft) -> None:
    sampling = sampling_rows(24_000, SamplingParams(temperature=1.0))
    token_BT = decode(target_table(), draft, sampling, 3, first_child)
    assert chi_square_excess(token_BT, joint_of_three(target_table())) > 10


@drafts
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.8), SamplingParams(1.5, top_k=4, top_p=0.9)])
def test_tree_does_not_change_the_text(draft: Draft, params: SamplingParams) -> None:
    sampling = sampling_rows(64, params)
    plain_BT = decode(target_table(1), root_only, sampling, 24)
    assert torch.equal(decode(target_table(1), draft, sampling, 24), plain_BT)


# ---- the kernel ----


def compare_walks(seed: int, batch: int, depth: int, budget: int, device: str = "cpu") -> None:
    """Compare kernel and reference on a tree with padding, for greedy and sampled requests."""
    anchor_B = torch.zeros(batch, dtype=torch.long, device=device)
    with force("reference"):
        tree = build_tree(anchor_B, random_candidates(seed, batch, depth, device), TreeConfig(budget, VOCAB), depth)
    rng = torch.Generator().manual_seed(seed)
    logits_BNV = torch.randn(*tree.token_BN.shape, VOCAB, generator=rng).to(device)
    cached_len_B = torch.randint(0, 5000, (batch,), generator=rng).to(device)
    params = [SamplingParams(0.0 if row % 2 else 1.0) for row in range(batch)]
    sampling = RowSampling.of(params, list(range(batch)), device)
    with force("reference"):
        expected = accept(tree, logits_BNV, sampling, cached_len_B)
    with force("triton"):
        found = accept(tree, logits_BNV, sampling, cached_len_B)
    for name in ("path_BD1", "length_B", "bonus_B", "token_BD1"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("batch", "depth", "budget"), [(1, 1, 1), (3, 2, 6), (2, 4, 23)])
def test_kernel_equals_reference(interpreter: Executor, seed: int, batch: int, depth: int, budget: int) -> None:
    interpreter.submit(compare_walks, seed, batch, depth, budget).result()


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "depth", "budget"), [(1, 15, 128), (64, 7, 60)])
def test_kernel_on_a_gpu(batch: int, depth: int, budget: int) -> None:
    compare_walks(0, batch, depth, budget, "cuda")
