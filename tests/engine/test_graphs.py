"""Captured rounds and prefills equal eager ones."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.lossless import FreshPass, find_differences, pair_noise, readings
from jetspec.capture import GraphPool
from jetspec.config import BatchTree, EngineConfig, Score, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.engine.llm import GPU_TREE
from jetspec.engine.runner import batch_sizes
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.types import SamplingParams
from tests.engine import test_prefill as prefills
from tests.engine import test_requests as requests
from tests.engine.test_engine import GREEDY, PROMPTS, SAMPLED, TRUTH
from tests.engine.tiny import (
    VOCAB,
    Script,
    engine_of,
    finish,
    make_engine,
    randomize,
    run,
    tiny_decoder,
    tiny_head,
    use,
)
from tests.grammar import test_constraint as constraints
from tests.rerun import replay_all


@given(st.integers(1, 5000))
def test_padding_of_batches_is_bounded(max_batch: int) -> None:
    sizes = batch_sizes(max_batch)
    assert sizes[0] == 1 and sizes[-1] == max_batch and sizes == sorted(set(sizes))
    assert all(after <= max(before + 1, before * 1.5) for before, after in pairwise(sizes))


@given(st.integers(1, 200), st.lists(st.integers(1, 250), unique=True, max_size=4))
def test_padding_never_makes_trees_smaller(max_batch: int, starts: list[int]) -> None:
    tree = TreeConfig(batch_trees=tuple(BatchTree(start, 20 - i) for i, start in enumerate(sorted(starts))))
    sizes = batch_sizes(max_batch, tree.batch_trees)
    assert sizes[-1] == max_batch
    for batch in range(1, max_batch + 1):
        assert tree.at(next(size for size in sizes if size >= batch)) == tree.at(batch)


@pytest.mark.parametrize(
    ("who", "overlap_rounds"), [("none", 1), ("head", 0), ("head", 3), ("edge", 1), ("eagle3", 1), ("peagle", 1)]
)
def test_replayed_prefills_and_rounds_equal_plain_decoding(
    who: str, overlap_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rounds are in flight before the first is read. Requests are preempted and have cached prefixes."""
    replay_all(monkeypatch)
    config = EngineConfig(page_size=4, max_batch=3, prefill_chunk=7, overlap_rounds=overlap_rounds, num_pages=30)
    engine = engine_of(tiny_decoder(), who, config=config)
    for sampling in (GREEDY, replace(SAMPLED, logprobs=2)):
        expected = TRUTH[GREEDY if sampling is GREEDY else SAMPLED]
        assert [done.token_ids for done in run(engine, PROMPTS, sampling)] == expected
    assert engine.graphs is not None and engine.graphs.num_captured > 3
    assert int(engine.cache.length_R[engine.cache.idle_row]) == 0


def test_interrupted_upload_of_rows_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_all(monkeypatch)
    target = tiny_decoder()
    engine = make_engine(target, "head", tiny_head(target), config=EngineConfig(page_size=4, max_batch=2))
    copy_, broken = Tensor.copy_, list[int]()

    def broken_off(self: Tensor, source: Tensor, **options: Any) -> Tensor:
        copied = copy_(self, source, **options)
        if source.dtype == torch.int64 and source.tolist() == [1] and not broken:
            broken.append(1)
            raise KeyboardInterrupt
        return copied

    run(engine, PROMPTS[:1], GREEDY)
    engine.add(PROMPTS[1], replace(GREEDY, max_tokens=2))
    last = engine.add(PROMPTS[2], GREEDY)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tensor, "copy_", broken_off)
        while engine.has_work:
            engine.step()
    assert finish(engine)[last].token_ids == TRUTH[GREEDY][2]


def test_live_graph_pools_have_distinct_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch assigns a small number of streams in rotation."""
    numbers = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(numbers)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(GraphPool, "in_use", WeakSet())
    kept = [GraphPool(torch.device("cuda")) for _ in range(5)]
    for _ in range(100):
        assert GraphPool(torch.device("cuda")).stream.cuda_stream not in {pool.stream.cuda_stream for pool in kept}
    kept += [GraphPool(torch.device("cuda")) for _ in range(27)]
    assert {pool.stream.cuda_stream for pool in kept} == set(range(32))
    assert GraphPool(torch.device("cuda")).stream.cuda_stream in range(32)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_paused_during_capture(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None)
    fakes = {"Stream": lambda device: stream, "current_stream": lambda device: stream, "graph_pool_handle": tuple}
    nothing = {"stream": nullcontext, "graph": lambda *_, **__: nullcontext(), "CUDAGraph": SimpleNamespace}
    for name, fake in (fakes | nothing).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    seen = list[bool]()
    if not collects:
        gc.disable()
    try:
        GraphPool(torch.device("cuda")).capture(lambda: seen.append(gc.isenabled()))
        assert seen == [collects, False] and gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("who", ["none", "ngram", "head", "bidirectional", "edge", "eagle3_few_tokens"])
def test_gpu_output_equals_cpu_output(who: str, execution: str, sampling: SamplingParams) -> None:
    target = tiny_decoder().cuda()
    smaller = BatchTree(2, 6, depth=2), BatchTree(4, 3), BatchTree(6, 1)
    for budget, batch, batch_trees in ((8, 3, ()), (40, 6, ()), (40, 6, smaller)):
        config = EngineConfig(page_size=4, max_batch=batch, execution=execution, num_pages=60)  # type: ignore[arg-type]
        tree = TreeConfig(budget=budget, width=4, batch_trees=batch_trees)
        engine = engine_of(target, who, tree, config)
        assert [c.token_ids for c in run(engine, PROMPTS, sampling)] == TRUTH[sampling]
        assert engine.cache.pool.num_available == engine.cache.pool.num_pages


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wide_trees_in_long_contexts_equal_plain_decoding(device: str) -> None:
    """Attention over many rows of long contexts has its own 16-bit kernel: ties are judged by the target alone. Most
    drafts are right, so that deep nodes count."""
    shape = DecoderConfig("qwen3", VOCAB, 256, 3, 16, 4, 64, 512, max_len=16_384, qk_norm=True)
    target = randomize(Decoder(shape), 1, 0.1).to(device, torch.bfloat16)
    sampling = SamplingParams(max_tokens=24)
    prompts = {str(n): [(n * i + i // 3) % VOCAB for i in range(n)] for n in (3, 40, 300)}
    config = EngineConfig(max_batch=3, cache_gb=0.5, execution="eager")
    plain = written(make_engine(target, config=config), prompts, sampling)
    engine = make_engine(target, tree=TreeConfig(budget=160), config=config)
    use(engine, Script({tuple(prompt): plain[name] for name, prompt in prompts.items()}, 0.9, budget=160))
    texts = written(engine, prompts, sampling)
    fresh = FreshPass(target, None, 400)
    noise = pair_noise(fresh, [(prompts[name], text) for name, text in plain.items()], 160)
    found = find_differences(prompts, plain, texts, readings(fresh), noise.widest_tie)
    assert all(difference.tie for difference in found), found
    assert noise.widest_tie < 0.5, "a test that excuses everything tests nothing"
    text = [*prompts["300"], *plain["300"]]
    for judge in readings(fresh):  # by the kernels, then by plain torch
        torch.testing.assert_close(judge(text), fresh.logits(text), atol=0.5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "tree",
    [TreeConfig(budget=16, depth=8), *(TreeConfig(budget=budget) for budget in (16, 32, 64, 128)), GPU_TREE],
    ids=lambda tree: f"{tree.budget}{', shrinking' * bool(tree.batch_trees)}",
)
def test_large_batches_equal_single_requests(tree: TreeConfig, dtype: torch.dtype) -> None:
    """Batches of every size up to 64, with the layer sizes of a small model: kernels depend on the size."""
    shape = DecoderConfig("llama", 512, 576, 3, 9, 3, 64, 1536, max_len=1024, windows=())
    target = randomize(Decoder(shape), 1, 0.1).to("cuda", dtype)
    layers = replace(shape, family="qwen3", num_layers=2, qk_norm=True)
    head = randomize(DraftHead(HeadConfig(layers, (0, 1), 2, block_size=16, edge=EdgeConfig(rank=32))), 3, 0.1)
    sampling = SamplingParams(max_tokens=24)
    prompts = {str(n): [(n * i + i // 3) % 512 for i in range(1 + n * 3)] for n in range(80)}
    plain = written(make_engine(target, config=EngineConfig(max_batch=1, max_len=400)), prompts, sampling)
    engine = make_engine(target, "head", head.to("cuda", dtype), tree, EngineConfig(max_batch=64, max_len=400))
    texts = written(engine, prompts, sampling)
    fresh = FreshPass(target, None, 400)
    noise = pair_noise(fresh, [(prompts[name], plain[name]) for name in ("3", "30", "70")], tree.budget)
    limit = noise.widest_tie if dtype == torch.bfloat16 else 1e-4
    found = find_differences(prompts, plain, texts, readings(fresh), limit)
    assert limit <= 0.5 and all(difference.tie for difference in found), found


def written(engine: Engine, prompts: dict[str, list[int]], sampling: SamplingParams) -> dict[str, list[int]]:
    done = run(engine, list(prompts.values()), sampling)
    return {name: completion.token_ids for name, completion in zip(prompts, done, strict=True)}


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: one runs the engine while the other is current"
)
def test_engines_run_on_any_gpu() -> None:
    """The current device does not matter."""
    for device in ("cuda:0", "cuda:1"):
        target = tiny_decoder().to(device)
        engine = make_engine(target, "head", tiny_head(target).to(device), config=EngineConfig(page_size=4))
        assert [c.token_ids for c in run(engine, PROMPTS, GREEDY)] == TRUTH[GREEDY]


@pytest.mark.gpu
@pytest.mark.parametrize("who", ["head", "ngram"])
def test_requests_join_and_leave_while_graphs_replay(who: str) -> None:
    target = tiny_decoder().cuda()
    engine = engine_of(target, who, config=EngineConfig(page_size=4, max_batch=5))
    waiting, names, done = list(enumerate(PROMPTS * 3)), {}, {}
    while waiting or engine.has_work:
        if waiting:
            index, prompt = waiting.pop(0)
            names[engine.add(prompt, GREEDY)] = index
        if len(waiting) == 7:
            engine.cancel(next(iter(engine.requests)))
        done.update({names[u.request_id]: u.completion for u in engine.step() if u.completion})
    assert len(done) >= len(PROMPTS) * 3 - 1
    for index, completion in done.items():
        assert completion.token_ids == TRUTH[GREEDY][index % len(PROMPTS)]
    assert int(engine.cache.length_R[engine.cache.idle_row]) == 0
    torch.cuda.synchronize()


LONG_PROMPTS = [[(seed * i * i + i) % 47 for i in range(seed + 1)] for seed in (1, 30, 31, 32, 33, 63, 64, 100, 5, 150)]
LONG_PROMPTS += [LONG_PROMPTS[-1][:90] + [7] * 12, LONG_PROMPTS[-1][:90] + [7] * 70]


DRAFTERS: list[tuple[str, Score]] = [(who, "accum_logp") for who in (*prefills.WHO, "ngram")]
DRAFTERS += [("head", "entropy"), ("head", "hybrid")]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [40, 128, 1000])
@pytest.mark.parametrize("who", prefills.WHO)
def test_replayed_prefills_write_the_same_cache(who: str, chunk: int) -> None:
    """For one and several chunks, whole prompts and parts, cached prefixes, and graphs captured with other prompts."""
    target = tiny_decoder().cuda()
    left = []
    for execution in ("eager", "graph"):
        config = EngineConfig(
            page_size=4, max_batch=5, prefill_chunk=chunk, num_pages=400, overlap_rounds=0, execution=execution
        )
        engine = engine_of(target, who, config=config)
        left.append([prefills.read_prompts(engine, LONG_PROMPTS[i:] + LONG_PROMPTS[:i]) for i in (0, 5)])
        assert (engine.graphs is not None and engine.graphs.num_captured > 1) == (execution == "graph")
    for expected, found in zip(*left, strict=True):
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("who", "score"), DRAFTERS, ids=lambda value: value)
def test_replayed_prefills_and_rounds_equal_eager_ones(who: str, score: Score) -> None:
    """Texts and accepted lengths equal those of an eager engine."""
    target, tree = tiny_decoder().cuda(), TreeConfig(budget=12, width=4, score=score)
    done = []
    for execution in ("eager", "graph"):
        config = EngineConfig(page_size=4, max_batch=4, prefill_chunk=70, execution=execution, num_pages=180)
        engine = engine_of(target, who, tree, config)
        assert engine.uses_graphs == (execution == "graph")
        done.append([run(engine, LONG_PROMPTS, GREEDY), run(engine, LONG_PROMPTS[::-1], GREEDY)])
    for expected, found in zip(*done, strict=True):
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert [c.stats.accepted_lengths for c in found] == [c.stats.accepted_lengths for c in expected]


@pytest.mark.gpu
@pytest.mark.parametrize("who", prefills.WHO)
def test_prefill_does_not_synchronize(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except to time it while nothing else runs."""
    target = tiny_decoder().cuda()
    config = EngineConfig(page_size=4, max_batch=4, prefix_cache=False, num_pages=200, execution="graph")
    engine = engine_of(target, who, config=config)
    prefills.read_prompts(engine, LONG_PROMPTS)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefills.read_prompts(engine, LONG_PROMPTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("who", ["none", "edge"])
@pytest.mark.parametrize("name", requests.SETTINGS)
def test_gpu_penalties_equal_cpu_penalties(name: str, who: str, execution: str) -> None:
    """Batches mix requests with and without penalties and log-probabilities."""
    target = tiny_decoder().cuda()
    config = EngineConfig(page_size=4, max_batch=4, execution=execution, num_pages=60)  # type: ignore[arg-type]
    engine = engine_of(target, who, TreeConfig(budget=12, width=4), config)
    penalized = replace(requests.SETTINGS[name], logprobs=3)
    params = [GREEDY if i % 3 == 2 else penalized for i in range(len(PROMPTS))]
    for i, completion in enumerate(run(engine, PROMPTS, params)):
        assert completion.token_ids == (TRUTH[GREEDY] if i % 3 == 2 else TRUTH[requests.SETTINGS[name]])[i]
        if i % 3 != 2:
            requests.check_logprobs(PROMPTS[i], completion, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_constrained_batches_run_eagerly_between_replays(execution: str) -> None:
    """A batch with constraints runs eagerly; before and after it rounds are replayed."""
    target = tiny_decoder().cuda()
    config = EngineConfig(page_size=4, max_batch=6, execution=execution, num_pages=100)  # type: ignore[arg-type]
    options: Any = {"eos_tokens": constraints.NO_END, "constrain": lambda _: constraints.Sums()}
    plain = make_engine(tiny_decoder(), **options)
    constrained = constraints.SETTINGS["greedy"]
    free = replace(GREEDY, max_tokens=40)
    params = [constrained if i % 2 else free for i in range(len(PROMPTS))]
    engine = make_engine(target, "head", tiny_head(target).cuda(), config=config, **options)
    done = run(engine, PROMPTS, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in run(plain, PROMPTS, params)]


@pytest.mark.gpu
def test_other_threads_may_use_the_gpu_while_a_graph_is_captured() -> None:
    """Another thread allocates more memory than was reserved, as a second model in the process may."""
    device, sizes = torch.device("cuda"), iter((2**28, 2**30))

    def ask() -> Tensor:
        return torch.empty(next(sizes), dtype=torch.uint8, device=device)

    def work() -> Tensor:
        with ThreadPoolExecutor(1) as other:
            other.submit(ask).result()
        return torch.ones(3, device=device) + 1

    graph, result = GraphPool(device).capture(work)
    graph.replay()
    assert result.tolist() == [2, 2, 2]
