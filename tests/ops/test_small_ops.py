"""Norm, rotation, top-k, cache writes and the mixture of experts, each against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jetspec.ops import compact_kv, mixture, rms_norm, rope, rotate, topk_logprob


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(3, 5, 16), (1, 16), (16,)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=tolerance, rtol=tolerance)


def test_rms_norm_of_one_row_can_be_differentiated() -> None:
    x, weight = torch.randn(1, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x.double(), weight.double()))
    rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_rotation_turns_pairs_by_their_angle_and_depends_on_distance_alone() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    q, k = torch.randn(6), torch.randn(6)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return rotate(x[None, None], rope(torch.tensor([position]), inv_freq, 1.0, torch.float32))[0, 0]

    turned = torch.view_as_complex(torch.stack((q[:3], q[3:]), -1)) * torch.exp(1j * 7 * inv_freq)
    torch.testing.assert_close(at(q, 7), torch.cat((turned.real, turned.imag)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(at(q, 12) @ at(k, 9), at(q, 3) @ at(k, 0), atol=1e-5, rtol=1e-5)


def test_topk_logprob_is_the_best_of_the_full_log_softmax() -> None:
    logits = torch.randn(2, 3, 50) * 4
    token, logprob = topk_logprob(logits, 7)
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(token, order[..., :7])
    torch.testing.assert_close(logprob, expected[..., :7])


def test_compaction_reads_everything_before_it_writes() -> None:
    storage = torch.arange(2 * 2 * 3 * 4.0).view(2, 2, 3, 4, 1, 1).clone()
    before = storage.flatten(2, 3).clone()
    compact_kv(storage, torch.tensor([5, 2, 9]), torch.tensor([2, 5, 3]))
    after = storage.flatten(2, 3)
    assert torch.equal(after[:, :, [2, 5, 3]], before[:, :, [5, 2, 9]])
    kept = [i for i in range(12) if i not in (2, 3, 5)]
    assert torch.equal(after[:, :, kept], before[:, :, kept])


def test_mixture_is_the_weighted_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(5, 6), torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    expert, weight = torch.stack([torch.randperm(4)[:2] for _ in range(5)]), torch.rand(5, 2)
    expected = torch.zeros_like(x)
    for token in range(5):
        for chosen, share in zip(expert[token], weight[token], strict=True):
            gate, up = (gate_up[chosen] @ x[token]).chunk(2)
            expected[token] += share * (down[chosen] @ (F.silu(gate) * up))
    torch.testing.assert_close(mixture(x, gate_up, down, expert, weight), expected, atol=1e-5, rtol=1e-5)
