"""Paged tree attention against the definition: a loop over queries and the keys that each may see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.ops import plan_attention, store_kv, tree_attention
from jetspec.types import BatchLayout, KVPages, TreeBatch

HEADS, KV_HEADS, SIZE = 4, 2, 8


def scattered_batch(cached: list[int], counts: list[int], page_size: int, kind: str, seed: int) -> TreeBatch:
    """Requests whose pages lie in a random order, with in-flight tokens in a chain or in random trees."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-(c + n) // page_size) for c, n in zip(cached, counts, strict=True))
    order = torch.randperm(width * len(cached), generator=generator).view(len(cached), width)
    position, slot, starts = [], [], [0]
    most = max(counts)
    visible = torch.zeros(len(cached), most, most, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(cached, counts, strict=True)):
        depth = [0] * count
        for node in range(count):
            parent = node - 1 if kind == "chain" else int(torch.randint(0, max(node, 1), (), generator=generator))
            if node:
                depth[node] = depth[parent] + 1
                visible[row, node] = visible[row, parent]
            visible[row, node, node] = True
        index = length + torch.arange(count)
        position.append(length + torch.tensor(depth))
        slot.append(order[row, index // page_size] * page_size + index % page_size)
        starts.append(starts[-1] + count)
    layout = BatchLayout(order, torch.tensor(cached), torch.tensor(starts), page_size, max(counts))
    bits = None
    if kind == "tree":
        words = torch.zeros(len(cached), most, -(-most // 32), dtype=torch.int64)
        for node in range(most):
            words[:, :, node // 32] |= visible[:, :, node].long() << (node % 32)
        bits = words.to(torch.int32)
    tokens = torch.zeros(starts[-1], dtype=torch.int64)
    return TreeBatch(tokens, torch.cat(position), torch.cat(slot), layout, bits)


def naive(q: torch.Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None) -> torch.Tensor:
    layout, out = batch.layout, torch.zeros_like(q)
    starts, size = layout.query_start_B1.tolist(), layout.page_size
    for row, cached in enumerate(layout.cached_len_B.tolist()):
        for node in range(starts[row + 1] - starts[row]):
            token = starts[row] + node
            position = int(batch.position_T[token])
            keys = [(i, i) for i in range(cached)]
            for other in range(starts[row + 1] - starts[row]):
                bits = batch.ancestor_BNW
                sees = other <= node if bits is None else bool(bits[row, node, other // 32] >> (other % 32) & 1)
                if sees:
                    keys.append((cached + other, int(batch.position_T[starts[row] + other])))
            index = torch.tensor([i for i, p in keys if window is None or p > position - window])
            page = layout.page_BP[row, index // size]
            k, v = pages.k[page, index % size], pages.v[page, index % size]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                weight = (scale * k[:, group] @ q[token, head]).softmax(0)
                out[token, head] = weight @ v[:, group]
    return out


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=4),
    page_size=st.integers(1, 7),
    kind=st.sampled_from(["chain", "tree"]),
    window=st.sampled_from([None, 1, 3, 10, 100]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    requests: list[tuple[int, int]], page_size: int, kind: str, window: int | None, seed: int
) -> None:
    batch = scattered_batch([c for c, _ in requests], [n for _, n in requests], page_size, kind, seed)
    torch.manual_seed(seed)
    shape = (batch.layout.page_BP.numel(), page_size, KV_HEADS, SIZE)
    pages = KVPages(torch.randn(shape), torch.randn(shape))
    k, v = torch.randn(len(batch.token_T), KV_HEADS, SIZE), torch.randn(len(batch.token_T), KV_HEADS, SIZE)
    store_kv(pages, k, v, batch.slot_T)
    q = torch.randn(len(batch.token_T), HEADS, SIZE)
    out = tree_attention(q, pages, plan_attention(batch), 0.3, window)
    torch.testing.assert_close(out, naive(q, pages, batch, 0.3, window), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_one_plan_serves_layers_of_every_window(kind: str) -> None:
    batch = scattered_batch([9, 4], [5, 5], 4, kind, 0)
    shape = (batch.layout.page_BP.numel(), 4, KV_HEADS, SIZE)
    pages = KVPages(torch.randn(shape), torch.randn(shape))
    q, plan = torch.randn(10, HEADS, SIZE), plan_attention(batch)
    for window in (None, 3, None, 6):
        out = tree_attention(q, pages, plan, 0.3, window)
        torch.testing.assert_close(out, naive(q, pages, batch, 0.3, window), atol=1e-5, rtol=1e-4)
