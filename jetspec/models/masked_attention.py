"""Attention without pages, for training: who sees whom is one function of indices, in two forms.

On a GPU it becomes FlexAttention's block mask, which skips what nobody sees and never exists entry by entry.
Elsewhere it is a plain tensor, which is also the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) -> whether that query sees that key. All are indices, which broadcast."""
Visible = Tensor | BlockMask
"""Whom each query sees: booleans (.., queries, keys), or FlexAttention's form of them."""


def make_visible(sees: Sees, rows: int, queries: int, keys: int, device: torch.device) -> Visible:
    """The form that suits the device. Make it once per batch: every layer can use it."""
    make = make_block_mask if device.type == "cuda" else make_dense_mask
    return make(sees, rows, queries, keys, device)


def make_dense_mask(sees: Sees, rows: int, queries: int, keys: int, device: torch.device) -> Tensor:
    row, query, key = (torch.arange(n, device=device) for n in (rows, queries, keys))
    return sees(row[:, None, None], row.new_zeros(()), query[:, None], key).expand(rows, queries, keys)


def make_block_mask(sees: Sees, rows: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    mask: BlockMask = make(sees, rows, None, queries, keys, device=device)
    return mask


def narrow(
    visible: Visible, query_position: Tensor, key_position: Tensor, window: int | None, causal: bool = False
) -> Visible:
    """Only keys less than `window` positions back; with `causal`, none ahead. Without a window nothing changes."""
    if window is None:
        return visible
    if isinstance(visible, Tensor):
        return visible & _is_near(query_position[..., None], key_position[..., None, :], window, causal)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _is_near(query_position[row, query], key_position[row, key], window, causal)

    rows, _, queries, keys = visible.shape
    return make_block_mask(and_masks(visible.mask_mod, sees), rows, queries, keys, query_position.device)


def _is_near(query: Tensor, key: Tensor, window: int, causal: bool) -> Tensor:
    near = key > query - window
    return near & (key <= query) if causal else near


def attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """(.., queries, H, E) over (.., keys, G, E): every query over the keys that it sees."""
    flat = q.dim() == 3
    q, k, v = (x.transpose(-3, -2)[None] if flat else x.transpose(-3, -2) for x in (q, k, v))
    out = _attend(q, k, v, visible).transpose(-3, -2)
    return out[0] if flat else out


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    if isinstance(visible, Tensor):
        mask = visible.unsqueeze(-3)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms and rotations leave them wider
    alone = q.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _compiled(flex_attention) if alone else flex_attention
    out: Tensor = attend(q, k, v, block_mask=visible, enable_gqa=True)
    return out


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first wanted, because the compiler takes seconds to import."""
    return torch.compile(function, dynamic=False)
