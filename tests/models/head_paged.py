"""Small heads, embedder and KV pages for tests of draft heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetspec import ops
from jetspec.models.block_conv import ConvConfig
from jetspec.models.decoder import DecoderConfig, RopeConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, EngineHead, HeadConfig
from jetspec.types import BatchLayout, KVPages, TreeBatch

VOCAB, HIDDEN, WINDOW = 37, 16, 5

LAYERS = DecoderConfig(
    family="qwen3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    inner_size=24,
    max_len=128,
    rope=RopeConfig(theta=1000.0),
    qk_norm=True,
)
WINDOWED = replace(LAYERS, windows=(WINDOW, None, WINDOW))
CAUSAL = HeadConfig(LAYERS, tap_layers=(1, 2), mask_token=36, block_size=5, num_target_layers=6)

HEADS = {
    "causal": CAUSAL,
    "bidirectional": replace(CAUSAL, causal=False),
    "windowed": replace(CAUSAL, layers=WINDOWED),
    "windowed_bidirectional": replace(CAUSAL, layers=WINDOWED, causal=False),
    "windowed_mixed": replace(CAUSAL, layers=WINDOWED, causal=False, causal_windows=True),
    "adapter": replace(CAUSAL, target_hidden_size=10),
    "shifted": replace(CAUSAL, shifted=True),
    "biased": replace(CAUSAL, layers=replace(LAYERS, qkv_bias=True, out_bias=True)),
    "edge": replace(CAUSAL, edge=EdgeConfig(rank=6)),
    "edge_without_gate": replace(CAUSAL, edge=EdgeConfig(rank=6, gate=False, gate_bias=0.5)),
    "convolved": replace(CAUSAL, conv=ConvConfig(2, 8), edge=EdgeConfig(rank=6, gate_bias=0.0, candidates=9)),
    "edge_all_gate": replace(CAUSAL, edge=EdgeConfig(rank=6, gate_bias=0.0), causal=False),
}


def random_head(config: HeadConfig, seed: int = 0) -> DraftHead:
    """Returns a head whose weights all affect the output; none is zero or one."""
    head, generator = DraftHead(config), torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(0.6 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return head.requires_grad_(False).eval()


class Embedder:
    """Embedding and output matrix of a target, by default one random matrix."""

    def __init__(self, embedding: Tensor | None = None, matrix: Tensor | None = None) -> None:
        random = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.embedding = random if embedding is None else embedding
        self.matrix = random if matrix is None else matrix

    def embed(self, token: Tensor) -> Tensor:
        return self.embedding[token]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.matrix.T

    def output_rows(self, token: Tensor) -> Tensor:
        return self.matrix[token]


class HeadPages:
    """KV cache of a head for several requests, with scattered pages full of large numbers: reading stale rows shows."""

    def __init__(self, head: EngineHead, num_rows: int, page_size: int = 4, pages_per_row: int = 8) -> None:
        c, num_pages = head.config, num_rows * pages_per_row
        self.head: Any = head
        self.page_size = page_size
        shape = (num_pages, page_size, c.num_kv_heads, c.head_dim)
        self.layers = [KVPages(torch.full(shape, 1e3), torch.full(shape, 1e3)) for _ in head.layers]
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2))
        self.page_BP = order.view(num_rows, pages_per_row)
        self.lens = [0] * num_rows

    def batch(self, token_BS: Tensor) -> TreeBatch:
        """Tokens after each request's context."""
        (rows, size), length_B = token_BS.shape, torch.tensor(self.lens)
        depth_BS = torch.arange(size).expand(rows, -1)
        *_, position_BS, slot_BS = ops.place(self.page_BP, length_B, torch.arange(rows), depth_BS, self.page_size)
        layout = BatchLayout(self.page_BP, length_B, torch.arange(rows + 1) * size, self.page_size, size)
        return TreeBatch(token_BS.flatten(), position_BS.flatten(), slot_BS.flatten(), layout, None)

    def observe(self, row: int, tap: Tensor) -> None:
        position = self.lens[row] + torch.arange(len(tap))
        slot = self.page_BP[row, position // self.page_size] * self.page_size + position % self.page_size
        self.head.write_context(tap, position, slot, self.layers)
        self.lens[row] += len(tap)

    def propose(self, token_BS: Tensor, target: Embedder) -> Tensor:
        """Runs blocks after each request's context."""
        return self.head.propose(self.batch(token_BS), target, self.layers)


def propose_densely(head: DraftHead, token_S: Tensor, tap: Tensor, target: Embedder) -> Tensor:
    """Recomputes a block from all taps without a cache. Returns every slot's state."""
    position = torch.arange(len(tap) + len(token_S))
    context, slots = position.tensor_split([len(tap)])
    visible = position <= slots[:, None] if head.head_config.causal else torch.ones(len(slots), len(position)).bool()
    return head.forward_blocks(target.embed(token_S), slots, tap, context, visible)


def make_head(config: HeadConfig, seed: int = 0, **changes: object) -> DraftHead:
    """Returns a head with initial weights."""
    return DraftHead(replace(config, **changes)).init_weights(seed)  # type: ignore[arg-type]
