"""Measurements of `jetspec profile` on tiny models."""

from __future__ import annotations

import json
import math
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec import ops
from jetspec.config import EngineConfig, TreeConfig
from jetspec.engine.engine import Engine
from jetspec.engine.kv_cache import page_bytes
from jetspec.engine.scheduler import Scheduler
from jetspec.models.decoder import Decoder, DecoderConfig, MoEConfig
from jetspec.models.draft_head import DraftHead
from jetspec.models.weights import random_weights
from jetspec.ops.select import Kernels, force
from jetspec.profile import rounds as profile_module
from jetspec.profile.config import OpOptions
from jetspec.profile.floor import count_experts, plain_floor, round_floor
from jetspec.profile.operations import (
    DEPTH,
    OF_EXPERTS,
    OPERATIONS,
    PAGE_SIZE,
    Inputs,
    _max_difference,
    profile_operation,
)
from jetspec.profile.rounds import STAGES, Decoding, StandingRound, Workload, profile
from jetspec.profile.shapes import SHAPES, open_head
from jetspec.profile.timing import time_in_turns_ms
from jetspec.train.config import HeadShape
from jetspec.types import Request
from tests.commands.cli import run
from tests.train.tiny_model import write_model

CPU = torch.device("cpu")
DENSE = DecoderConfig("qwen3", 128, 32, 6, 4, 2, 16, 64, max_len=256, qk_norm=True)
SPARSE = replace(DENSE, moe=MoEConfig(8, 2, 16, True), moe_layers=(1, 3), tied_embedding=True)
LARGER = replace(SPARSE, vocab_size=4096, hidden_size=256, num_heads=8, head_dim=64, inner_size=512, max_len=2048)
LARGER = replace(LARGER, moe=MoEConfig(8, 2, 64, True))
TREE = TreeConfig(budget=12, width=4)
WORK = Workload(context=20, batch=2, rounds=3)


def models(
    config: DecoderConfig, device: torch.device = CPU, dtype: torch.dtype = torch.float32, edge: int = 0
) -> tuple[Decoder, DraftHead]:
    target = random_weights(Decoder, config, dtype, device)
    return target, open_head(target, None, HeadShape(num_layers=2, block_size=6, edge_rank=edge))


def inputs_of(config: DecoderConfig, **asked: Any) -> Inputs:
    return Inputs(config, torch.float32, CPU, OpOptions(**{"budget": 20, "context": 30, "batch": 2, **asked}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "target")


# -- shapes


def test_shapes_have_the_published_sizes() -> None:
    def billions(name: str) -> float:
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(SHAPES[name]).parameters()) / 1e9

    sizes = {"qwen3-8b": 8.19, "qwen3-30b-a3b": 30.53, "qwen3-0.6b": 0.596, "smollm2-135m": 0.1345}
    assert {name: billions(name) for name in SHAPES} == pytest.approx(sizes, rel=2e-3)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_random_weights_fill_the_model(config: DecoderConfig) -> None:
    target, head = models(config, dtype=torch.bfloat16, edge=4)
    for stack in (target, head):
        assert not any(p.is_meta or p.requires_grad or p.dtype != torch.bfloat16 for p in stack.parameters())
        torch.testing.assert_close(stack.inv_freq, config.rope.inv_freq(config.head_dim))
    assert (target.lm_head is target.embedding) == config.tied_embedding
    assert head.edge is not None and float(head.edge.successor.abs().max()) > 0


# -- rounds


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_profile_fields_are_consistent(config: DecoderConfig) -> None:
    found = profile(*models(config), TREE, WORK).to_dict()
    assert {"budget", "context", "batch", "step_ms", "max_len", "temperature", "bytes_plain"} <= set(found)
    assert tuple(found["stages_ms"]) == STAGES
    assert all(value > 0 for value in (*found["stages_ms"].values(), found["floor_round_ms"], found["floor_plain_ms"]))
    for kind in ("round", "plain"):
        assert found[f"ratio_{kind}"] == found[f"{kind}_ms"] / found[f"floor_{kind}_ms"]
        least, most = found[f"ratio_{kind}_range"]
        assert 0 < least <= most
    assert 0 <= found["idle_frac"] < 1
    assert found["read_round_ms"] * found["read_gb_per_s"] * 1e6 == pytest.approx(found["bytes_round"])
    assert 1 <= found["tokens_per_round"] <= 6
    assert (found["experts_round"] is None) == (config.moe is None)
    json.dumps(found)


@torch.inference_mode()
@pytest.mark.parametrize(("edge", "temperature"), [(0, 0.0), (4, 0.0), (0, 0.8)])
def test_stages_add_up_to_the_round(edge: int, temperature: float) -> None:
    """Stages give the same result as the whole round, and neither advances the batch."""
    decoding = Decoding(*models(DENSE, edge=edge), TREE, replace(WORK, temperature=temperature))
    still, table = StandingRound(decoding.engine), decoding.engine.cache.rows
    assert still.state.sampling.any_sampled == still.state.features.sampled == (temperature > 0)
    assert still.state.sampling.temperature_B.tolist() == pytest.approx(
        [temperature] * WORK.batch if temperature else []
    )
    before = table.length_R.clone(), table.anchor_R.clone()
    still.whole()
    for stage in STAGES:
        getattr(still, stage)()
    assert torch.equal(still.verdict.token_BD1, still.packed_BD3[:, 3:])
    assert torch.equal(still.verdict.length_B, still.packed_BD3[:, 0])
    assert int(table.length_R.sum()) == int(before[0].sum() + (still.verdict.length_B + 1).sum())
    still.rewind()
    assert torch.equal(table.length_R, before[0]) and torch.equal(table.anchor_R, before[1])


@torch.inference_mode()
def test_measuring_changes_no_output_and_frees_its_cache() -> None:
    texts = []
    for measures in (True, False):
        target, head = models(DENSE)
        decoding = Decoding(target, head, TREE, WORK)
        if measures:
            still = StandingRound(decoding.engine)
            still.stages_ms(5)
            still.times_beside("plain", plain_floor(target, WORK.batch, ()), (), 5)
            del still
        assert decoding.run(10)["step_ms"] > 0
        texts.append([request.tokens[:40] for request in decoding.engine.requests.values()])
        cache = weakref.ref(decoding.engine.cache)
        del decoding
        assert cache() is None
    assert texts[0] and texts[0] == texts[1]


@torch.inference_mode()
@pytest.mark.parametrize("max_len", [None, 100])
@pytest.mark.parametrize("batch", [1, 8])
def test_requests_have_the_default_length_and_enough_pages(max_len: int | None, batch: int) -> None:
    target, head = models(DENSE)
    config = EngineConfig(max_batch=batch, max_len=max_len)
    own = Engine(target, head, drafter="head", tree=TREE, config=config)
    engine = Decoding(target, head, TREE, Workload(context=20, batch=batch, rounds=1, max_len=max_len)).engine
    assert engine.max_len == own.max_len == (max_len or DENSE.max_len)
    assert engine.cache.page_RP.shape == own.cache.page_RP.shape
    saved = own.cache.pool.num_pages - engine.cache.pool.num_pages
    assert (saved > 0) == (batch > 1 and max_len is None)


@torch.inference_mode()
def test_cache_is_limited_to_the_default_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = models(DENSE)
    gb = 10 * page_bytes([target.config, head.config], PAGE_SIZE, torch.float32) / 2**30
    monkeypatch.setattr(profile_module, "CPU_CACHE_GB", gb)
    decoding = Decoding(target, head, TREE, replace(WORK, batch=1))
    config = EngineConfig(max_batch=1, cache_gb=gb)
    alone = Engine(target, head, drafter="head", tree=TREE, config=config)
    assert decoding.engine.cache.pool.num_pages == 10 and decoding.engine.max_len == alone.max_len < DENSE.max_len


@torch.inference_mode()
def test_context_with_two_free_positions_is_measured() -> None:
    loop = Decoding(*models(DENSE), TREE, Workload(context=DENSE.max_len - 2, batch=1, rounds=8)).run(8)
    assert loop["step_ms"] > 0 and loop["idle_frac"] == 0, "there is but one round"


@torch.inference_mode()
def test_idle_fraction_shows_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which a round takes a millisecond, and so does the time between two."""
    decoding, next_batch = Decoding(*models(DENSE), TREE, WORK), Scheduler.next_batch
    now = [0]

    def prepare() -> int:
        now[0] += 10**6
        return now[0]

    def late(self: Scheduler) -> list[Request]:
        now[0] += 7 * 10**6
        return next_batch(self)

    monkeypatch.setattr(time, "perf_counter_ns", prepare)
    assert decoding.run(5)["idle_frac"] == pytest.approx(4 / 9)
    monkeypatch.setattr(Scheduler, "next_batch", late)
    assert decoding.run(5)["idle_frac"] == pytest.approx(32 / 37)


def test_ratios_do_not_depend_on_the_clock_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements alternate: here everything takes twice as long from some point on."""
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds * (1 if now < 3 * 40 * 3.5 else 2)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    runs = [lambda: take(1.0), lambda: take(2.5)]
    turns = time_in_turns_ms(runs, torch.device("cpu"), 200)
    first, *_, last = turns
    assert last == pytest.approx([2 * ms for ms in first])
    for one, other in (first, last):
        assert other == pytest.approx(2.5 * one)


@torch.inference_mode()
def test_floor_reads_every_weight_once_and_again_for_context_and_logits() -> None:
    target, head = models(DENSE)
    layers = sum(p.nbytes for stack in (target, head) for p in stack.layers.parameters() if p.dim() > 1)
    config = head.config
    kv = 2 * config.num_kv_heads * config.head_dim * config.hidden_size * head.fc.weight.itemsize
    context = head.fc.weight.nbytes + config.num_layers * kv
    assert round_floor(target, head, 2, 12, []).num_bytes == layers + context + 2 * target.lm_head.nbytes
    sparse, _ = models(SPARSE)
    all_read = sum(p.nbytes for p in sparse.layers.parameters() if p.dim() > 1) + sparse.lm_head.nbytes
    half_read = plain_floor(sparse, 1, [4, 4])
    experts = sum(p.nbytes for p in sparse.layers.parameters() if p.dim() == 3)
    assert plain_floor(sparse, 1, [8, 8]).num_bytes == all_read
    assert half_read.num_bytes == all_read - experts // 2
    half_read.run()


@torch.inference_mode()
def test_experts_are_counted_in_a_real_pass() -> None:
    target, _ = models(SPARSE)
    alone = StandingRound(Decoding(target, None, TreeConfig(budget=1), replace(WORK, batch=1)).engine)
    assert count_experts(target, alone.verify_once) == [2, 2]
    many = StandingRound(Decoding(*models(SPARSE), TREE, WORK).engine)
    counts = count_experts(many.round.target, many.verify_once)
    assert len(counts) == 2 and all(2 < count <= 8 for count in counts)


@torch.inference_mode()
def test_random_routers_spread_tokens_over_experts() -> None:
    """The common part of all tokens' states does not dominate, in shapes of any depth and width."""
    wide = replace(LARGER, hidden_size=1024, num_layers=16, num_heads=32, num_kv_heads=4, head_dim=128)
    sparse = replace(wide, moe=MoEConfig(128, 8, 16, True), moe_layers=(0, 15), tied_embedding=False)
    target, head = models(sparse)
    still = StandingRound(
        Decoding(target, head, TreeConfig(budget=16, width=15), Workload(context=64, rounds=2)).engine
    )
    first, last = count_experts(target, still.verify_once)
    assert last > 0.8 * first > 60


# -- operations


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_runs_on_its_reference_with_the_same_inputs(name: str) -> None:
    found = profile_operation(name, inputs_of(SPARSE), calls=5)
    assert found.name == name and found.num_bytes > 0 and found.reference_ms > 0
    assert found.kernel_ms is None and found.max_difference is None
    assert found.gb_per_s == pytest.approx(found.num_bytes / found.reference_ms / 1e6)
    first, second = (OPERATIONS[name](inputs_of(SPARSE)).run() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("budget", [1, 2, 3, 15, 16, 17, 31, 32, 64])
def test_compaction_input_copies_all_but_the_root(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(ops, "compact_kv", lambda storage, source, target: calls.append((source, target)))
    inputs = inputs_of(DENSE, budget=budget, batch=3)
    OPERATIONS["compact_kv"](inputs).run()
    ((source, target),) = calls
    slots = replace(inputs).placed(context=PAGE_SIZE).slot_T.view(3, budget)
    path = (source[:, :, None] == slots[:, None]).int().argmax(-1)
    assert torch.equal(slots.gather(1, path), source) and torch.equal(target, slots[:, : path.shape[1]])
    assert (path[:, 0] == 0).all() and (path.diff() > 0).all() and (source != target)[:, 1:].all()
    assert path.shape[1] == 1 + min(DEPTH, max(budget - 2, 0))


@pytest.mark.parametrize(
    ("a", "b", "off"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, math.nan], [1.0, 2.0], math.nan),
        ([math.inf, -math.inf, 1.0], [math.inf, -math.inf, 1.0], 0.0),
        ([math.inf], [-math.inf], math.inf),
    ],
)
def test_nan_is_a_difference(a: list[float], b: list[float], off: float) -> None:
    same = torch.tensor([3])
    found = _max_difference([same, torch.tensor(a), same], [same, torch.tensor(b), same])
    assert found == pytest.approx(off, nan_ok=True)


def test_attention_depends_on_the_window_alone() -> None:
    """The longest sequence decides the choice of kernels, but neither values nor the bytes to read."""
    found = []
    for asked in ({}, {"window": 1000}, {"max_len": 60}, {"window": 5}):
        inputs = inputs_of(SPARSE, **asked)
        capacity = replace(inputs).placed(30).layout.page_BP.shape[1] * PAGE_SIZE
        assert 0 <= capacity - asked.get("max_len", SPARSE.max_len) - 20 < PAGE_SIZE
        found.append(OPERATIONS["tree_attention"](inputs))
    whole, *same, small = ((operation.run()[0], operation.num_bytes) for operation in found)
    assert all(torch.equal(values, whole[0]) and num_bytes == whole[1] for values, num_bytes in same)
    assert not torch.equal(small[0], whole[0]) and small[1] < whole[1]


# -- the command


@pytest.mark.parametrize("weights", ["random", "real"])
def test_command_writes_a_record_with_a_run_per_combination(folder: Path, tmp_path: Path, weights: str) -> None:
    record = tmp_path / "profile.json"
    options = ["--budget", "8", "--budget", "16", "--context", "10", "--context", "20", "--batch", "2", "--rounds", "1"]
    options += ["--max-len", "200", "--temperature", "0.5"]
    head = ["--head-layers", "1", "--block", "4", "--edge"]
    asked = ["--shape", str(folder), "--weights", weights, "--device", "cpu", "--json", "--out", str(record)]
    result = run("profile", *asked, *options, *head)
    assert result.exit_code == 0, result.output
    printed, written = json.loads(result.stdout), json.loads(record.read_text())
    assert {"command", "commit", "hardware", "versions"} <= set(written)
    assert printed == {name: written[name] for name in printed}
    assert [(each["context"], each["budget"]) for each in printed["runs"]] == [(10, 8), (10, 16), (20, 8), (20, 16)]
    assert printed["head"] == {"name": None, "layers": 1, "block_size": 4, "edge_rank": 128}
    assert all((each["max_len"], each["temperature"]) == (200, 0.5) for each in printed["runs"])


def test_command_shows_a_table(folder: Path) -> None:
    shape = ["--shape", str(folder), "--device", "cpu"]
    rounds = run("profile", *shape, "--head-layers", "1", "--budget", "8", "--context", "10", "--rounds", "1")
    assert all(word in rounds.stdout for word in (*STAGES, "round", "plain step", "floor", "ratio", "budget 8"))
    listed = run("profile", "op", *shape)
    assert listed.stdout.split() == [name for name in OPERATIONS if name not in OF_EXPERTS]
    operations = run("profile", "op", "all", *shape, "--budget", "8", "--context", "10")
    assert all(name in operations.stdout for name in OPERATIONS if name not in OF_EXPERTS)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--budget", "0"], "budget is 0"),
        (["--budget", "1"], "budget of 1 is plain decoding"),
        (["--context", "0"], "context is 0"),
        (["--context", "999"], "context is 999, and the model's holds 256 tokens"),
        (["--context", "255"], "lower the batch or the context"),
        (["--context", "10", "--max-len", "10"], "max_len is 10; it must be above the context of 10"),
        (["--context", "10", "--max-len", "257"], "at most the model's, 256"),
        (["--context", "10", "--temperature", "-1"], "temperature is -1"),
        (["--batch", "100000"], "batch is 100000; it must be at most 4096"),
        (["--head", "mine", "--block", "4"], "head.*"),
        (["--context", "10", "--head-layers", "5"], "does not fit a target of 2"),
        (["--shape", "nowhere"], "'nowhere' is neither a file or folder, nor"),
        (["op", "tree_attention", "--context", "10000000000000"], "out of memory"),
        (["op", "swiglu", "--context", "50", "--max-len", "50"], "max_len is 50"),
        (["--shape", "qwen3-8b", "--weights", "real"], "shape without weights"),
        (["op", "nothing"], "there is no operation 'nothing'"),
        (["op", "add_mixture"], "no experts"),
        (["--out", "/", "--context", "10"], "/ is a folder; name a file to write"),
        (["--width", "3", "op", "swiglu"], "put --width behind `op`"),
    ],
)
def test_bad_values_are_one_line(folder: Path, args: list[str], line: str) -> None:
    known = [] if "--shape" in args or args[0] == "--width" else ["--shape", str(folder)]
    small = ["--head-layers", "1"] if args[0] in ("--budget", "--context") and "--head-layers" not in args else []
    result = run("profile", *args, *known, *small)
    assert result.exit_code == 2
    errors = [text for text in result.stderr.splitlines() if not text.endswith("...") and "warning" not in text]
    assert len(errors) == 1 and errors[0].startswith("jetspec: error: ") and line in errors[0]


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("edge", [0, 16])
def test_profile_on_a_gpu(edge: int) -> None:
    work = Workload(context=100, batch=2, rounds=50)
    found = profile(*models(LARGER, torch.device("cuda"), torch.bfloat16, edge), TreeConfig(budget=32), work)
    assert found.floor_plain_ms > 0 and found.floor_round_ms > 0
    assert found.plain_ms > 0 and all(ms > 0 for ms in found.stages_ms.values())
    assert found.round_ms > max(found.stages_ms.values())
    assert 0 <= found.idle_frac < 1


ROUNDED_16 = {
    "tree_attention": 2e-2,
    "rms_norm": 2**-6,
    "norm_linear": 2**-5,
    "norm_swiglu": 2**-5,
    "add_linear": 2**-5,
    "rotate_store": 2**-4,
    "swiglu": 2**-6,
    "norm_route": 2**-5,
    "add_mixture": 0.05,
}
"""Absolute and relative tolerance of 16-bit values: both sides round. Other operations return 32 bits or exact
values."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_equal_their_references_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    inputs = Inputs(LARGER, dtype, torch.device("cuda"), OpOptions(budget=32, context=200))
    assert profile_operation(name, inputs, 50).kernel_ms is not None
    atol, rtol = (5e-3, 0.0) if dtype == torch.float32 else (ROUNDED_16.get(name, 5e-3),) * 2
    for found, expected in zip(values(name, inputs, "triton"), values(name, inputs, "reference"), strict=True):
        if expected.is_floating_point():
            torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
        else:
            assert torch.equal(found, expected)


@torch.inference_mode()
def values(name: str, inputs: Inputs, kernels: Kernels) -> list[Tensor]:
    with force(kernels):
        return [value.clone() for value in OPERATIONS[name](replace(inputs)).run()]
