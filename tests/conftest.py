"""Setup of all tests. Markers are declared in pyproject.toml."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import ssl
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import hypothesis
import pytest
import torch

from tests.kernels import interpret_quickly
from tests.unwritten import fill_unwritten

# No deadline: the time of an example depends on the load of the machine.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=50)
hypothesis.settings.load_profile("patient")

# Tests run in several processes. With two threads each they would wait for each other all the time.
torch.set_num_threads(1)

fill_unwritten()

# A shell ignores Ctrl-C in background commands, and their children inherit that. Tests send Ctrl-C to children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A request of httpx makes a client, which reads the certificates of all authorities, for servers that have none.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

# Imported modules stay until the end. Searching them for garbage takes longer than some tests, in particular those of
# code that collects garbage itself.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """Excludes objects of earlier tests from collection: a benchmark collects after every method."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Executor]:
    """A process that interprets Triton kernels, which is decided when Triton is imported."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), interpret_quickly) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()  # starts the process, which keeps the setting
        yield pool
