"""Copies to the host are exact, and complete when a later event has completed."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

from jetspec.ops import copy_to_host
from jetspec.ops.select import Kernels, force
from jetspec.ops.transfer import Download


def copied(source: Tensor, kernels: Kernels) -> Tensor:
    target = torch.zeros(source.shape, dtype=source.dtype)
    with force(kernels):
        copy_to_host(source, target)
    return target


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.int64), (18, torch.float32), (700, torch.float64)])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_copy_is_exact(interpreter: Executor, size: int, dtype: torch.dtype, kernels: Kernels) -> None:
    source = torch.arange(6 * size).view(3, 2 * size).to(dtype)[:, ::2]
    assert torch.equal(interpreter.submit(copied, source, kernels).result(), source)


@pytest.mark.gpu
def test_host_reads_one_copy_while_the_next_is_written() -> None:
    source = torch.zeros(3000, dtype=torch.int64, device="cuda")
    targets = [torch.zeros(3000, dtype=torch.int64).pin_memory() for _ in range(50)]
    events = [torch.cuda.Event() for _ in targets]
    for i, (target, event) in enumerate(zip(targets, events, strict=True)):
        source.add_(1)
        copy_to_host(source, target)
        event.record()
        if i:
            events[i - 1].synchronize()
            assert targets[i - 1].unique().tolist() == [i]


class Event:
    def __init__(self, waited: list[str], fails: bool) -> None:
        self.waited, self.fails = waited, fails

    def synchronize(self) -> None:
        self.waited.append("waited")
        if self.fails:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("error")
def test_download_keeps_memory_until_it_has_arrived(fails: bool) -> None:
    """The last round of an ended text is not read, so its host memory may be reused too early."""
    waited = list[str]()
    download = Download(torch.zeros(3))
    download.arrived = Event(waited, fails)  # type: ignore[assignment]
    del download
    assert waited == ["waited"]
