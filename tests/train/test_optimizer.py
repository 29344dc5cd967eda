"""Every weight has one optimizer, the right one, and all follow one schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetspec.train.config import OptimizerConfig
from jetspec.train.optimizer import BatchedMuon, lr_frac, make_optimizers
from tests.engine.tiny import tiny_decoder, tiny_head


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("edge", [False, True])
def test_each_weight_has_one_optimizer(kind: str, edge: bool) -> None:
    head = tiny_head(tiny_decoder(), edge=edge).requires_grad_(True)
    config = OptimizerConfig(kind=kind, weight_decay=0.3)  # type: ignore[arg-type]
    optimizers = {type(o): o for o in make_optimizers(head, config)}
    names = {id(p): name for name, p in head.named_parameters()}
    found = {cls: {names[id(p)] for p in weights_of(o)} for cls, o in optimizers.items()}
    assert sum(len(weights_of(o)) for o in optimizers.values()) == len(names) == len(set.union(*found.values()))
    hidden = {name for name, p in head.named_parameters() if p.dim() == 2 and not name.startswith("edge.")}
    assert found.get(BatchedMuon, set()) == (hidden if kind == "muon" else set())
    assert not edge or {"edge.predecessor", "edge.successor"} <= found[torch.optim.AdamW]
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            assert group["lr"] == config.lr
            assert all(group["weight_decay"] == (0.3 if p.dim() == 2 else 0.0) for p in group["params"])


def test_batched_updates_equal_single_ones() -> None:
    shapes = [(12, 8), (8, 12), (12, 8), (8, 8), (12, 8)]
    alone, together = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    settings: Any = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [torch.optim.Muon(alone, **settings), BatchedMuon(together, **settings)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for a, b in zip(alone, together, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        together[3].grad = alone[3].grad = None  # has no part in this step
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(alone[0], torch.ones(shapes[0])) and torch.equal(together[3], torch.ones(shapes[3]))
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=0)  # products in bfloat16


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_learning_rate_rises_then_falls(steps: int, a: float, b: float, warmup_frac: float) -> None:
    config = OptimizerConfig(warmup_frac=warmup_frac, final_lr_frac=0.1)
    rise = max(1, round(warmup_frac * steps))
    early, late = sorted((a * steps, b * steps))
    one, other = lr_frac(early, steps, config), lr_frac(late, steps, config)
    assert 0 < one <= 1 and 0 < other <= 1
    if late < rise:
        assert one <= other
    if early >= rise:
        assert one >= other >= 0.1 - 1e-9
