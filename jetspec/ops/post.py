"""Copies to the host's memory."""

from __future__ import annotations

from torch import Tensor

from jetspec.dispatch import uses_kernel


def post(news: Tensor, place: Tensor) -> None:
    """Write a tensor to the host, pinned where it comes from a GPU: it has arrived when an event behind this happened.

    A kernel writes a few numbers in less time than it takes to hand over to a copy engine and back.
    """
    assert place.shape == news.shape and place.dtype == news.dtype
    if uses_kernel(news):
        from jetspec.ops.post_triton import post_triton

        post_triton(news, place)
    else:
        place.copy_(news, non_blocking=True)
