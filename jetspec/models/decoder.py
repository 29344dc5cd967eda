"""The decoder of all model families; their differences are fields of `DecoderConfig` (see families.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from jetspec import ops
from jetspec.models.masked_attention import Visible, attend_masked, narrow
from jetspec.ops import HeadNorm, Residual, Routed
from jetspec.types import KVPages, TreeBatch

C = TypeVar("C")
S = TypeVar("S", bound="DecoderStack")
Rope = tuple[Tensor, Tensor]
"""Cos and sin tables of the tokens' positions."""

Attend = Callable[[Tensor, Rope, HeadNorm | None], Tensor]
"""Maps projected heads (.., H + 2G, E) of the in-flight tokens to attention output (.., H, E). It contains the KV cache
and the mask."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies. `kind` is the method that extends the context beyond `original_len`."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency, if the model's files list them."""

    def inv_freq(self, head_dim: int) -> Tensor:
        """Returns the angle per position of each of the head_dim / 2 pairs."""
        base = self.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        if self.divisors:
            base = base / torch.tensor(self.divisors)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":  # low frequencies are divided by `factor`, high ones kept
            turns = self.original_len * base / (2 * math.pi)
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = blend.clamp(0, 1)
            return (1 - blend) * base / self.factor + blend * base
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        return base

    @property
    def scale(self) -> float:
        """Factor on cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _yarn(self, base: Tensor, head_dim: int) -> Tensor:
        def pair(turns: float) -> float:
            """Index of the pair with so many rotations over the original length."""
            return head_dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), head_dim - 1)
        ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        return base / self.factor * ramp + base * (1 - ramp)


@dataclass(frozen=True)
class MoEConfig:
    """Shape of a mixture of experts."""

    num_experts: int
    num_chosen: int
    inner_size: int
    normalize: bool
    """Scale the weights of the chosen experts to sum to 1."""


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    max_len: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window per layer; empty: none."""
    moe: MoEConfig | None = None
    moe_layers: tuple[int, ...] = ()
    """Layers with a mixture of experts as MLP."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def distinct_windows(self) -> set[int | None]:
        return set(self.windows) or {None}


@dataclass(frozen=True)
class Hidden:
    """Result of a forward pass: normed final states, and the outputs of the tapped layers concatenated."""

    hidden_TM: Tensor
    tap_TX: Tensor | None


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor, next_norm: RMSNorm, tap: Tensor | None = None) -> Residual:
        """Adds forward(x) to `total` in place, copies the sum to `tap`, and starts the next norm."""
        return ops.add_linear(total, x, self.weight, self.bias, next_norm.weight, tap)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention around an `Attend`, (..., M) -> (..., M).

    Like an MLP it reads the norm of the residual and adds to it; the matrix products fuse both with the next norm.
    """

    def __init__(self, config: DecoderConfig, inputs: int | None = None) -> None:
        """`inputs` is the input width if it differs from the hidden size."""
        super().__init__()
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.qkv = Linear(inputs or c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.out = Linear(c.num_heads * c.head_dim, c.hidden_size, c.out_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    @property
    def head_norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(self, residual: Residual, norm: RMSNorm, rope: Rope, attend: Attend, next_norm: RMSNorm) -> Residual:
        qkv = ops.norm_linear(residual, norm.weight, norm.eps, self.qkv.weight, self.qkv.bias)
        return self.out.add_to(residual.x, self.attend(qkv, rope, attend), next_norm)

    def attend(self, qkv: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Returns the attention output with its heads concatenated."""
        return attend(qkv.unflatten(-1, (-1, self.head_dim)), rope, self.head_norm).flatten(-2)

    def context(self, c: Tensor) -> Tensor:
        """Returns K and V heads (.., 2G, E) of context rows, which have no queries, MLP or input norm."""
        return ops.linear(c, *self.context_weights).unflatten(-1, (-1, self.head_dim))

    @property
    def context_weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight rows and bias of the K and V projections."""
        first = self.num_heads * self.head_dim
        return self.qkv.weight[first:], None if self.qkv.bias is None else self.qkv.bias[first:]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.inner_size, config.mlp_bias)
        self.down = Linear(config.inner_size, config.hidden_size, config.mlp_bias)

    def forward(self, residual: Residual, norm: RMSNorm, next_norm: RMSNorm, tap: Tensor | None = None) -> Residual:
        inner = ops.norm_swiglu(residual, norm.weight, norm.eps, self.gate_up.weight, self.gate_up.bias)
        return self.down.add_to(residual.x, inner, next_norm, tap)


class MoE(nn.Module):
    """Mixture of SwiGLU experts."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(hidden_size, config.num_experts)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.inner_size, hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.inner_size))

    def forward(self, residual: Residual, norm: RMSNorm, next_norm: RMSNorm, tap: Tensor | None = None) -> Residual:
        return ops.add_mixture(residual.x, self.route(residual, norm), self.gate_up, self.down, tap)

    def route(self, residual: Residual, norm: RMSNorm) -> Routed:
        """Selects the experts of each token."""
        c = self.config
        return ops.norm_route(residual, norm.weight, norm.eps, self.router.weight, c.num_chosen, c.normalize)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        sparse = config.moe is not None and layer in config.moe_layers
        self.mlp = MoE(config.hidden_size, config.moe) if sparse and config.moe else MLP(config)

    def forward(
        self, residual: Residual, rope: Rope, attend: Attend, next_norm: RMSNorm, tap: Tensor | None = None
    ) -> Residual:
        residual = self.attention(residual, self.input_norm, rope, attend, self.post_norm)
        return self.mlp(residual, self.post_norm, next_norm, tap)


class DecoderStack(nn.Module):
    """Decoder layers with rotary positions: the body of targets and heads."""

    inv_freq: Tensor

    def __init__(
        self, config: DecoderConfig, make_layer: Callable[[DecoderConfig, int], DecoderLayer] = DecoderLayer
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        with torch.device("cpu"):  # not loaded from files, so it must not be on the meta device
            self.register_buffer("inv_freq", config.rope.inv_freq(config.head_dim), persistent=False)

    def prepare(self) -> None:
        """Packs the weights now, not during the first small matrix products."""
        for module in self.modules():
            if isinstance(module, Linear):
                ops.pack(module.weight)

    def run(self, x: Tensor, rope: Rope, attends: Sequence[Attend], tap_layers: tuple[int, ...] = ()) -> Hidden:
        """Runs all layers. A tap is a copy of a layer's output before any norm; later layers add in place. The layer
        after the last one is the final norm."""
        tap = x.new_empty((*x.shape[:-1], len(tap_layers), x.shape[-1])) if tap_layers else None
        residual, layers = Residual(x), [cast(DecoderLayer, layer) for layer in self.layers]
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for i, (layer, attend, next_norm) in enumerate(zip(layers, attends, next_norms, strict=True)):
            taps = [] if tap is None else [tap[..., j, :] for j, tapped in enumerate(tap_layers) if tapped == i]
            residual = layer(residual, rope, attend, next_norm, taps[0] if taps else None)
            for duplicate in taps[1:]:
                duplicate.copy_(taps[0])
        hidden = self.norm(residual.x)
        for j, tapped in enumerate(tap_layers):
            if tap is not None and tapped == len(layers):
                tap[..., j, :] = hidden
        return Hidden(hidden, None if tap is None else tap.flatten(-2))

    def rope(self, position: Tensor) -> Rope:
        """Returns the rope tables. Call it before `embed`: kernels prefetch them while the previous one still runs."""
        return ops.rope(position, self.inv_freq, self.config.rope.scale, self.norm.weight.dtype)

    def paged(self, batch: TreeBatch, cache: Sequence[KVPages]) -> list[Attend]:
        """Returns the attention of each layer over a paged KV cache: store new K and V, then attend to all."""
        plan = ops.plan_attention(batch)
        scale, G = self.config.head_dim**-0.5, self.config.num_kv_heads

        def attend(pages: KVPages, window: int | None, qkv: Tensor, rope: Rope, norm: HeadNorm | None) -> Tensor:
            q_THE = ops.rotate_store(qkv, G, rope, norm, pages, batch.slot_T)
            return ops.tree_attention(q_THE, pages, plan, scale, window)

        return [partial(attend, pages, self.config.window(i)) for i, pages in enumerate(cache)]


class Decoder(DecoderStack):
    """A target model with a paged KV cache: token ids -> hidden states and taps."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        if config.tied_embedding:
            self.lm_head = self.embedding

    def prepare(self) -> None:
        super().prepare()
        ops.pack(self.lm_head)

    def embed(self, token: Tensor) -> Tensor:
        return self.embedding[token]

    def forward(self, batch: TreeBatch, cache: Sequence[KVPages], tap_layers: tuple[int, ...] = ()) -> Hidden:
        """Runs one pass over the in-flight tokens."""
        rope = self.rope(batch.position_T)
        return self.run(self.embed(batch.token_T), rope, self.paged(batch, cache), tap_layers)

    def forward_dense(self, token: Tensor, position: Tensor, visible: Visible, tap_layers: tuple[int, ...]) -> Hidden:
        """Runs tokens (.., T) without a cache, for training. `visible` (.., T, T) is the attention mask."""
        seen = {window: narrow(visible, position, position, window) for window in self.config.distinct_windows}
        attends = [partial(self._attend_dense, seen[self.config.window(i)]) for i in range(self.config.num_layers)]
        rope = self.rope(position)
        return self.run(self.embed(token), rope, attends, tap_layers)

    def _attend_dense(self, visible: Visible, qkv: Tensor, rope: Rope, norm: HeadNorm | None) -> Tensor:
        return attend_masked(*ops.rotate_qkv(qkv, self.config.num_kv_heads, rope, norm), visible)

    def logits(self, hidden: Tensor) -> Tensor:
        return ops.linear(hidden, self.lm_head)

    def output_rows(self, token: Tensor) -> Tensor:
        """Returns the rows of the output matrix that belong to tokens."""
        return nn.functional.embedding(token, self.lm_head)


def on_meta(make: Callable[[C], S], config: C) -> S:
    """Makes a stack without memory for its weights."""
    with torch.device("meta"):
        return make(config)


def filled(stack: S, state: Mapping[str, Tensor], device: torch.device | str) -> S:
    """Gives a stack made by `on_meta` its weights, for inference."""
    stack.load_state_dict(state, strict=False, assign=True)
    if isinstance(stack, Decoder) and stack.config.tied_embedding:
        stack.lm_head = stack.embedding
    return stack.to(device).requires_grad_(False).eval()
