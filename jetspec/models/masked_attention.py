"""Attention without pages, for training. The mask is a function of indices, in two forms.

On a GPU it becomes a block mask of FlexAttention, which skips empty blocks and is never materialised. Elsewhere it is
a tensor, which is also the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

MaskFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps (row, head, query, key) indices, which broadcast, to true where the query attends to the key."""
Visible = Tensor | BlockMask
"""Attention mask: booleans (.., queries, keys), or FlexAttention's form of them."""


def make_visible(mask: MaskFn, rows: int, queries: int, keys: int, device: torch.device) -> Visible:
    """Returns the mask in the form for the device, once per batch for all layers."""
    make = make_block_mask if device.type == "cuda" else make_dense_mask
    return make(mask, rows, queries, keys, device)


def make_dense_mask(mask: MaskFn, rows: int, queries: int, keys: int, device: torch.device) -> Tensor:
    row, query, key = (torch.arange(n, device=device) for n in (rows, queries, keys))
    return mask(row[:, None, None], row.new_zeros(()), query[:, None], key).expand(rows, queries, keys)


def make_block_mask(mask: MaskFn, rows: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    made: BlockMask = make(mask, rows, None, queries, keys, device=device)
    return made


def narrow(
    visible: Visible, query_position: Tensor, key_position: Tensor, window: int | None, causal: bool = False
) -> Visible:
    """Restricts a mask to keys less than `window` positions back and, with `causal`, not ahead. None: no change."""
    if window is None:
        return visible
    if isinstance(visible, Tensor):
        return visible & _is_near(query_position[..., None], key_position[..., None, :], window, causal)

    def is_near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _is_near(query_position[row, query], key_position[row, key], window, causal)

    rows, _, queries, keys = visible.shape
    return make_block_mask(and_masks(visible.mask_mod, is_near), rows, queries, keys, query_position.device)


def _is_near(query: Tensor, key: Tensor, window: int, causal: bool) -> Tensor:
    near = key > query - window
    return near & (key <= query) if causal else near


def attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """Attention of (.., queries, H, E) over (.., keys, G, E) under a mask."""
    flat = q.dim() == 3
    q, k, v = (x.transpose(-3, -2)[None] if flat else x.transpose(-3, -2) for x in (q, k, v))
    if isinstance(visible, Tensor):
        mask = visible.unsqueeze(-3)
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    else:
        out = _flex(q, k, v, visible)
    out = out.transpose(-3, -2)
    return out[0] if flat else out


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: BlockMask, **options: Any) -> Any:
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norm and rope outputs are float32
    alone = q.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _compiled(flex_attention) if alone else flex_attention
    return attend(q, k, v, block_mask=visible, enable_gqa=True, kernel_options=_tiles(q), **options)


def _tiles(q: Tensor) -> dict[str, int] | None:
    """Tile sizes of FlexAttention's forward.

    Its choice on Hopper for head size 64 (128 keys, 4 warps) spills registers and is three times slower than these,
    its choice for head size 128.
    """
    if q.shape[-1] != 64 or q.element_size() != 2 or q.shape[-2] < 128:
        return None
    return {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3}


def attend_own(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, k_own: Tensor, v_own: Tensor, filled: Tensor
) -> Tensor:
    """`attend_masked` of (rows, queries, H, E) where each query also attends to keys of its own.

    These are (rows, queries, D, G, E); `filled` (D) marks the valid ones, at least one.
    """
    repeat, scale = q.shape[-2] // k.shape[-2], q.shape[-1] ** -0.5
    q_own = q.unflatten(-2, (-1, repeat)).to(v.dtype)
    own = torch.einsum("...ghe,...dge->...ghd", q_own, k_own.to(v.dtype)).flatten(-3, -2).float() * scale
    own = own.masked_fill(~filled, -torch.inf)
    if isinstance(visible, Tensor):
        score = torch.einsum("rqghe,rtge->rqght", q_own, k.to(v.dtype)).flatten(-3, -2).float() * scale
        score = score.masked_fill(~visible.unsqueeze(-2), -torch.inf)
        shared, own = torch.cat((score, own), -1).softmax(-1).to(v.dtype).split((k.shape[-3], len(filled)), -1)
        out = torch.einsum("rqght,rtge->rqghe", shared.unflatten(-2, (-1, repeat)), v).flatten(-3, -2)
    else:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        mean, aux = _flex(q, k, v, visible, return_aux=AuxRequest(lse=True))
        # Merge by log-sum-exp: the shared keys count as one term of the softmax.
        weight = torch.cat((aux.lse.transpose(-2, -1)[..., None].float(), own), -1).softmax(-1).to(v.dtype)
        out, own = mean.transpose(-3, -2) * weight[..., :1], weight[..., 1:]
    return out + torch.einsum("...ghd,...dge->...ghe", own.unflatten(-2, (-1, repeat)), v_own).flatten(-3, -2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles on first use: importing the compiler takes seconds."""
    return torch.compile(function, dynamic=False)
