"""Paged tree attention against the definition, a loop over queries and the keys that each may see, and the Triton
kernel against the reference."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.ops import plan_attention, select, tree_attention
from jetspec.ops.layouts import MAX_BARRIER_PROGRAMS, barrier_counters, counters
from jetspec.ops.select import STAND_IN, Device, Facts, force
from jetspec.tree import pack_bits
from jetspec.types import BatchLayout, KVPages, TreeBatch
from tests.gluon import Blocks, Interpreted

HEADS, KV_HEADS, SIZE = 4, 2, 8


def scattered_batch(cached: list[int], counts: list[int], page_size: int, kind: str, seed: int) -> TreeBatch:
    """Requests whose pages lie in a random order, with in-flight tokens in a chain, in random trees or in cliques."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-(c + n) // page_size) for c, n in zip(cached, counts, strict=True))
    order = torch.randperm(width * len(cached), generator=generator).view(len(cached), width)
    position, slot, starts = [], [], [0]
    most = max(counts)
    visible = torch.zeros(len(cached), most, most, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(cached, counts, strict=True)):
        depth = [0] * count
        for node in range(count):
            parent = int(torch.randint(0, max(node, 1), (), generator=generator)) if kind == "tree" else node - 1
            if node:
                depth[node] = depth[parent] + 1
                visible[row, node] = visible[row, parent]
            visible[row, node, node] = True
        if kind == "clique":
            visible[row] = True  # also bits past the last node, which are ignored
        index = length + torch.arange(count)
        position.append(length + torch.tensor(depth, dtype=torch.int64))
        slot.append(order[row, index // page_size] * page_size + index % page_size)
        starts.append(starts[-1] + count)
    layout = BatchLayout(order, torch.tensor(cached), torch.tensor(starts), page_size, max(counts))
    bits, tokens = None if kind == "chain" else pack_bits(visible), torch.zeros(starts[-1], dtype=torch.int64)
    return TreeBatch(tokens, torch.cat(position), torch.cat(slot), layout, bits)


def naive(q: torch.Tensor, pages: KVPages, batch: TreeBatch, scale: float, window: int | None) -> torch.Tensor:
    layout, out, bits = batch.layout, torch.zeros_like(q), batch.ancestor_BNW
    starts, size, earlier = layout.query_start_B1.tolist(), layout.page_size, layout.earlier
    for row, cached in enumerate(layout.cached_len_B.tolist()):
        is_tree = batch.is_tree_B is None or bool(batch.is_tree_B[row])
        words = None if bits is None or not is_tree else bits[row]
        positions = [0] * earlier + batch.position_T[starts[row] : starts[row + 1]].tolist()
        for node in range(starts[row + 1] - starts[row]):
            token = starts[row] + node
            keys = [(i, i) for i in range(layout.first_seen, cached)]
            for other, position in enumerate(positions):
                is_seen = cached + other >= layout.first_seen and other <= node
                if is_seen if words is None else words[node, other // 32] >> (other % 32) & 1:
                    keys.append((cached + other, position))
            first = -1 if window is None else positions[earlier + node] - window
            index = torch.tensor([i for i, position in keys if position > first], dtype=torch.int64)
            page = layout.page_BP[row, index // size]
            k, v = pages.k[page, index % size], pages.v[page, index % size]
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                weight = (scale * k[:, group] @ q[token, head]).softmax(0)
                out[token, head] = weight @ v[:, group]
    return out


@settings(max_examples=80)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=4).filter(
        lambda requests: any(count for _, count in requests)
    ),
    page_size=st.integers(1, 7),
    kind=st.sampled_from(["chain", "tree", "clique", "some are chains", "last nodes of trees"]),
    window=st.sampled_from([None, 1, 3, 10, 100]),
    first_seen=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    requests: list[tuple[int, int]], page_size: int, kind: str, window: int | None, first_seen: int, seed: int
) -> None:
    cached, counts = map(list, zip(*requests, strict=True))
    if kind.startswith("last"):
        counts, window = [max(counts)] * len(counts), None
    made = scattered_batch(cached, counts, page_size, kind if kind in ("chain", "clique") else "tree", seed)
    q, pages = random_inputs(made, HEADS, KV_HEADS, SIZE)
    batch = replace(made, layout=replace(made.layout, first_seen=first_seen))
    if kind.startswith("some"):
        batch = with_chains(batch, [count == max(counts) or bool(count % 2) for count in counts])
    if kind.startswith("last"):
        batch = last_nodes(batch, 1 + seed % max(counts))
        q = q.unflatten(0, (len(cached), -1))[:, -batch.layout.max_queries :].flatten(0, 1)
    plan = plan_attention(batch)
    for own in {window, None}:  # one plan serves layers of every window
        out = tree_attention(q, pages, plan, 0.3, own)
        torch.testing.assert_close(out, naive(q, pages, batch, 0.3, own), atol=1e-5, rtol=1e-4)


def last_nodes(batch: TreeBatch, count: int) -> TreeBatch:
    """The last nodes of equally large trees; earlier forwards left the nodes before them in flight."""
    rows, most = len(batch.layout.cached_len_B), batch.layout.max_queries
    starts = torch.arange(rows + 1) * count
    layout = replace(batch.layout, query_start_B1=starts, max_queries=count, earlier=most - count)
    flat = (batch.token_T, batch.position_T, batch.slot_T)
    token, position, slot = (x.view(rows, most)[:, -count:].flatten() for x in flat)
    assert batch.ancestor_BNW is not None
    return TreeBatch(token, position, slot, layout, batch.ancestor_BNW[:, -count:])


def with_chains(batch: TreeBatch, flags: list[bool]) -> TreeBatch:
    """The same requests, some of them as chains, which may be longer than the masks of the trees."""
    assert batch.ancestor_BNW is not None
    counts = batch.layout.query_start_B1.diff()
    most = max(int(count) for count, is_tree in zip(counts, flags, strict=True) if is_tree)
    bits = batch.ancestor_BNW[:, :most, : -(-most // 32)].contiguous()
    return replace(batch, ancestor_BNW=bits, is_tree_B=torch.tensor(flags))


@pytest.mark.parametrize("min_run", [0, 1])
def test_kernel_mixes_trees_and_chains(interpreter: Executor, min_run: int) -> None:
    """With tables of 32-bit numbers, as in other engines."""
    batch = with_chains(scattered_batch([70, 0, 33, 1], [38, 75, 4, 20], 4, "tree", 0), [True, False, False, True])
    layout = replace(batch.layout, page_BP=batch.layout.page_BP.int(), query_start_B1=batch.layout.query_start_B1.int())
    q, pages = random_inputs(batch, 2, 1, 8)
    interpreter.submit(compare_interpreted, replace(batch, layout=layout), q, pages, None, min_run).result()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("min_run", [0, 1])
def test_kernel_sees_tokens_of_earlier_forwards(interpreter: Executor, count: int, min_run: int) -> None:
    batch = scattered_batch([70, 0, 33, 1], [38] * 4, 4, "tree", 0)
    q, pages = random_inputs(batch, 2, 1, 8)
    batch = last_nodes(batch, count)
    batch = replace(batch, layout=replace(batch.layout, first_seen=1))
    interpreter.submit(compare_interpreted, batch, q[: 4 * count], pages, None, min_run).result()


def random_inputs(
    batch: TreeBatch, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, KVPages]:
    """Queries, a slice of wider rows as a fused projection gives them, and pages."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch.layout.page_BP.numel(), batch.layout.page_size, kv_heads, size)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    wide = torch.randn(len(batch.token_T), heads + 2 * kv_heads, size, generator=generator)
    return wide.to(dtype)[:, :heads], KVPages(k, v)


def keep_used(pages: KVPages, batch: TreeBatch) -> KVPages:
    """Pages in which every slot that belongs to no request is NaN, so that reading one shows."""
    layout, size = batch.layout, batch.layout.page_size
    used = torch.zeros(pages.k.shape[:2], dtype=torch.bool).flatten()
    counts = layout.query_start_B1.diff() + layout.earlier
    for page_P, length in zip(layout.page_BP, (layout.cached_len_B + counts).tolist(), strict=True):
        index = torch.arange(length)
        used[page_P[index // size] * size + index % size] = True
    hole = ~used.view(pages.k.shape[:2])[:, :, None, None]
    return KVPages(pages.k.masked_fill(hole, torch.nan), pages.v.masked_fill(hole, torch.nan))


def compare_interpreted(
    batch: TreeBatch, q: Tensor, pages: KVPages, window: int | None, min_run: int = 1, tolerance: float = 1e-5
) -> None:
    """Both implementations; without a `min_run` nothing is split. Unwritten memory is NaN in tests."""
    torch.set_num_threads(1)
    kernel: Any = importlib.import_module("jetspec.ops.tree_attention_triton")
    choose_tiling = kernel._choose_tiling
    with pytest.MonkeyPatch.context() as patch, force("triton"):
        patch.setattr(kernel, "WARPS_PER_MULTIPROCESSOR", kernel.WARPS_PER_MULTIPROCESSOR if min_run else 0)
        patch.setattr(kernel, "_choose_tiling", lambda *shape: choose_tiling(*shape)._replace(min_run=max(min_run, 1)))
        out = tree_attention(q, keep_used(pages, batch), plan_attention(batch), 0.3, window)
    check_result(out, q, batch, pages, window, tolerance)


def compare_gluon(module: Any, batch: TreeBatch, q: Tensor, pages: KVPages) -> None:
    out = module.attend(q, keep_used(pages, batch), batch, 0.3, None, None)
    check_result(out, q, batch, pages, None, 1e-5)


def check_result(
    out: Tensor, q: Tensor, batch: TreeBatch, pages: KVPages, window: int | None, tolerance: float
) -> None:
    assert not counters(q.device).any() and not (barrier_counters(q.device) % MAX_BARRIER_PROGRAMS).any()
    expected = tree_attention(q, pages, plan_attention(batch), 0.3, window)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


RAGGED = ([70, 0, 33], [5, 40, 1], 4)
"""A long prefix with few queries, no prefix with more queries than a mask word has bits, a single one."""
SIZES = [(1, (2, 2, 16)), (4, (6, 2, 8)), (16, (4, 1, 24)), (7, (3, 1, 64))]
"""Pages and heads."""
CASES = [
    *product(("chain", "tree", "clique"), [RAGGED], [(2, 1, 8)], (None, 1, 7, 50), (0, 1, 2)),
    *((kind, ([31, 32], [9, 9], page), heads, 12, 1) for kind in ("chain", "tree") for page, heads in SIZES),
    *((kind, ([cached, 3], [1, 1], 4), (4, 2, 8), None, 1) for kind in ("chain", "tree") for cached in (0, 64, 200)),
]


@pytest.mark.parametrize(("kind", "requests", "heads", "window", "min_run"), CASES)
def test_kernel_equals_reference(
    interpreter: Executor, kind: str, requests: Any, heads: Any, window: int | None, min_run: int
) -> None:
    cached, counts, page_size = requests
    batch = scattered_batch(cached, counts, page_size, kind, 0)
    interpreter.submit(compare_interpreted, batch, *random_inputs(batch, *heads), window, min_run).result()


@pytest.mark.parametrize("min_run", [0, 1])
def test_kernel_is_launched_for_more_queries_than_there_are(interpreter: Executor, min_run: int) -> None:
    """Some requests have no queries."""
    batch = scattered_batch([70, 0, 33, 5, 0], [5, 0, 1, 20, 0], 4, "chain", 0)
    batch = replace(batch, layout=replace(batch.layout, max_queries=64))
    interpreter.submit(compare_interpreted, batch, *random_inputs(batch, 2, 1, 8), None, min_run).result()


@pytest.mark.parametrize("window", [None, 7])
def test_kernel_hides_first_positions_of_chains(interpreter: Executor, window: int | None) -> None:
    batch = scattered_batch([70, 0, 33, 0], [5, 40, 1, 1], 4, "chain", 0)
    batch = replace(batch, layout=replace(batch.layout, first_seen=1))
    interpreter.submit(compare_interpreted, batch, *random_inputs(batch, 2, 1, 8), window, 1).result()


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_kernel_takes_short_numbers(interpreter: Executor, kind: str) -> None:
    """fp16 in bf16's tiling: the interpreter has no products of bf16."""
    batch = scattered_batch([100, 5], [40, 40], 16, kind, 3)
    q, pages = random_inputs(batch, 4, 1, 16, torch.float16)
    interpreter.submit(compare_interpreted, batch, q, pages, None, tolerance=2e-3).result()


# -- the register-tiled kernel


@pytest.fixture
def register_tiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The register-tiled kernel, interpreted."""
    pytest.importorskip("triton")
    module = importlib.import_module("jetspec.ops.tree_attention_register_tiled_gluon")
    kernel = Interpreted(module._register_tiled_attention_kernel)
    monkeypatch.setattr(module, "_register_tiled_attention_kernel", kernel)
    return module


def with_multiprocessors(count: int) -> Any:
    return lambda device: STAND_IN._replace(multiprocessors=count)


@pytest.mark.parametrize("kind", ["chain", "tree", "clique"])
@pytest.mark.parametrize("keys", [(2, 32), (1, 64)])
@pytest.mark.parametrize(("splits", "together"), [(1, 1), (4, 4), (4, 1)])
def test_register_tiled_kernel_equals_reference(
    monkeypatch: pytest.MonkeyPatch, register_tiled: Any, kind: str, keys: tuple[int, int], splits: int, together: int
) -> None:
    """Ragged: many runs of keys, no prefix with more queries than a mask word has bits, one query, none at all."""
    register_tiled._register_tiled_attention_kernel.constants["AT_ONCE"] = together * 16 * 64 // (32 * keys[0])
    batch = scattered_batch([230, 0, 33, 5], [5, 70, 1, 0], 4, kind, 0)
    monkeypatch.setattr(register_tiled, "KEYS", {64: register_tiled.RegisterKeys(*keys)})
    monkeypatch.setattr(register_tiled, "device_of", with_multiprocessors(1000 * (splits - 1)))
    monkeypatch.setattr(register_tiled, "MAX_SPLITS", splits)
    kv_heads = 2 if kind == "tree" else 1
    compare_gluon(register_tiled, batch, *random_inputs(batch, 3 * kv_heads, kv_heads, 64))
    ((programs, used),) = register_tiled._register_tiled_attention_kernel.grids
    assert used == splits and programs == 4 * kv_heads * (-(-70 * 3 // 16))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("cached", [0, 64, 700])
def test_register_tiled_kernel_decodes_one_token(register_tiled: Any, size: int, cached: int) -> None:
    batch = scattered_batch([cached, 3], [1, 1], 16, "tree", 2)
    compare_gluon(register_tiled, batch, *random_inputs(batch, 4, 1, size))


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_register_tiled_kernel_hides_first_positions(register_tiled: Any, kind: str) -> None:
    batch = scattered_batch([90, 8, 0] if kind == "chain" else [90, 8, 7], [9, 9, 9], 4, kind, 1)
    batch = replace(batch, layout=replace(batch.layout, first_seen=7))
    compare_gluon(register_tiled, batch, *random_inputs(batch, 3, 1, 64))


# -- the warp-specialized kernel


@pytest.fixture
def warp_specialized(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The warp-specialized kernel, interpreted."""
    pytest.importorskip("triton")
    module = importlib.import_module("jetspec.ops.tree_attention_warp_specialized_gluon")
    kernel = Interpreted(module._warp_specialized_attention_kernel, together=True)
    monkeypatch.setattr(module, "_warp_specialized_attention_kernel", kernel)
    monkeypatch.setattr(module, "_pages", lambda x: Blocks(x.flatten(2).flatten(0, 1), (x.shape[1], 64)))
    return module


@pytest.mark.parametrize(
    ("size", "groups", "min_run", "kv_heads"), [(64, 2, 128, 1), (128, 1, 128, 1), (128, 2, 256, 2)]
)
@pytest.mark.parametrize(("splits", "kind"), [(1, "tree"), (4, "tree"), (4, "clique"), (4, "chain")])
def test_warp_specialized_kernel_equals_reference(
    monkeypatch: pytest.MonkeyPatch,
    warp_specialized: Any,
    kind: str,
    size: int,
    groups: int,
    min_run: int,
    kv_heads: int,
    splits: int,
) -> None:
    """Ragged: many blocks of keys, no prefix, a tree that begins within a word and ends within a page, none at all.
    Few keys, of two groups of warps, are not split; by a large `min_run` no keys are."""
    batch = scattered_batch([400, 0, 133, 5], [50, 70, 1, 0], 16, kind, 0)
    monkeypatch.setattr(warp_specialized, "MIN_RUN", min_run)
    monkeypatch.setattr(warp_specialized, "device_of", with_multiprocessors(1000 * (splits - 1)))
    monkeypatch.setattr(warp_specialized, "MAX_SPLITS", splits)
    monkeypatch.setattr(warp_specialized, "num_groups", lambda rows, capacity: groups)
    before = barrier_counters(batch.token_T.device).clone()
    compare_gluon(warp_specialized, batch, *random_inputs(batch, 3 * kv_heads, kv_heads, size))
    is_split = splits > 1 and min_run == 128
    assert torch.equal(barrier_counters(batch.token_T.device), before) != is_split, "few keys are not split"
    ((programs,),) = warp_specialized._warp_specialized_attention_kernel.grids
    runs = -(-batch.layout.page_BP.shape[1] * 16 // min_run)
    assert programs == min(splits, runs) * 4 * kv_heads * -(-70 * 3 // (groups * 64))


@pytest.mark.parametrize("size", [64, 128])
def test_programs_that_share_a_multiprocessor_have_fewer_keys_in_flight(
    monkeypatch: pytest.MonkeyPatch, warp_specialized: Any, size: int
) -> None:
    monkeypatch.setattr(warp_specialized, "device_of", with_multiprocessors(3))
    monkeypatch.setattr(warp_specialized, "STAGE_KEYS", {})
    batch = scattered_batch([600, 30], [16, 12], 16, "tree", 0)
    compare_gluon(warp_specialized, batch, *random_inputs(batch, 6, 2, size))
    assert warp_specialized._warp_specialized_attention_kernel.grids == [(4,)]


@pytest.mark.parametrize("multiprocessors", [4, 13, 132])
def test_programs_that_wait_for_each_other_run_at_once(
    monkeypatch: pytest.MonkeyPatch, warp_specialized: Any, multiprocessors: int
) -> None:
    """A process may be given a part of a GPU. As many programs meet as there are runs of keys, in turn."""
    monkeypatch.setattr(warp_specialized, "device_of", with_multiprocessors(multiprocessors))
    monkeypatch.setattr(warp_specialized, "MIN_RUN", 128)
    for cached in (500, 200, 500):
        batch = scattered_batch([cached], [60], 16, "tree", 0)
        batch = replace(batch, layout=replace(batch.layout, page_BP=F.pad(batch.layout.page_BP, (0, 64))))
        compare_gluon(warp_specialized, batch, *random_inputs(batch, 6, 2, 64))
    (programs,), *_ = warp_specialized._warp_specialized_attention_kernel.grids
    tiles = 2 * -(-60 * 3 // 64)
    assert programs % tiles == 0 and (programs == tiles or programs <= multiprocessors)


HOPPER = Device("cuda", (9, 0), 132, 228 * 1024)
VERIFY_FACTS = Facts(
    HOPPER,
    torch.bfloat16,
    query_rows=64 * 4,
    key_heads=8,
    head_size=128,
    page_size=16,
    capacity=4096,
    is_plain=True,
    sees_all=True,
)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "warp_specialized"),
        ({"page_size": 64, "head_size": 64}, "warp_specialized"),
        ({"capacity": 8192, "query_rows": 16 * 4}, "warp_specialized"),
        ({"query_rows": 16 * 4, "key_heads": 1000}, "warp_specialized"),  # each tile has keys of its own
        ({"capacity": 8192, "key_heads": 33, "query_rows": 128 * 4, "groups": 2}, "warp_specialized"),
        ({"key_heads": 34}, "portable"),  # too many tiles
        ({"query_rows": 32 * 4}, "portable"),  # too few tiles, too many rows for registers
        ({"page_size": 4}, "portable"),
        ({"page_size": 24}, "portable"),
        ({"head_size": 96}, "portable"),
        ({"is_contiguous": False}, "portable"),
        ({"is_plain": False}, "portable"),
        ({"dtype": torch.float32}, "portable"),
        ({"device": HOPPER._replace(capability=(10, 0))}, "portable"),
        ({"query_rows": 4}, "register_tiled"),
        ({"query_rows": 4, "sees_all": False}, "register_tiled"),
        ({"query_rows": 48, "device": HOPPER._replace(capability=(8, 0))}, "register_tiled"),
        ({"query_rows": 48, "device": HOPPER._replace(capability=(7, 5))}, "portable"),
        ({"query_rows": 4, "key_heads": 133}, "portable"),
    ],
)
def test_selection(changes: dict[str, Any], kernel: str) -> None:
    pytest.importorskip("triton")
    found = select._first("tree_attention", VERIFY_FACTS._replace(**changes))
    name = "tree_attention_triton" if kernel == "portable" else f"tree_attention_{kernel}_gluon"
    assert found is importlib.import_module(f"jetspec.ops.{name}").attend


@given(fitting=st.integers(0, 5000), max_queries=st.sampled_from([1, 256, 4096]), max_runs=st.integers(0, 500))
def test_splits_fill_the_gpu_and_no_more(fitting: int, max_queries: int, max_runs: int) -> None:
    pytest.importorskip("triton")
    kernel = importlib.import_module("jetspec.ops.tree_attention_triton")
    splits = kernel.choose_splits(fitting, max_queries, max_runs)
    assert splits == 1 or splits <= min(fitting, max_runs)
    if max_queries <= 256:
        assert 2 * splits > min(fitting, kernel.MAX_SPLITS, max_runs)


def on_gpu(
    host: TreeBatch, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, KVPages, TreeBatch]:
    """Queries, pages and the batch. Slots that belong to no request are NaN."""
    q, pages = random_inputs(host, heads, kv_heads, size, dtype)
    layout = {n: getattr(host.layout, n).cuda() for n in ("page_BP", "cached_len_B", "query_start_B1")}
    flat = {n: getattr(host, n).cuda() for n in ("token_T", "position_T", "slot_T")}
    bits = None if host.ancestor_BNW is None else host.ancestor_BNW.cuda()
    batch = TreeBatch(**flat, layout=replace(host.layout, **layout), ancestor_BNW=bits)
    used = keep_used(pages, host)
    return q.cuda(), KVPages(used.k.cuda(), used.v.cuda()), batch


def check_on_gpu(q: Tensor, pages: KVPages, batch: TreeBatch, window: int | None = None, out: Any = None) -> None:
    """The reference in float64 tells the result; weights and output of bf16 are rounded to 8 bits. By default the
    kernel runs twice, so that counters must be left as they were."""
    with force("reference"):
        wide = KVPages(pages.k.double().nan_to_num(), pages.v.double().nan_to_num())
        expected = tree_attention(q.double(), wide, plan_attention(batch), 0.1, window)
    tolerance = 1e-5 if q.dtype == torch.float32 else 1e-2
    found = [tree_attention(q, pages, plan_attention(batch), 0.1, window) for _ in range(2)] if out is None else [out]
    for result in found:
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def chosen_kernel(q: Tensor, pages: KVPages, batch: TreeBatch) -> str:
    found = select._first("tree_attention", select._read_attention(batch.token_T, q, pages, batch, None))
    assert found is not None
    return found.__module__


VERIFY = ([4000], [16], "tree", None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cached", "counts", "kind", "window", "dtype"),
    [
        (*VERIFY, torch.bfloat16),
        (*VERIFY, torch.float32),
        ([256, 1000, 6000, 13], [64] * 4, "tree", None, torch.bfloat16),
        ([1000], [256], "tree", 300, torch.bfloat16),
        ([100] * 20 + [1000] * 44, [1] * 64, "chain", None, torch.bfloat16),
        ([0, 300, 17], [1500, 77, 513], "chain", None, torch.bfloat16),
        ([0, 300, 17], [1500, 77, 513], "chain", 200, torch.bfloat16),
        ([0, 300], [1500, 77], "chain", 200, torch.float32),
    ],
)
def test_kernel_on_a_gpu(
    cached: list[int], counts: list[int], kind: str, window: int | None, dtype: torch.dtype
) -> None:
    check_on_gpu(*on_gpu(scattered_batch(cached, counts, 16, kind, 0), 32, 8, 128, dtype), window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nodes", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("requests", [1, 3, 6, 12, 24, 64])
def test_kernels_on_a_gpu_take_batches_of_every_size(requests: int, nodes: int, dtype: torch.dtype) -> None:
    """With any kernel, and with unused rows, which have no prefix."""
    cached = [0 if i % 5 == 4 else (37 * i) % 300 for i in range(requests)]
    check_on_gpu(*on_gpu(scattered_batch(cached, [nodes] * requests, 16, "tree", 0), 9, 3, 64, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunks", [2, 5, 17, 65])
def test_kernels_on_a_gpu_take_prompts_together(chunks: int, dtype: torch.dtype) -> None:
    """Most of them are empty in a batch that was captured for more chunks."""
    counts = [100, 30, 0, 55] if chunks > 4 else [100, 30]
    counts += [0] * (chunks - len(counts))
    host = scattered_batch([48, *[0] * (chunks - 1)], counts, 16, "chain", 0)
    q, pages, batch = on_gpu(host, 9, 3, 64, dtype)
    check_on_gpu(q, pages, replace(batch, layout=replace(batch.layout, max_queries=512)))


SERVED = {
    "register_tiled": (
        [(9, 3, 64), (8, 2, 128), (4, 4, 64)],
        [
            ([300], [48], "tree"),
            ([0], [64], "clique"),
            ([7], [1], "tree"),
            ([6000, 513], [1, 1], "chain"),
            ([2100], [16], "chain"),
            ([511, 4000], [17, 3], "tree"),
        ],
    ),
    "warp_specialized": (
        [(32, 8, 128), (24, 8, 64), (32, 8, 64)],
        [
            ([256], [128], "tree"),
            ([8150], [128], "tree"),
            ([8150, 256], [128, 128], "tree"),
            ([8150, 924], [128, 100], "tree"),
            ([2047], [86], "clique"),
            ([0, 5, 700, 6000], [64, 64, 3, 50], "tree"),
            ([300] * 4, [50] * 4, "tree"),
            ([9000], [16], "chain"),
            ([9000], [16], "clique"),
            ([16 * i for i in range(64)], [16] * 64, "tree"),
        ],
    ),
}
"""Heads and requests that a kernel serves."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "heads", "case"), [(k, h, c) for k, (hs, cs) in SERVED.items() for h in hs for c in cs]
)
def test_gluon_kernels_on_a_gpu(kernel: str, heads: Any, case: Any) -> None:
    cached, counts, kind = case
    inputs = on_gpu(scattered_batch(cached, counts, 16, kind, 0), *heads)
    assert kernel in chosen_kernel(*inputs)
    check_on_gpu(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "lengths"), [(VERIFY, (4000, 700, 0)), (([8100], [128], "tree", None), (8000, 900, 0, 8000))]
)
def test_a_captured_launch_serves_other_lengths(case: Any, lengths: tuple[int, ...]) -> None:
    cached, counts, kind, window = case
    q, pages, batch = on_gpu(scattered_batch(cached, counts, 16, kind, 0), 32, 8, 128)
    tree_attention(q, pages, plan_attention(batch), 0.1, window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(q, pages, plan_attention(batch), 0.1, window)
    for length in lengths:
        batch.layout.cached_len_B.fill_(length)
        graph.replay()
        check_on_gpu(q, pages, batch, window, out)
