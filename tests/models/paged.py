"""Prefill of one request through a small paged cache, to compare decoders."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.models.decoder import Decoder
from jetspec.types import BatchLayout, KVPages, TreeBatch

PAGE_SIZE = 4


def run_decoder(decoder: Decoder, tokens: list[int], tap_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
    """Returns logits (T, V) and taps (T, X) of a sequence, with shuffled pages."""
    batch = chain_batch(len(tokens), torch.tensor(tokens))
    with torch.no_grad():
        hidden = decoder(batch, empty_cache(decoder, len(tokens)), tap_layers)
        return decoder.logits(hidden.hidden_TM), hidden.tap_TX


def chain_batch(length: int, token_T: Tensor) -> TreeBatch:
    num_pages = -(-length // PAGE_SIZE)
    page_BP = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))[None]
    position_T = torch.arange(length)
    slot_T = page_BP[0, position_T // PAGE_SIZE] * PAGE_SIZE + position_T % PAGE_SIZE
    layout = BatchLayout(page_BP, torch.zeros(1, dtype=torch.int64), torch.tensor([0, length]), PAGE_SIZE, length)
    return TreeBatch(token_T, position_T, slot_T, layout, None)


def empty_cache(decoder: Decoder, length: int) -> list[KVPages]:
    c = decoder.config
    shape = (-(-length // PAGE_SIZE), PAGE_SIZE, c.num_kv_heads, c.head_dim)
    dtype = decoder.embedding.dtype
    return [KVPages(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(c.num_layers)]
