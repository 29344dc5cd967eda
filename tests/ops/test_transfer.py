"""Copies to the host are complete when a later event has completed. Times of the device's clock are in order, also in
graphs."""

from __future__ import annotations

import time

import pytest
import torch

from jetspec.ops import copy_to_host, note_time
from jetspec.ops.select import force
from jetspec.ops.transfer import Download


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


def test_times_are_in_order_and_overwrite_the_oldest() -> None:
    time_S, count_1 = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with force("reference"):
        began = time.perf_counter_ns()
        for _ in range(4):
            note_time(time_S, count_1)
    fourth, second, third = time_S.tolist()
    assert began <= second <= third <= fourth <= time.perf_counter_ns() and int(count_1) == 4


@pytest.mark.gpu
def test_times_of_a_graph_on_a_gpu() -> None:
    """A long sum separates the first two times of a graph, and nothing the last two."""
    time_S, count_1 = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (60, 1))
    long = torch.zeros(2**28, device="cuda")

    def run() -> None:
        note_time(time_S, count_1)
        long.sum()
        note_time(time_S, count_1)
        note_time(time_S, count_1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    count_1.zero_()
    for _ in range(20):
        graph.replay()
    start, end, after = time_S.view(20, 3).T
    assert int(count_1) == 60 and bool((time_S.diff() >= 0).all())
    assert int((end - start).median()) > 5 * int((after - end).median())
