"""Profile of one operation at its shape in a round: kernel against reference, in time and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from jetspec import ops
from jetspec.config import TreeConfig
from jetspec.models.decoder import DecoderConfig, MoEConfig
from jetspec.ops import HeadNorm
from jetspec.ops.select import Kernels, force
from jetspec.profile.timing import as_graph, time_ms
from jetspec.tree import Candidates, DraftTree, accept, build_tree
from jetspec.types import BatchLayout, EdgeFactors, KVPages, RowSampling, SamplingParams, TreeBatch

PAGE_SIZE, DEPTH, WIDTH, EDGE_RANK = 16, 15, 8, 128
COLD_BYTES = 128 << 20
"""More than a GPU's cache holds, so that inputs are evicted before they are used again."""
MAX_COPIES = 32


@dataclass(frozen=True)
class OpProfile:
    """Milliseconds per call. Without a GPU only the reference is measured."""

    name: str
    num_bytes: int
    """Bytes that any implementation must read and write."""
    reference_ms: float
    kernel_ms: float | None
    max_difference: float | None
    """Largest absolute difference between values of kernel and reference."""

    @property
    def gb_per_s(self) -> float:
        """Bandwidth of the kernel, or of the reference without a kernel."""
        return self.num_bytes / (self.kernel_ms or self.reference_ms) / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}


@dataclass(frozen=True)
class Operation:
    """A call with its own inputs. It returns the tensors to compare, also those that it writes in place."""

    run: Callable[[], tuple[Tensor, ...]]
    num_bytes: int


@dataclass(frozen=True)
class Setting:
    """Shape of a model and of the round that an operation belongs to."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    budget: int = 64
    context: int = 1024
    batch: int = 1
    shortlist: int = TreeConfig.shortlist
    window: int | None = None
    """Sliding window of attention."""
    max_len: int | None = None
    """Longest sequence of a request, which decides the choice of kernels. None: the engine's default."""

    def __post_init__(self) -> None:
        TreeConfig(budget=self.budget, width=WIDTH, shortlist=self.shortlist)
        for name in ("context", "batch", "window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_len is not None and self.max_len <= self.context:
            raise ValueError(f"max_len is {self.max_len}; it must be above the context of {self.context}")

    @property
    def room(self) -> int:
        return self.max_len or max(self.config.max_len, self.context)


class Inputs:
    """Random inputs of a setting, the same in each run."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, setting.config
        self.B, self.N, self.T = setting.batch, setting.budget, setting.batch * setting.budget
        self.generator = torch.Generator(setting.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        s = self.setting
        return torch.randn(shape, generator=self.generator, dtype=dtype or s.dtype, device=s.device)

    @property
    def shortlist(self) -> int:
        return min(self.setting.shortlist or self.config.vocab_size, self.config.vocab_size)

    def candidates(self, count: int = WIDTH) -> Candidates:
        """Distinct tokens per depth, with log-probabilities spread like those of a head."""
        vocab = min(self.config.vocab_size, 128 * count)
        logprob = (3 * self.normal(self.B, DEPTH, vocab, dtype=torch.float32)).log_softmax(-1)
        value, token = logprob.topk(count)
        return Candidates(token, value)

    def anchors(self) -> Tensor:
        return torch.arange(self.B, device=self.setting.device)

    def tree(self) -> DraftTree:
        with force("reference"):
            return build_tree(self.anchors(), self.candidates(), TreeConfig(budget=self.N, width=WIDTH), DEPTH)

    def draft_temperatures(self) -> Tensor:
        """Default draft temperature of each request."""
        return torch.full((self.B,), TreeConfig.draft_temperature, device=self.setting.device)

    def placed(self, context: int) -> TreeBatch:
        """One tree per request behind `context` cached tokens, in random pages."""
        device, tree = self.setting.device, self.tree()
        used, width = (-(-(tokens + self.N) // PAGE_SIZE) for tokens in (context, max(context, self.setting.room)))
        page_BP = torch.zeros(self.B, width, dtype=torch.int64, device=device)
        page_BP[:, :used] = torch.randperm(self.B * used, generator=self.generator, device=device).view(self.B, used)
        length_B = torch.full((self.B,), context, device=device)
        start_B1 = torch.arange(self.B + 1, device=device) * self.N
        index_BN = length_B[:, None] + torch.arange(self.N, device=device)
        slot_BN = page_BP.gather(1, index_BN // PAGE_SIZE) * PAGE_SIZE + index_BN % PAGE_SIZE
        position_BN = length_B[:, None] + tree.depth_BN
        layout = BatchLayout(page_BP, length_B, start_B1, PAGE_SIZE, self.N)
        tokens = tree.token_BN.flatten()
        return TreeBatch(tokens, position_BN.flatten(), slot_BN.flatten(), layout, tree.ancestor_BNW)

    def page_shape(self, batch: TreeBatch) -> tuple[int, ...]:
        """Shape of K or V of one layer, for the pages in use."""
        return int(batch.layout.page_BP.max()) + 1, PAGE_SIZE, self.config.num_kv_heads, self.config.head_dim

    def pages(self, batch: TreeBatch) -> KVPages:
        shape = self.page_shape(batch)
        return KVPages(self.normal(*shape), self.normal(*shape))


OPERATIONS: dict[str, Callable[[Inputs], Operation]] = {}
Make = TypeVar("Make", bound=Callable[[Inputs], Operation])


def operation(name: str) -> Callable[[Make], Make]:
    """Adds a function to the operations that can be profiled."""

    def add(make: Make) -> Make:
        OPERATIONS[name] = make
        return make

    return add


@operation("tree_attention")
def tree_attention(inputs: Inputs) -> Operation:
    c, batch, window = inputs.config, inputs.placed(inputs.setting.context), inputs.setting.window
    pages, q_THE = inputs.pages(batch), inputs.normal(inputs.T, c.num_heads, c.head_dim)
    plan = ops.plan_attention(batch)
    row_bytes = 2 * c.num_kv_heads * c.head_dim * q_THE.itemsize
    seen = min(inputs.setting.context, window or inputs.setting.context)
    return Operation(
        lambda: (ops.tree_attention(q_THE, pages, plan, c.head_dim**-0.5, window),),
        2 * q_THE.nbytes + inputs.B * (seen + inputs.N) * row_bytes,
    )


@operation("rms_norm")
def rms_norm(inputs: Inputs) -> Operation:
    M = inputs.config.hidden_size
    x, weight = inputs.normal(inputs.T, M), inputs.normal(M)
    return Operation(lambda: (ops.rms_norm(x, weight, inputs.config.norm_eps),), 2 * x.nbytes)


def residual_rows(inputs: Inputs, norm: Tensor) -> ops.Residual:
    """Residual rows between two layers, with partial norms where the kernels compute them."""
    M = inputs.config.hidden_size
    weight = inputs.normal(M, M).mul_(0.02)
    return ops.add_linear(inputs.normal(inputs.T, M), inputs.normal(inputs.T, M), weight, next_norm=norm)


@operation("norm_linear")
def norm_linear(inputs: Inputs) -> Operation:
    """QKV projection of attention."""
    c = inputs.config
    norm = inputs.normal(c.hidden_size)
    rows = residual_rows(inputs, norm)
    weight = inputs.normal((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size).mul_(0.02)
    return Operation(lambda: (ops.norm_linear(rows, norm, c.norm_eps, weight),), weight.nbytes)


@operation("norm_swiglu")
def norm_swiglu(inputs: Inputs) -> Operation:
    """Gate and up projection of an MLP."""
    c = inputs.config
    norm = inputs.normal(c.hidden_size)
    rows = residual_rows(inputs, norm)
    weight = inputs.normal(2 * c.inner_size, c.hidden_size).mul_(0.02)
    return Operation(lambda: (ops.norm_swiglu(rows, norm, c.norm_eps, weight),), weight.nbytes)


@operation("add_linear")
def add_linear(inputs: Inputs) -> Operation:
    """Down projection of an MLP. The residual is cloned, because the operation may add in place."""
    c = inputs.config
    x, total = inputs.normal(inputs.T, c.inner_size), inputs.normal(inputs.T, c.hidden_size)
    norm, weight = inputs.normal(c.hidden_size), inputs.normal(c.hidden_size, c.inner_size).mul_(0.02)
    return Operation(lambda: (ops.add_linear(total.clone(), x, weight, next_norm=norm).x,), weight.nbytes)


@operation("rotate_store")
def rotate_store(inputs: Inputs) -> Operation:
    c, batch = inputs.config, inputs.placed(context=PAGE_SIZE)
    pages, G = inputs.pages(batch), c.num_kv_heads
    qkv = inputs.normal(inputs.T, c.num_heads + 2 * G, c.head_dim)
    norm = HeadNorm(inputs.normal(c.head_dim), inputs.normal(c.head_dim), c.norm_eps) if c.qk_norm else None
    tables = ops.rope(batch.position_T, c.rope.inv_freq(c.head_dim).to(qkv.device), c.rope.scale, qkv.dtype)

    def run() -> tuple[Tensor, ...]:
        return ops.rotate_store(qkv, G, tables, norm, pages, batch.slot_T), pages.k, pages.v

    return Operation(run, 2 * qkv.nbytes)


@operation("swiglu")
def swiglu(inputs: Inputs) -> Operation:
    gate_up = inputs.normal(inputs.T, 2 * inputs.config.inner_size)
    return Operation(lambda: (ops.swiglu(gate_up),), gate_up.nbytes * 3 // 2)


@operation("topk_logprob")
def topk_logprob(inputs: Inputs, count: int = WIDTH) -> Operation:
    """Compares values only: tokens with tied logits may come in any order."""
    logits_BDV = inputs.normal(inputs.B, DEPTH, inputs.config.vocab_size)
    temperature_B = inputs.draft_temperatures()
    return Operation(lambda: (ops.topk_logprob(logits_BDV, count, temperature_B)[1],), logits_BDV.nbytes)


@operation("topk_long")
def topk_long(inputs: Inputs) -> Operation:
    return topk_logprob(inputs, inputs.shortlist)


def edge_factors(inputs: Inputs) -> EdgeFactors:
    gate_BDR = inputs.normal(inputs.B, DEPTH, EDGE_RANK, dtype=torch.float32)
    return EdgeFactors(gate_BDR, *(0.3 * inputs.normal(inputs.config.vocab_size, EDGE_RANK) for _ in range(2)))


@operation("shortlist")
def shortlist(inputs: Inputs) -> Operation:
    """Shortlist of an edge term. Compares the best value only: rounding may exchange the last tokens."""
    logits_BDV = inputs.normal(inputs.B, DEPTH, inputs.config.vocab_size)
    anchor_B, edge, temperature_B = inputs.anchors(), edge_factors(inputs), inputs.draft_temperatures()

    def run() -> tuple[Tensor, ...]:
        found = ops.shortlist(logits_BDV, anchor_B, edge, inputs.shortlist, TreeConfig.shortlist_parents, temperature_B)
        return (found[1].amax(-1),)

    return Operation(run, 2 * (logits_BDV.nbytes + edge.successor_VR.nbytes))


@operation("build_tree")
def build(inputs: Inputs) -> Operation:
    anchor_B, candidates = inputs.anchors(), inputs.candidates()
    config = TreeConfig(budget=inputs.N, width=WIDTH)

    def run() -> tuple[Tensor, ...]:
        tree = build_tree(anchor_B, candidates, config, DEPTH)
        return tree.token_BN, tree.parent_BN, tree.depth_BN, tree.ancestor_BNW, tree.size_B

    read = candidates.token_BDC.nbytes + candidates.logprob_BDC.nbytes
    return Operation(run, read + sum(x.nbytes for x in run()))


@operation("build_edge_tree")
def build_edge_tree(inputs: Inputs) -> Operation:
    """Tree with an edge term. Compares scores only: rounding may exchange nodes that nearly tie."""
    edge, anchor_B, plain = edge_factors(inputs), inputs.anchors(), inputs.candidates(inputs.shortlist)
    candidates = replace(plain, edge=edge)
    config = TreeConfig(budget=inputs.N, width=WIDTH, shortlist=inputs.setting.shortlist)

    def run() -> tuple[Tensor, ...]:
        score_BN = build_tree(anchor_B, candidates, config, DEPTH).score_BN
        assert score_BN is not None
        return (score_BN,)

    return Operation(run, 2 * plain.token_BDC.numel() * EDGE_RANK * edge.successor_VR.itemsize)


@operation("accept")
def accept_path(inputs: Inputs, params: SamplingParams | None = None) -> Operation:
    """The logits have a clear maximum, which accepts the first nodes."""
    tree = inputs.tree()
    logits_BNV = inputs.normal(inputs.B, inputs.N, inputs.config.vocab_size)
    logits_BNV.scatter_(-1, tree.token_BN.roll(-1, 1)[..., None], 20)
    sampling = RowSampling.of([params or SamplingParams()] * inputs.B, [0] * inputs.B, logits_BNV.device)
    cached_len_B = torch.full_like(tree.size_B, inputs.setting.context)

    def run() -> tuple[Tensor, ...]:
        verdict = accept(tree, logits_BNV, sampling, cached_len_B)
        return verdict.path_BD1, verdict.length_B, verdict.bonus_B

    return Operation(run, logits_BNV.nbytes)


@operation("accept_sampled")
def accept_sampled(inputs: Inputs) -> Operation:
    return accept_path(inputs, SamplingParams(temperature=1.0, top_k=50, top_p=0.95))


@operation("compact_kv")
def compact_kv(inputs: Inputs) -> Operation:
    """Compaction of a path of full depth that starts at the root and skips the next node, so that all others are
    copied."""
    c, batch = inputs.config, inputs.placed(context=PAGE_SIZE)
    storage = inputs.normal(2, c.num_layers, *inputs.page_shape(batch))
    slot_BN = batch.slot_T.view(inputs.B, inputs.N)
    rest = max(inputs.N - 2, 0)
    chosen_BD = inputs.normal(inputs.B, rest).topk(min(DEPTH, rest)).indices.sort().values + 2
    path_BD1 = torch.cat((torch.zeros_like(slot_BN[:, :1]), chosen_BD), 1)
    source, target = slot_BN.gather(1, path_BD1), slot_BN[:, : path_BD1.shape[1]].contiguous()

    def run() -> tuple[Tensor, ...]:
        ops.compact_kv(storage, source, target)
        return (storage,)

    row_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * storage.itemsize
    return Operation(run, 2 * source.numel() * row_bytes)


def experts(inputs: Inputs) -> MoEConfig:
    if inputs.config.moe is None:
        raise ValueError("this shape has no experts; choose one with experts, such as qwen3-30b-a3b")
    return inputs.config.moe


@operation("norm_route")
def norm_route(inputs: Inputs) -> Operation:
    """Router of a sparse MLP. Compares weights only: rounding decides between experts that nearly tie."""
    moe, M = experts(inputs), inputs.config.hidden_size
    norm, router = inputs.normal(M), inputs.normal(moe.num_experts, M).mul_(0.02)
    rows = residual_rows(inputs, norm)

    def run() -> tuple[Tensor, ...]:
        return (ops.norm_route(rows, norm, inputs.config.norm_eps, router, moe.num_chosen, moe.normalize).weight_TK,)

    return Operation(run, router.nbytes)


@operation("add_mixture")
def add_mixture(inputs: Inputs) -> Operation:
    """Experts of a sparse MLP. The residual is cloned, because the operation may add in place."""
    moe, M = experts(inputs), inputs.config.hidden_size
    gate_up = inputs.normal(moe.num_experts, 2 * moe.inner_size, M).mul_(0.02)
    down = inputs.normal(moe.num_experts, M, moe.inner_size).mul_(0.02)
    total = inputs.normal(inputs.T, M)
    chance = inputs.normal(inputs.T, moe.num_experts, dtype=torch.float32).softmax(-1)
    weight_TK, expert_TK = chance.topk(moe.num_chosen)
    routed = ops.Routed(inputs.normal(inputs.T, M), expert_TK, weight_TK.to(total.dtype))
    touched = len(expert_TK.unique())
    return Operation(
        lambda: (ops.add_mixture(total.clone(), routed, gate_up, down).x,),
        touched * (gate_up[0].nbytes + down[0].nbytes) + 2 * total.nbytes,
    )


OF_EXPERTS = ("norm_route", "add_mixture")


def find_operations(name: str, config: DecoderConfig) -> list[str]:
    """Names of the operations to profile: one, or all of a shape."""
    if name == "all":
        return [each for each in OPERATIONS if each not in OF_EXPERTS or config.moe is not None]
    if name not in OPERATIONS:
        raise ValueError(f"there is no operation {name!r}; choose one of {', '.join(OPERATIONS)}, or all")
    return [name]


@torch.inference_mode()
def profile_operation(name: str, setting: Setting, calls: int = 200) -> OpProfile:
    """Times the reference eagerly, and the kernel in a CUDA graph, as in a round."""
    on_gpu = setting.device.type == "cuda"
    reference = _measure(name, setting, "reference", calls)
    kernel = _measure(name, setting, "triton", calls) if on_gpu else None
    return OpProfile(
        name,
        reference.num_bytes,
        reference.ms,
        kernel.ms if kernel else None,
        _max_difference(reference.values, kernel.values) if kernel else None,
    )


@dataclass(frozen=True)
class _Measured:
    ms: float
    num_bytes: int
    values: list[Tensor]


def _measure(name: str, setting: Setting, kernels: Kernels, calls: int) -> _Measured:
    """Cycles through several copies of the inputs, so that none is in the GPU's cache."""
    device, inputs = setting.device, Inputs(setting)
    with force(kernels):
        first = OPERATIONS[name](inputs)
        copies = min(COLD_BYTES // first.num_bytes + 1, MAX_COPIES) if device.type == "cuda" else 1
        operations = [first, *(OPERATIONS[name](inputs) for _ in range(copies - 1))]
        values = [x.clone() for x in first.run()]

        def run() -> None:
            for operation in operations:
                operation.run()

        timed = as_graph(run, device) if kernels == "triton" else run
        return _Measured(time_ms(timed, device, calls // copies) / copies, first.num_bytes, values)


def _max_difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Largest absolute difference. NaN if any value is NaN; equal infinities do not differ."""
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True)]
    return float(torch.stack([torch.where(a == b, 0.0, (a - b).abs()).max() for a, b in pairs]).max())
