"""Every kernel compiles for Hopper, and the compiled programs have the properties that make them fast."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from jetspec import ops
from jetspec.config import TreeConfig
from jetspec.ops import HeadNorm, KernelPlan, Residual, SlotRows, layouts, select
from jetspec.ops.moe import route
from jetspec.tree import (
    SUMS,
    Acceptance,
    Candidates,
    DraftTree,
    Drawn,
    NgramTable,
    append,
    build_tree,
    choose_nodes,
    learn,
    match,
    merge,
    tally_choices,
    walk,
)
from jetspec.types import BatchLayout, ChoiceModel, EdgeFactors, KVPages, RowSampling, SamplingParams, TreeBatch
from tests.kernels import compiled
from tests.ops.test_topk_logprob import random_choice

BF16, FP32 = torch.bfloat16, torch.float32
SMALL_SHARED, SHARED = 99 * 1024, 226 * 1024
"""Shared memory of a program on the smallest supported GPUs, and on Hopper; the last 1024 bytes are reserved."""


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return new(*shape, dtype=torch.int64)


def edge(batch: int, depth: int, vocab: int, rank: int, dtype: torch.dtype) -> EdgeFactors:
    return EdgeFactors(
        new(batch, depth, rank, dtype=FP32), new(vocab, rank, dtype=dtype), new(vocab, rank, dtype=dtype)
    )


def rotate(heads: int, size: int, normed: bool) -> None:
    tables, norm = (new(3, 1, size), new(3, 1, size)), HeadNorm(new(size), new(size), 1e-6) if normed else None
    ops.rotate_qkv(new(3, heads + 16, size), 8, tables, norm)
    ops.rotate_store(
        new(3, heads + 16, size), 8, tables, norm, KVPages(new(9, 16, 8, size), new(9, 16, 8, size)), ints(3)
    )


def copy_cache() -> None:
    pages = KVPages(*new(9, 16, 3, 128).chunk(2, -1))
    ops.store_kv(pages, new(7, 3, 64), new(7, 9, 64)[:, 6:], ints(7))
    ops.place(ints(9, 300), ints(9), ints(3), ints(3, 64), 16)
    path = torch.zeros(3, 16, dtype=torch.int64)
    ops.compact_kv(torch.empty(2, 1, 4, 16, 8, 128, dtype=BF16), path, path)
    ops.compact_rows(SlotRows.of(torch.empty(2, 64, 512, dtype=BF16)), path, path)


def choose(params: SamplingParams, vocab: int, dtype: torch.dtype) -> None:
    choose_nodes(new(2, 64, vocab, dtype=dtype), RowSampling.of([params] * 2, [0, 1], "meta"), ints(2, 64))


def walk_tree(nodes: int) -> None:
    bits = new(2, nodes, -(-nodes // 32), dtype=torch.int32)
    walk(DraftTree(ints(2, nodes), ints(2, nodes), ints(2, nodes), bits, ints(2), 15), ints(2, nodes))


def lookup(nodes: int) -> None:
    bits = new(2, nodes, -(-nodes // 32), dtype=torch.int32)
    tree = DraftTree(ints(2, nodes), ints(2, nodes), ints(2, nodes), bits, ints(2), 15, new(2, nodes, dtype=FP32))
    table = NgramTable(4, 5000, torch.device("meta"))
    matches = match(table, ints(2), ints(2), 15)
    merged = merge(tree, matches, nodes, 8)
    verdict = Acceptance(ints(2, 16), ints(2), ints(2), ints(2, 16))
    learn(table, ints(2), matches, merged, verdict)
    append(table, ints(2), ints(2), verdict.token_BD1)
    drawn = Drawn(ints(2), ints(2), ints(2), new(3, 15, dtype=FP32))
    tally_choices(new(3, 15, SUMS, dtype=FP32), drawn, tree, verdict)


def build(config: TreeConfig, rank: int = 0, shortlist: int = 256, batch: int = 1, dtype: torch.dtype = BF16) -> None:
    shape, factors = (batch, 15, shortlist), edge(batch, 15, 5000, rank, dtype) if rank else None
    build_tree(
        ints(batch), Candidates(ints(*shape), new(*shape, dtype=FP32), new(batch, 15, dtype=FP32), factors), config, 15
    )


def score(kind: layouts.LossKind) -> None:
    teacher = None if kind == "sft" else torch.zeros(4, 8, dtype=BF16)
    states, head = torch.zeros(8, 8, dtype=BF16), torch.zeros(50257, 8, dtype=BF16)
    label, teacher_of = (
        torch.zeros(8, dtype=torch.int64),
        None if teacher is None else torch.zeros(8, dtype=torch.int64),
    )
    with torch.enable_grad():
        states.requires_grad_()
        ops.distill_loss(states, teacher, head, label, torch.ones(8), kind=kind, teacher_of_R=teacher_of)


def mix(tokens: int, dtype: torch.dtype) -> None:
    routed = ops.Routed(new(tokens, 2048, dtype=dtype), ints(tokens, 8), new(tokens, 8, dtype=dtype))
    weights = new(128, 1536, 2048, dtype=dtype), new(128, 2048, 768, dtype=dtype)
    ops.add_mixture(new(tokens, 2048, dtype=dtype), routed, *weights, new(tokens, 2048, dtype=dtype))


def product(rows: int, size: int, inner: int, kind: str) -> None:
    """The first product of an MLP (gated), or the last."""
    if kind == "gated":
        begun = (
            Residual(new(rows, size), new(rows, size), new(100, rows, dtype=FP32))
            if rows > 1
            else Residual(new(1, size))
        )
        ops.norm_swiglu(begun, new(size), 1e-5, new(2 * inner, size), new(2 * inner))
    else:
        ops.add_linear(new(rows, size), new(rows, inner), new(size, inner), None, new(size), new(rows, size))


def shortlist(rank: int, dtype: torch.dtype, model: str) -> None:
    choice = None if model == "none" else ChoiceModel(new(1, 1, dtype=FP32))
    if model == "filtered":
        choice = random_choice(1, 15, True, "meta")
    ops.shortlist(new(1, 15, 49152, dtype=dtype), ints(1), edge(1, 15, 49152, rank, dtype), 256, 7, choice)


PLAIN: dict[str, Callable[[], object]] = {
    "norm": lambda: (ops.rms_norm(new(1, 576), new(576), 1e-5), ops.rms_norm(new(5000, 576), new(576), 1e-5)),
    "swiglu": lambda: ops.swiglu(new(3, 24576)),
    "rotate": lambda: rotate(32, 128, True),
    "rotate keys": lambda: rotate(0, 128, False),
    "rotate odd heads": lambda: rotate(32, 96, True),
    "cache": copy_cache,
    "copy": lambda: ops.copy_to_host(ints(700), ints(700)),
    "top k": lambda: ops.topk_logprob(new(1, 15, 151936), 128, ChoiceModel(new(1, 1, dtype=FP32))),
    "top k of many rows": lambda: ops.topk_logprob(new(960, 49152, dtype=FP32), 8),
    "greedy": lambda: choose(SamplingParams(), 49152, FP32),
    "filtered": lambda: choose(SamplingParams(1.0, top_k=5, top_p=0.9, min_p=0.1), 151936, BF16),
    "walk": lambda: walk_tree(128),
    "walk of a large tree": lambda: walk_tree(1024),
    "tree": lambda: build(TreeConfig(128, 8, None, "paper"), shortlist=8),
    "tree by entropy": lambda: build(TreeConfig(1024, 64, score="entropy"), shortlist=64),
    "n-grams": lambda: lookup(128),
    "n-grams of a large tree": lambda: lookup(1024),
    "tree by both": lambda: build(TreeConfig(128, 8, None, "paper", "hybrid", entropy_weight=0.3), 64, 128),
    "route": lambda: route(new(3, 512), 8, True, BF16),
    **{f"loss {kind}": partial(score, kind) for kind in get_args(layouts.LossKind)},
}


@pytest.mark.parametrize("case", PLAIN)
def test_kernels_compile(case: str) -> None:
    found = compiled(PLAIN[case])
    assert found and all("st.global" in kernel.ptx or "atom.global" in kernel.ptx for kernel in found)


def test_compaction_writes_after_a_barrier_behind_all_loads() -> None:
    kernels = [kernel.ptx for kernel in compiled(copy_cache) if kernel.name == "_compact_kernel"]
    assert len(kernels) == 2
    assert all(ptx.rindex("ld.global") < ptx.index("bar.sync") < ptx.index("st.global") for ptx in kernels)


def test_cosines_are_not_approximate() -> None:
    (kernel,) = compiled(lambda: ops.rope(ints(3), new(40, dtype=FP32), 1.0, BF16))
    assert "cos.approx" not in kernel.ptx


def test_time_is_that_of_the_device() -> None:
    (kernel,) = compiled(lambda: ops.note_time(ints(60), ints(1)))
    assert "%globaltimer" in kernel.ptx


@pytest.mark.parametrize(("tokens", "dtype"), [(1, BF16), (64, BF16), (64, FP32)])
def test_weights_of_experts_go_to_the_queue_of_the_tensor_cores(tokens: int, dtype: torch.dtype) -> None:
    """However few pairs there are."""
    group, *products, add = compiled(lambda: mix(tokens, dtype))
    assert "st.global" in group.ptx and "st.global" in add.ptx and len(products) == 2
    assert all("cp.async" in kernel.ptx and ("wgmma" in kernel.ptx) == (dtype == BF16) for kernel in products)


@pytest.mark.parametrize(
    ("dtype", "rank", "model"), [(BF16, 128, "greedy"), (BF16, 256, "filtered"), (FP32, 128, "none")]
)
def test_shortlists_use_tensor_cores_and_fit_small_gpus(dtype: torch.dtype, rank: int, model: str) -> None:
    """Without tensor cores an fp32 product takes far longer than reading its factors."""
    assert rank <= select.MAX_RANK[dtype.itemsize]

    def run() -> None:
        shortlist(rank, dtype, model)

    found = compiled(run)
    assert all("st.global" in kernel.ptx for kernel in found)
    products = [kernel for kernel in found if kernel.name == "_children_kernel"]
    for kernel, small in zip(products, compiled(run, 89, "_children_kernel"), strict=True):
        assert "wgmma.mma_async" in kernel.ptx and fetches_early(kernel.ptx) and small.shared <= SMALL_SHARED


@pytest.mark.parametrize(
    ("dtype", "rank", "batch", "width", "wide"),
    [(BF16, 128, 1, 64, False), (BF16, 512, 64, 8, True), (FP32, 128, 1, 64, True)],
)
def test_children_are_ranked_on_tensor_cores(dtype: torch.dtype, rank: int, batch: int, width: int, wide: bool) -> None:
    ranking, *search = compiled(lambda: build(TreeConfig(128, width), rank, 256, batch, dtype))
    assert ("wgmma" if wide else "mma.sync") in ranking.ptx and ranking.shared <= 100 * 1024
    assert all("st.global" in kernel.ptx for kernel in search)


def fetches_early(ptx: str) -> bool:
    """Returns true if a kernel prefetches a weight before it waits."""
    return 0 < ptx.index("cp.async.bulk.prefetch.L2") < ptx.index("griddepcontrol.wait")


# -- products


@pytest.mark.parametrize("kind", ["gated", "added"])
def test_one_row_loads_its_weight_before_it_waits(kind: str) -> None:
    (kernel,) = compiled(lambda: product(1, 4096, 12288, kind))
    assert kernel.name == "_vector_linear_kernel"
    assert kernel.ptx.index("ld.global") < kernel.ptx.index("griddepcontrol.wait")


@pytest.mark.parametrize(
    ("rows", "size", "inner", "kind"), [(80, 2048, 2000, "gated"), (16, 1024, 2000, "gated"), (80, 576, 1536, "added")]
)
def test_small_weights_of_a_few_rows_are_fetched_early(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, inner: int, kind: str
) -> None:
    """Wide products go through the tensor cores' own queue (wgmma)."""
    monkeypatch.setattr(layouts, "SMALL_WEIGHT_BYTES", 2**30)
    with select.without("linear.register_tiled"):
        (kernel,) = compiled(lambda: product(rows, size, inner, kind))
    assert kernel.name == "_rows_linear_kernel" and fetches_early(kernel.ptx)
    assert "cp.async.bulk.tensor" in kernel.ptx and ("wgmma" in kernel.ptx) == (rows > 16)


@pytest.mark.parametrize(("inputs", "kind"), [(576, "gated"), (1408, "added"), (24, "added"), (1024, "gated")])
def test_register_tiled_product_loads_its_weight_before_it_waits(inputs: int, kind: str) -> None:
    """With one, two and three parts of K. Rows are loaded after it, and both go to the tensor cores directly."""
    gated = kind == "gated"
    (kernel,) = compiled(lambda: product(32, inputs, 1536, kind) if gated else product(32, 576, inputs, kind))
    before, after = kernel.ptx.split("griddepcontrol.wait")
    tiles, weights = layouts.register_tiles(inputs, gated), 4 if gated else 2  # of 8 outputs each, beside 16 rows
    assert tiles is not None and kernel.name == "_register_tiled_linear_kernel"
    steps = sum(tiles[1:]) // 16
    assert before.count("mma.sync") == 0 and after.count("mma.sync") == weights * steps
    assert loaded_registers(before) >= 2 * weights * steps and loaded_registers(after) >= 4 * steps


def loaded_registers(ptx: str) -> int:
    """32-bit registers that are filled by loads of 32-bit words."""
    found = re.findall(r"ld\.global(?:\.\w+)*?(?:\.(v[24]))?\.b32", ptx)
    return sum(int(vector[1:]) if vector else 1 for vector in found)


@pytest.mark.parametrize(
    ("kind", "inner", "halves"), [("gated", 12288, True), ("added", 4096, False), ("added", 14336, False)]
)
def test_warp_specialized_product_copies_weights_before_it_waits(kind: str, inner: int, halves: bool) -> None:
    """With half tiles and without; the last one is split."""
    (kernel,) = compiled(lambda: product(128, 4096, inner, kind))
    ptx = kernel.ptx
    assert "setmaxnreg" in ptx and "wgmma.wait_group" in ptx
    assert ptx.index("cp.async.bulk.tensor") < ptx.rindex("griddepcontrol.wait")
    assert ptx.count("wgmma.mma_async") == 2 * (2 if halves else 1) * (layouts.WARP_INPUTS // 16)


# -- attention


def attend(nodes: int, heads: int, size: int, capacity: int, **options: Any) -> Callable[[], object]:
    """Attention of a tree; options: requests, kv_heads, dtype, window, chain, and some requests as chains (mixed)."""
    requests, kv_heads = options.get("requests", 1), options.get("kv_heads", 8)
    dtype, pages, tokens = options.get("dtype", BF16), -(-capacity // 16), requests * nodes
    layout = BatchLayout(ints(requests, pages), ints(requests), ints(requests + 1), 16, nodes)
    bits = None if options.get("chain") else new(requests, nodes, -(-nodes // 32), dtype=torch.int32)
    is_tree = new(requests, dtype=torch.bool) if options.get("mixed") else None
    batch = TreeBatch(ints(tokens), ints(tokens), ints(tokens), layout, bits, is_tree)
    q, cache = new(tokens, heads, size, dtype=dtype), KVPages(*new(2, pages, 16, kv_heads, size, dtype=dtype))
    return lambda: ops.tree_attention(q, cache, KernelPlan(batch), 0.1, options.get("window"))


@pytest.mark.parametrize(
    ("run", "groups", "size", "block"),
    [
        (attend(64, 32, 64, 700, requests=4), 1, 64, 64),
        (attend(128, 32, 128, 9600), 2, 128, 128),
        (attend(64, 32, 128, 9600, requests=4, chain=True), 1, 128, 64),
    ],
)
def test_warp_specialized_attention_overlaps_products(run: Any, groups: int, size: int, block: int) -> None:
    """It fits into a multiprocessor. The next scores are multiplied while the softmax of the last block runs."""
    (kernel,) = compiled(run)
    assert "wgmma.wait_group.sync.aligned 1;" in kernel.ptx and "setmaxnreg" in kernel.ptx
    assert kernel.ptx.count("wgmma.mma_async") == groups * (size + 2 * block) // 16
    assert 0 < kernel.shared <= SHARED


REGISTER_CASES = {64: attend(1, 9, 64, 256, kv_heads=3, chain=True), 128: attend(16, 32, 128, 4096)}


@pytest.mark.parametrize("size", REGISTER_CASES)
def test_register_tiled_attention_loads_ahead(size: int) -> None:
    """Keys and values go from memory to tensor cores, the next keys are loaded before the last values are multiplied,
    and slots are looked up before the kernel waits."""
    (kernel,) = compiled(REGISTER_CASES[size])
    assert kernel.name == "_register_tiled_attention_kernel"
    keys = 4096 // size
    loads = keys * size // 32 // 8  # of keys, and of values, 16 bytes each
    before, after = kernel.ptx.split("griddepcontrol.wait")
    assert "ld.global.v4" not in before and after.count("ld.global.v4") == 3 * loads + size // 16
    between = after[after.index("mma.sync") : after.rindex("mma.sync")]
    assert between.count("ld.global.v4") == loads
    assert before.count("ld.global.b64") == 3 + keys // 8 + keys // 4
    assert after.count("mma.sync") == 2 * keys // 8 * size // 16


@pytest.mark.parametrize("capability", [89, 120])
def test_register_tiled_attention_fits_other_gpus(capability: int) -> None:
    (kernel,) = compiled(REGISTER_CASES[128], capability)
    assert kernel.name == "_register_tiled_attention_kernel" and 0 < kernel.shared <= SMALL_SHARED


@pytest.mark.parametrize(
    ("run", "has_tensor_cores"),
    [
        (attend(256, 32, 128, 4096, requests=2, mixed=True), True),
        (attend(64, 9, 64, 4096, kv_heads=3, window=100), True),
        (attend(2048, 32, 128, 4096, chain=True, window=100), True),
        (attend(16, 32, 128, 4096, dtype=FP32, requests=2, mixed=True), False),
    ],
)
def test_portable_attention_compiles(run: Any, has_tensor_cores: bool) -> None:
    (kernel,) = compiled(run)
    assert kernel.name == "_tree_attention_kernel" and ("mma" in kernel.ptx) == has_tensor_cores


@pytest.mark.parametrize(("size", "capability", "memory"), [(128, 89, 100), (256, 89, 100), (256, 90, 228)])
def test_tiles_of_attention_fit_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch, size: int, capability: int, memory: int
) -> None:
    """The last 1024 bytes are reserved."""
    pytest.importorskip("triton")
    device = select.STAND_IN._replace(shared_memory=memory * 1024)
    monkeypatch.setattr("jetspec.ops.tree_attention_triton.device_of", lambda _: device)
    (kernel,) = compiled(attend(2048, 32, size, 4096, chain=True), capability)
    assert 0 < kernel.shared <= (memory - 1) * 1024
