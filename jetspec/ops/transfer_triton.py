"""The Triton kernel of `copy_to_host`."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def copy_to_host_triton(news: Tensor, place: Tensor) -> None:
    size, news = news.numel(), news.contiguous()
    assert place.is_contiguous()
    with torch.cuda.device_of(news):
        _copy_to_host_kernel[(triton.cdiv(size, BLOCK),)](news, place, size, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["size"])
def _copy_to_host_kernel(news_ptr, place_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(place_ptr + i, tl.load(news_ptr + i, mask=i < size), mask=i < size)
