"""Profile of one operation at its shape in a round: kernel against reference, in time and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from jetspec import ops, tree
from jetspec.config import TreeConfig
from jetspec.models.decoder import DecoderConfig, MoEConfig
from jetspec.ops import HeadNorm
from jetspec.ops.select import Kernels, force
from jetspec.profile.config import WIDTH, OpOptions
from jetspec.profile.timing import as_graph, time_ms
from jetspec.types import BatchLayout, ChoiceModel, EdgeFactors, KVPages, RowSampling, SamplingParams, TreeBatch

PAGE_SIZE, DEPTH, EDGE_RANK = 16, 15, 128
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
    kernel_ms: float | None = None
    max_difference: float | None = None
    """Largest absolute difference between values of kernel and reference."""

    @property
    def gb_per_s(self) -> float:
        """Bandwidth of the kernel, or of the reference without a kernel."""
        return self.num_bytes / (self.kernel_ms or self.reference_ms) / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_s": self.gb_per_s}


class Operation(NamedTuple):
    """A call with its own inputs. It returns the tensors to compare, also those that it writes in place."""

    run: Callable[[], tuple[Tensor, ...]]
    num_bytes: int


@dataclass
class Inputs:
    """Random inputs of a model's shape in a round, the same for each new object."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    asked: OpOptions = field(default_factory=OpOptions)

    def __post_init__(self) -> None:
        self.B, self.N, self.M = self.asked.batch, self.asked.budget, self.config.hidden_size
        self.T = self.B * self.N
        self.room = self.asked.max_len or max(self.config.max_len, self.asked.context)
        """Longest sequence of a request, which decides the choice of kernels."""
        self.shortlist = min(self.asked.shortlist or self.config.vocab_size, self.config.vocab_size)
        self.tree_config = TreeConfig(budget=self.N, width=WIDTH, shortlist=self.asked.shortlist)
        self.anchor_B = torch.arange(self.B, device=self.device)
        self.choice = ChoiceModel(torch.full((self.B, 1), TreeConfig.draft_temperature, device=self.device))
        """Default draft temperature of each request."""
        self.generator = torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype or self.dtype, device=self.device)

    def weight(self, *shape: int) -> Tensor:
        return self.normal(*shape).mul_(0.02)

    def head_logits(self) -> Tensor:
        return self.normal(self.B, DEPTH, self.config.vocab_size)

    def candidates(self, count: int = WIDTH) -> tree.Candidates:
        """Distinct tokens per depth, with log-probabilities spread like those of a head."""
        vocab = min(self.config.vocab_size, 128 * count)
        logprob = (3 * self.normal(self.B, DEPTH, vocab, dtype=torch.float32)).log_softmax(-1)
        value, token = logprob.topk(count)
        return tree.Candidates(token, value)

    def edge_factors(self) -> EdgeFactors:
        gate_BDR = self.normal(self.B, DEPTH, EDGE_RANK, dtype=torch.float32)
        return EdgeFactors(gate_BDR, *(0.3 * self.normal(self.config.vocab_size, EDGE_RANK) for _ in range(2)))

    def drafted(self) -> tree.DraftTree:
        with force("reference"):
            return tree.build_tree(self.anchor_B, self.candidates(), self.tree_config, DEPTH)

    def placed(self, context: int) -> TreeBatch:
        """One tree per request behind `context` cached tokens, in random pages."""
        device, drafted = self.device, self.drafted()
        used, width = (-(-(tokens + self.N) // PAGE_SIZE) for tokens in (context, max(context, self.room)))
        page_BP = torch.zeros(self.B, width, dtype=torch.int64, device=device)
        page_BP[:, :used] = torch.randperm(self.B * used, generator=self.generator, device=device).view(self.B, used)
        length_B = torch.full((self.B,), context, device=device)
        start_B1 = torch.arange(self.B + 1, device=device) * self.N
        *_, position_BN, slot_BN = ops.place(page_BP, length_B, self.anchor_B, drafted.depth_BN, PAGE_SIZE)
        layout = BatchLayout(page_BP, length_B, start_B1, PAGE_SIZE, self.N)
        tokens = drafted.token_BN.flatten()
        return TreeBatch(tokens, position_BN.flatten(), slot_BN.flatten(), layout, drafted.ancestor_BNW)

    def page_shape(self, batch: TreeBatch) -> tuple[int, ...]:
        """Shape of K or V of one layer, for the pages in use."""
        return int(batch.layout.page_BP.max()) + 1, PAGE_SIZE, self.config.num_kv_heads, self.config.head_dim

    def pages(self, batch: TreeBatch) -> KVPages:
        shape = self.page_shape(batch)
        return KVPages(self.normal(*shape), self.normal(*shape))

    def residual_rows(self, norm: Tensor) -> ops.Residual:
        """Residual rows between two layers, with partial norms where the kernels compute them."""
        weight = self.weight(self.M, self.M)
        return ops.add_linear(self.normal(self.T, self.M), self.normal(self.T, self.M), weight, next_norm=norm)

    @property
    def experts(self) -> MoEConfig:
        if self.config.moe is None:
            raise ValueError("this shape has no experts; choose one with experts, such as qwen3-30b-a3b")
        return self.config.moe


OPERATIONS: dict[str, Callable[[Inputs], Operation]] = {}
Make = TypeVar("Make", bound=Callable[[Inputs], Operation])


def operation(make: Make) -> Make:
    """Adds a function to the operations that can be profiled."""
    OPERATIONS[make.__name__] = make
    return make


@operation
def tree_attention(inputs: Inputs) -> Operation:
    c, asked, batch = inputs.config, inputs.asked, inputs.placed(inputs.asked.context)
    pages, q_THE = inputs.pages(batch), inputs.normal(inputs.T, c.num_heads, c.head_dim)
    plan = ops.plan_attention(batch)
    row_bytes = 2 * c.num_kv_heads * c.head_dim * q_THE.itemsize
    seen = min(asked.context, asked.window or asked.context)
    return Operation(
        lambda: (ops.tree_attention(q_THE, pages, plan, c.head_dim**-0.5, asked.window),),
        2 * q_THE.nbytes + inputs.B * (seen + inputs.N) * row_bytes,
    )


@operation
def rms_norm(inputs: Inputs) -> Operation:
    x, weight = inputs.normal(inputs.T, inputs.M), inputs.normal(inputs.M)
    return Operation(lambda: (ops.rms_norm(x, weight, inputs.config.norm_eps),), 2 * x.nbytes)


@operation
def norm_linear(inputs: Inputs) -> Operation:
    """QKV projection of attention."""
    c, norm = inputs.config, inputs.normal(inputs.M)
    rows, weight = inputs.residual_rows(norm), inputs.weight((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, inputs.M)
    return Operation(lambda: (ops.norm_linear(rows, norm, c.norm_eps, weight),), weight.nbytes)


@operation
def norm_swiglu(inputs: Inputs) -> Operation:
    """Gate and up projection of an MLP."""
    c, norm = inputs.config, inputs.normal(inputs.M)
    rows, weight = inputs.residual_rows(norm), inputs.weight(2 * c.inner_size, inputs.M)
    return Operation(lambda: (ops.norm_swiglu(rows, norm, c.norm_eps, weight),), weight.nbytes)


@operation
def add_linear(inputs: Inputs) -> Operation:
    """Down projection of an MLP. The residual is cloned, because the operation may add in place."""
    x, total = inputs.normal(inputs.T, inputs.config.inner_size), inputs.normal(inputs.T, inputs.M)
    norm, weight = inputs.normal(inputs.M), inputs.weight(inputs.M, inputs.config.inner_size)
    return Operation(lambda: (ops.add_linear(total.clone(), x, weight, next_norm=norm).x,), weight.nbytes)


@operation
def rotate_store(inputs: Inputs) -> Operation:
    c, batch = inputs.config, inputs.placed(context=PAGE_SIZE)
    pages, G = inputs.pages(batch), c.num_kv_heads
    qkv = inputs.normal(inputs.T, c.num_heads + 2 * G, c.head_dim)
    norm = HeadNorm(inputs.normal(c.head_dim), inputs.normal(c.head_dim), c.norm_eps) if c.qk_norm else None
    tables = ops.rope(batch.position_T, c.rope.inv_freq(c.head_dim).to(qkv.device), c.rope.scale, qkv.dtype)
    return Operation(
        lambda: (ops.rotate_store(qkv, G, tables, norm, pages, batch.slot_T), pages.k, pages.v), 2 * qkv.nbytes
    )


@operation
def swiglu(inputs: Inputs) -> Operation:
    gate_up = inputs.normal(inputs.T, 2 * inputs.config.inner_size)
    return Operation(lambda: (ops.swiglu(gate_up),), gate_up.nbytes * 3 // 2)


@operation
def topk_logprob(inputs: Inputs, count: int = WIDTH) -> Operation:
    """Compares values only: tokens with tied logits may come in any order."""
    logits_BDV = inputs.head_logits()
    return Operation(lambda: (ops.topk_logprob(logits_BDV, count, inputs.choice)[1],), logits_BDV.nbytes)


@operation
def topk_long(inputs: Inputs) -> Operation:
    return topk_logprob(inputs, inputs.shortlist)


@operation
def shortlist(inputs: Inputs) -> Operation:
    """Shortlist of an edge term. Compares the best value only: rounding may exchange the last tokens."""
    logits_BDV, edge = inputs.head_logits(), inputs.edge_factors()
    parents = TreeConfig.shortlist_parents

    def run() -> tuple[Tensor, ...]:
        found = ops.shortlist(logits_BDV, inputs.anchor_B, edge, inputs.shortlist, parents, inputs.choice)
        return (found[1].amax(-1),)

    return Operation(run, 2 * (logits_BDV.nbytes + edge.successor_VR.nbytes))


@operation
def build_tree(inputs: Inputs) -> Operation:
    candidates = inputs.candidates()

    def run() -> tuple[Tensor, ...]:
        built = tree.build_tree(inputs.anchor_B, candidates, inputs.tree_config, DEPTH)
        return built.token_BN, built.parent_BN, built.depth_BN, built.ancestor_BNW, built.size_B

    read = candidates.token_BDC.nbytes + candidates.logprob_BDC.nbytes
    return Operation(run, read + sum(x.nbytes for x in run()))


@operation
def build_edge_tree(inputs: Inputs) -> Operation:
    """Tree with an edge term. Compares scores only: rounding may exchange nodes that nearly tie."""
    edge, plain = inputs.edge_factors(), inputs.candidates(inputs.shortlist)
    candidates = replace(plain, edge=edge)

    def run() -> tuple[Tensor, ...]:
        score_BN = tree.build_tree(inputs.anchor_B, candidates, inputs.tree_config, DEPTH).score_BN
        assert score_BN is not None
        return (score_BN,)

    return Operation(run, 2 * plain.token_BDC.numel() * EDGE_RANK * edge.successor_VR.itemsize)


@operation
def accept(inputs: Inputs, params: SamplingParams | None = None) -> Operation:
    """The logits have a clear maximum, which accepts the first nodes."""
    drafted = inputs.drafted()
    logits_BNV = inputs.normal(inputs.B, inputs.N, inputs.config.vocab_size)
    logits_BNV.scatter_(-1, drafted.token_BN.roll(-1, 1)[..., None], 20)
    sampling = RowSampling.of([params or SamplingParams()] * inputs.B, [0] * inputs.B, logits_BNV.device)
    cached_len_B = torch.full_like(drafted.size_B, inputs.asked.context)

    def run() -> tuple[Tensor, ...]:
        verdict = tree.accept(drafted, logits_BNV, sampling, cached_len_B)
        return verdict.path_BD1, verdict.length_B, verdict.bonus_B

    return Operation(run, logits_BNV.nbytes)


@operation
def accept_sampled(inputs: Inputs) -> Operation:
    return accept(inputs, SamplingParams(temperature=1.0, top_k=50, top_p=0.95))


@operation
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


@operation
def norm_route(inputs: Inputs) -> Operation:
    """Router of a sparse MLP. Compares weights only: rounding decides between experts that nearly tie."""
    moe, norm, eps = inputs.experts, inputs.normal(inputs.M), inputs.config.norm_eps
    router, rows = inputs.weight(moe.num_experts, inputs.M), inputs.residual_rows(norm)

    def run() -> tuple[Tensor, ...]:
        return (ops.norm_route(rows, norm, eps, router, moe.num_chosen, moe.normalize).weight_TK,)

    return Operation(run, router.nbytes)


@operation
def add_mixture(inputs: Inputs) -> Operation:
    """Experts of a sparse MLP. The residual is cloned, because the operation may add in place."""
    moe = inputs.experts
    gate_up = inputs.weight(moe.num_experts, 2 * moe.inner_size, inputs.M)
    down = inputs.weight(moe.num_experts, inputs.M, moe.inner_size)
    total = inputs.normal(inputs.T, inputs.M)
    chance = inputs.normal(inputs.T, moe.num_experts, dtype=torch.float32).softmax(-1)
    weight_TK, expert_TK = chance.topk(moe.num_chosen)
    routed = ops.Routed(inputs.normal(inputs.T, inputs.M), expert_TK, weight_TK.to(total.dtype))
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
def profile_operation(name: str, inputs: Inputs, calls: int = 200) -> OpProfile:
    """Times the reference eagerly, and the kernel in a CUDA graph, as in a round."""
    num_bytes, reference_ms, expected = _measure(name, inputs, "reference", calls)
    if inputs.device.type == "cpu":
        return OpProfile(name, num_bytes, reference_ms)
    _, kernel_ms, found = _measure(name, inputs, "triton", calls)
    return OpProfile(name, num_bytes, reference_ms, kernel_ms, _max_difference(expected, found))


def _measure(name: str, inputs: Inputs, kernels: Kernels, calls: int) -> tuple[int, float, list[Tensor]]:
    """Bytes, milliseconds and values. Cycles through several copies of the inputs, so that none is in the GPU's
    cache."""
    device, inputs = inputs.device, replace(inputs)
    with force(kernels):
        first = OPERATIONS[name](inputs)
        copies = min(COLD_BYTES // first.num_bytes + 1, MAX_COPIES) if device.type == "cuda" else 1
        operations = [first, *(OPERATIONS[name](inputs) for _ in range(copies - 1))]
        values = [x.clone() for x in first.run()]

        def run() -> None:
            for each in operations:
                each.run()

        timed = as_graph(run, device) if kernels == "triton" else run
        return first.num_bytes, time_ms(timed, device, calls // copies) / copies, values


def _max_difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Largest absolute difference. NaN if any value is NaN; equal infinities do not differ."""
    pairs = [(a.double(), b.double()) for a, b in zip(some, others, strict=True)]
    return float(torch.stack([torch.where(a == b, 0.0, (a - b).abs()).max() for a, b in pairs]).max())
