"""N-grams: matches in a text, their union with a head's tree, and their hit rates, each against a slow count."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.config import TreeConfig
from jetspec.ops.select import force
from jetspec.tree import Acceptance, DraftTree, Matches, NgramTable, append, build_tree, learn, match, merge
from jetspec.tree.ngrams import LONGEST, MATCHES, MEMORY, PRIOR_MISSES, PRIOR_TRIALS, SHORTEST
from tests.tree.test_build import random_candidates
from tests.trees import validate

CPU = torch.device("cpu")
VOCAB = 6
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3)
seeds = st.integers(0, 10**6)


def table_of(
    rows: list[list[int]], room: int = 60, corpora: Sequence[list[int]] = ()
) -> tuple[NgramTable, torch.Tensor, torch.Tensor]:
    """Texts in the rows of a table, last first, each behind its corpus, with what the table held before."""
    table = NgramTable(len(rows), room, CPU, corpus_len=max(map(len, corpora), default=0))
    table.text_RT.random_(3)
    row_B = torch.arange(len(rows)).flip(0)
    for row, tokens, corpus in zip_longest(row_B.tolist(), rows, corpora):
        table.enter(row, torch.tensor(tokens), torch.tensor(corpus or [], dtype=torch.int32))
    return table, row_B, torch.tensor([len(tokens) - 1 for tokens in rows])


def bucket(depth: int) -> int:
    return next(i for i, most in enumerate((1, 2, 4, 8, 16)) if depth <= most)


def prior(length: int, depth: int) -> float:
    return (length + depth - 1) / (length + depth - 1 + PRIOR_MISSES)


def slow_matches(text: list[int], depth: int) -> list[tuple[int, list[int]]]:
    """Lengths and chains."""
    found = []
    for end in range(len(text) - 1):
        length = 0
        while length < LONGEST and length <= end and text[end - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= SHORTEST:
            chain = list(text[end + 1 :])
            for _ in range(depth):
                chain.append(chain[len(chain) - (len(text) - 1 - end)])
            found.append((length, end, chain[:depth]))
    found.sort(reverse=True)
    return [(length, chain) for length, _, chain in found[:MATCHES]]


@given(texts, st.lists(st.lists(st.integers(0, 2), max_size=20), min_size=3, max_size=3), st.integers(1, 16))
def test_matches_are_the_longest_then_the_most_recent(
    rows: list[list[int]], corpora: list[list[int]], depth: int
) -> None:
    """In the text and in the corpus of its row."""
    found = match(*table_of(rows, corpora=corpora[: len(rows)]), depth)
    for row, text in enumerate(rows):
        expected = slow_matches(corpora[row] + text, depth)
        assert found.length_BK[row].tolist() == [n for n, _ in expected] + [0] * (MATCHES - len(expected))
        for k, (length, chain) in enumerate(expected):
            assert found.token_BKD[row, k].tolist() == chain
            rates = [prior(length, d) for d in range(1, depth + 1)]
            assert found.rate_BKD[row, k].tolist() == pytest.approx(rates)
        assert not found.rate_BKD[row, len(expected) :].any()


# ---- trees ----


def slow_merge(
    tree: DraftTree, row: int, chains: list[tuple[list[int], list[float]]], budget: int, width: int
) -> list[tuple[tuple[int, ...], float, bool]]:
    """Paths of the best nodes of the union, in order, with their scores and whether n-grams alone proposed them."""
    assert tree.score_BN is not None
    steps: dict[tuple[int, ...], float] = {(): 0.0}
    place: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.size_B[row])):
        above = int(tree.parent_BN[row, node])
        paths.append((*paths[above], int(tree.token_BN[row, node])))
        steps[paths[node]] = float(tree.score_BN[row, node] - tree.score_BN[row, above])
        place[paths[node]] = node
    rates: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, hits in chains:
        for d, hit in enumerate(hits, 1):
            rates[tuple(tokens[:d])] = max(rates[tuple(tokens[:d])], hit)
            place.setdefault(tuple(tokens[:d]), 1000 + len(place))

    def step(path: tuple[int, ...]) -> float:
        own, rate = steps.get(path), rates.get(path)
        if own is None or rate is None:
            return math.log(rate) if own is None and rate is not None else own or 0.0
        prob = math.exp(own)
        return math.log(prob + rate - prob * rate)

    scores = {path: sum(step(path[:d]) for d in range(1, len(path) + 1)) for path in [(), *place]}
    ranked = sorted(place, key=lambda path: (-scores[path], len(path), place[path]))
    kept: list[tuple[int, ...]] = [()]
    siblings: dict[tuple[int, ...], int] = defaultdict(int)
    for path in ranked:
        siblings[path[:-1]] += 1
        if siblings[path[:-1]] <= width and path[:-1] in kept and len(kept) < budget:
            kept.append(path)
    return [(path, scores[path], path not in steps) for path in kept]


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.size_B[row])):
        paths.append((*paths[int(tree.parent_BN[row, node])], int(tree.token_BN[row, node])))
    return paths


def random_matches(seed: int, batch: int, depth: int, alphabet: int) -> Matches:
    """Random chains, some with a common beginning, some absent, with distinct rates."""
    rng = torch.Generator().manual_seed(seed)
    token = torch.randint(alphabet, (batch, MATCHES, depth), generator=rng)
    length = torch.randint(-2, LONGEST + 1, (batch, MATCHES), generator=rng)
    length = torch.where(length < SHORTEST, 0, length).sort(1, descending=True).values
    rate = 0.05 + 0.9 * torch.rand(batch, MATCHES, depth, generator=rng)
    return Matches(token, torch.where(length[..., None] > 0, rate, 0), length)


def random_problem(seed: int, batch: int, depth: int, config: TreeConfig, reach: int) -> tuple[DraftTree, Matches]:
    candidates = random_candidates(seed, batch, depth, VOCAB, ties=False, own=True)
    tree = build_tree(torch.arange(batch) % VOCAB, candidates, config, depth)
    return tree, random_matches(seed, batch, reach, 2 + seed % 5)


problems = st.tuples(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(2, 24), st.integers(1, VOCAB))
"""Seed, requests, depth of the head, budget, width."""


@settings(max_examples=200)
@given(problems, st.integers(1, 6))
def test_merged_tree_equals_a_slow_union(problem: tuple[int, int, int, int, int], reach: int) -> None:
    seed, batch, depth, budget, width = problem
    tree, matches = random_problem(seed, batch, depth, TreeConfig(budget=budget, width=width), reach)
    merged = merge(tree, matches, budget, width)
    validate(merged)
    for row in range(batch):
        chains = [
            (matches.token_BKD[row, k].tolist(), matches.rate_BKD[row, k].tolist())
            for k in range(MATCHES)
            if matches.length_BK[row, k]
        ]
        paths, scores, by_ngrams = zip(*slow_merge(tree, row, chains, budget, width), strict=True)
        size = int(merged.size_B[row])
        assert paths_of(merged, row) == list(paths)
        assert merged.score_BN is not None
        assert merged.score_BN[row, :size].tolist() == pytest.approx(scores, abs=1e-5)
        if merged.is_ngram_BN is not None:
            assert merged.is_ngram_BN[row, :size].tolist() == list(by_ngrams)


@given(problems)
def test_trees_without_matches_are_those_of_the_head(problem: tuple[int, int, int, int, int]) -> None:
    """Also in a batch in which another request has matches."""
    seed, _, depth, budget, width = problem
    candidates = random_candidates(seed, 2, depth, VOCAB, ties=True, own=False)
    tree = build_tree(torch.arange(2), candidates, TreeConfig(budget=budget, width=width), depth)
    found = random_matches(seed, 2, 5, VOCAB)
    here = torch.tensor([True, False])
    matches = Matches(
        found.token_BKD, found.rate_BKD * here[:, None, None], torch.where(here[:, None], found.length_BK, 0)
    )
    merged = merge(tree, matches, budget, width)
    validate(merged)
    size = int(tree.size_B[1])
    assert merged.size_B[1] == size
    for name in ("token_BN", "parent_BN", "depth_BN", "score_BN"):
        assert torch.equal(getattr(merged, name)[1, :size], getattr(tree, name)[1, :size]), name


# ---- rates ----


class SlowRates:
    """Hit rates of one text, counted one by one."""

    def __init__(self) -> None:
        self.trials: dict[tuple[int, int], float] = defaultdict(float)
        self.hits: dict[tuple[int, int], float] = defaultdict(float)

    def learn(self, chains: list[tuple[int, list[int]]], chosen: list[int]) -> None:
        trials: dict[tuple[int, int], int] = defaultdict(int)
        hits: dict[tuple[int, int], int] = defaultdict(int)
        for length, chain in chains:
            for depth, (token, choice) in enumerate(zip(chain, chosen, strict=False), 1):
                trials[length, bucket(depth)] += 1
                if token != choice:
                    break
                hits[length, bucket(depth)] += 1
        for cell, count in trials.items():
            self.trials[cell] = self.trials[cell] * MEMORY**count + count
            self.hits[cell] = self.hits[cell] * MEMORY**count + hits[cell]

    def rate(self, length: int, depth: int) -> float:
        cell = length, bucket(depth)
        return (PRIOR_TRIALS * prior(length, depth) + self.hits[cell]) / (PRIOR_TRIALS + self.trials[cell])


def grow(seed: int, rows: list[list[int]], rounds: int, depth: int) -> None:
    """Commit random tokens round by round, and compare matches and rates with slow counts."""
    rng = torch.Generator().manual_seed(seed)
    table, row_B, last_B = table_of([list(row) for row in rows], 40 + rounds * (depth + 1))
    rates = [SlowRates() for _ in rows]
    for _ in range(rounds):
        matches = match(table, row_B, last_B, depth)
        token = torch.randint(3, (len(rows), depth + 1), generator=rng)
        length = torch.randint(depth + 1, (len(rows),), generator=rng)
        path = torch.minimum(torch.arange(depth + 1), length[:, None])
        tree = DraftTree.chain(torch.zeros(len(rows), depth + 1, dtype=torch.int64))
        verdict = Acceptance(path, length, token[:, -1], token)
        chains = [slow_matches(text, depth) for text in rows]
        for row, text in enumerate(rows):
            for k, (n, chain) in enumerate(chains[row]):
                expected = [rates[row].rate(n, d) for d in range(1, depth + 1)]
                assert matches.rate_BKD[row, k].tolist() == pytest.approx(expected, abs=1e-5)
                assert matches.token_BKD[row, k].tolist() == chain
            committed = token[row, : int(length[row]) + 1].tolist()
            rates[row].learn(chains[row], committed)
            text += committed
        assert learn(table, row_B, matches, tree, verdict).tolist() == [0] * len(rows)
        append(table, row_B, last_B, token)
        last_B = last_B + length + 1


@given(seeds, texts, st.integers(1, 10))
def test_rates_equal_a_slow_count(seed: int, rows: list[list[int]], depth: int) -> None:
    grow(seed, rows, 4, depth)


@given(problems)
def test_accepted_tokens_of_ngrams_are_those_below_the_tree_of_the_head(
    problem: tuple[int, int, int, int, int],
) -> None:
    seed, _, depth, budget, width = problem
    tree, matches = random_problem(seed, 1, depth, TreeConfig(budget=budget, width=width), 5)
    merged = merge(tree, matches, budget, width)
    deepest = int(merged.depth_BN[0].argmax())
    path = [deepest]
    while path[0]:
        path.insert(0, int(merged.parent_BN[0, path[0]]))
    length = torch.tensor([len(path) - 1])
    path_BD1 = torch.tensor([path + path[-1:] * (merged.max_depth + 1 - len(path))])
    verdict = Acceptance.of(merged, path_BD1, length, torch.tensor([0]))
    known = set(paths_of(tree, 0))
    expected = sum(paths_of(merged, 0)[node] not in known for node in path)
    table, row_B, _ = table_of([[0]])
    assert learn(table, row_B, matches, merged, verdict).tolist() == [expected]


def test_a_text_that_enters_a_row_has_no_counts() -> None:
    table, row_B, last_B = table_of([[1, 2, 0, 1, 2]])
    found = match(table, row_B, last_B, 2)
    token = torch.tensor([[2, 2, 2]])
    verdict = Acceptance(torch.zeros_like(token), torch.tensor([2]), token[:, 0], token)
    learn(table, row_B, found, DraftTree.chain(token), verdict)
    assert match(table, row_B, last_B, 2).rate_BKD[0, 0, 0] < found.rate_BKD[0, 0, 0]
    table.enter(0, torch.tensor([1, 2, 0, 1, 2]))
    assert torch.equal(match(table, row_B, last_B, 2).rate_BKD, found.rate_BKD)


# ---- the kernels ----


def compare_merged(tree: DraftTree, matches: Matches, budget: int, width: int) -> None:
    """Equal trees with equal scores up to rounding. Paddings differ: a CPU omits them."""
    with force("reference"):
        expected = merge(tree, matches, budget, width)
    with force("triton"):
        merged = merge(tree, matches, budget, width)
    validate(merged)
    assert torch.equal(merged.size_B, expected.size_B)
    num_nodes = int(expected.size_B.max())
    assert expected.score_BN is not None and merged.score_BN is not None and merged.is_ngram_BN is not None
    real_BN = torch.arange(num_nodes, device=merged.size_B.device) < merged.size_B[:, None]
    by_ngrams_BN = torch.zeros_like(real_BN) if expected.is_ngram_BN is None else expected.is_ngram_BN[:, :num_nodes]
    assert torch.equal(merged.is_ngram_BN[:, :num_nodes] & real_BN, by_ngrams_BN & real_BN)
    for name in ("token_BN", "parent_BN", "depth_BN"):
        assert torch.equal(getattr(merged, name)[:, :num_nodes], getattr(expected, name)[:, :num_nodes]), name
    torch.testing.assert_close(merged.score_BN[:, :num_nodes], expected.score_BN[:, :num_nodes], rtol=1e-5, atol=1e-5)


def compare_matches(device: str, room: int, lengths: list[int], rounds: int, depth: int) -> None:
    """Matches, texts and counts of kernel and reference over some rounds of random tokens."""
    rng = torch.Generator().manual_seed(room)
    rows, corpora = (
        [torch.randint(3, (n,), generator=rng).tolist() for n in sizes] for sizes in (lengths, lengths[::-1])
    )
    tables = []
    for kernels in ("reference", "triton"):
        rng.manual_seed(7)
        table, row_B, last_B = table_of(rows, room, corpora)
        table.text_RT, table.count_R2LX = table.text_RT.to(device), table.count_R2LX.to(device)
        row_B, last_B, found = row_B.to(device), last_B.to(device), []
        with force(kernels):
            for _ in range(rounds):
                matches = match(table, row_B, last_B, depth)
                guess = torch.randint(3, (len(rows), depth + 1), generator=rng).to(device)
                right = torch.rand(guess.shape, generator=rng).to(device) < 0.8
                token = torch.where(right[:, :depth], matches.token_BKD[:, 0], guess[:, :depth])
                token = torch.cat((token, guess[:, depth:]), 1)
                length = torch.randint(depth + 1, (len(rows),), generator=rng).to(device)
                path = torch.minimum(torch.arange(depth + 1, device=device), length[:, None])
                tree = replace(DraftTree.chain(token), is_ngram_BN=token > 0)
                verdict = Acceptance(path, length, token[:, -1], token)
                found.append((*vars(matches).values(), learn(table, row_B, matches, tree, verdict)))
                append(table, row_B, last_B, token)
                last_B = last_B + length + 1
        tables.append((found, table))
    (expected, reference), (found, table) = tables
    for one, other in zip(found, expected, strict=True):
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    ends = table.end(last_B).tolist()
    assert all(
        torch.equal(table.text_RT[row, : end + 1], reference.text_RT[row, : end + 1])
        for row, end in zip(row_B.tolist(), ends, strict=True)
    )
    torch.testing.assert_close(table.count_R2LX, reference.count_R2LX, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 5, 16])
def test_kernels_match_and_learn_like_references(interpreter: Executor, depth: int) -> None:
    interpreter.submit(compare_matches, "cpu", 90, [1, 2, 12, 40], 2, depth).result()


SHAPES = [(2, 1, 1, 1), (9, 1, 4, 6), (12, 3, 3, 5), (40, 6, 3, 16)]


@pytest.mark.parametrize(("budget", "width", "depth", "reach"), SHAPES)
def test_kernel_merges_like_the_reference(
    interpreter: Executor, budget: int, width: int, depth: int, reach: int
) -> None:
    for seed in range(3):
        tree, matches = random_problem(seed, 2, depth, TreeConfig(budget=budget, width=width), reach)
        interpreter.submit(compare_merged, tree, matches, budget, width).result()


def on_gpu(values: Any) -> Any:
    """A dataclass with its tensors on a GPU."""
    return replace(values, **{k: v.cuda() for k, v in vars(values).items() if torch.is_tensor(v)})


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "budget", "width"), [(1, 64, 8), (32, 32, 8), (4, 16, 1), (2, 1024, 64)])
def test_kernels_on_a_gpu(batch: int, budget: int, width: int) -> None:
    for seed in range(20):
        tree, matches = random_problem(seed, batch, 12, TreeConfig(budget=budget, width=width), 16)
        compare_merged(on_gpu(tree), on_gpu(matches), budget, width)
    compare_matches("cuda", 9000, [1, 2, 12, 40, 3000, 8000], 8, 16)
