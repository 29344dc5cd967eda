"""The Triton kernel of `post`. It starts when all before it is over."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def post_triton(news: Tensor, places: Tensor, count_1: Tensor) -> None:
    assert news.is_contiguous() and places.is_contiguous()
    with torch.cuda.device_of(news):
        # One warp: no other may still have to read the count when it is written.
        _post_kernel[(1,)](news, places, count_1, news.numel(), len(places), BLOCK=BLOCK, num_warps=1)


@triton.jit(do_not_specialize=["size", "num_places"])
def _post_kernel(news_ptr, places_ptr, count_ptr, size, num_places, BLOCK: tl.constexpr):
    count = tl.load(count_ptr)
    place_ptr = places_ptr + count % num_places * size
    for start in tl.range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(place_ptr + i, tl.load(news_ptr + i, mask=i < size), mask=i < size)
    tl.store(count_ptr, count + 1)
