from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from jetspec import ops
from jetspec.ops import select
from jetspec.ops.select import force, uses_kernel, without


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes the inputs, as far as choices are concerned."""
    pytest.importorskip("triton")
    select._first.cache_clear()
    monkeypatch.setattr(select, "_forced", "triton")


def chosen(operation: str, *inputs: Tensor, **facts: int) -> str:
    def reference() -> None: ...

    return select.select(operation, reference, *inputs, **facts).__name__


def test_a_cpu_runs_the_reference() -> None:
    assert select.select("place", ops.place, torch.zeros(1)) is ops.place
    with force("reference"):
        assert not uses_kernel(torch.zeros(1))


def test_the_first_row_whose_condition_holds_is_chosen(on_gpu: None) -> None:
    x = torch.zeros(1)
    assert chosen("place", x) == "place_triton"
    assert chosen("topk_logprob", x, num_tokens=2048) == "topk_logprob_triton"
    assert chosen("topk_logprob", x, num_tokens=2049) == "reference"
    assert chosen("rms_norm", x, x) == "rms_norm_triton"
    assert chosen("rms_norm", x, x.half()) == "reference"


def test_rows_can_be_left_out(on_gpu: None) -> None:
    x = torch.zeros(1)
    with without("place", "swiglu"):
        assert chosen("place", x) == chosen("swiglu", x) == "reference"
    assert chosen("place", x) == "place_triton"
    with pytest.raises(ValueError, match="nowhere"), without("nowhere"):
        pass


def test_chosen_rows_are_collected(on_gpu: None) -> None:
    with select.watch() as names:
        chosen("place", torch.zeros(1))
        chosen("place", torch.zeros(1))
        chosen("topk_logprob", torch.zeros(1), num_tokens=4000)
    assert names == {"place"}


def test_gradients_go_through_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "HAS_TRITON", True)
    x, trained = SimpleNamespace(is_cuda=True, requires_grad=False), SimpleNamespace(is_cuda=True, requires_grad=True)
    assert uses_kernel(x) and not uses_kernel(x, trained)  # type: ignore[arg-type]
    with torch.no_grad():
        assert uses_kernel(x, trained)  # type: ignore[arg-type]
    monkeypatch.setattr(select, "HAS_TRITON", False)
    assert not uses_kernel(x)  # type: ignore[arg-type]


def test_every_row_names_a_function(on_gpu: None) -> None:
    for operation, choices in select.TABLE.items():
        for row in choices:
            assert callable(select._load(row.kernel, operation)), row.name
