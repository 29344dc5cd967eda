"""Dense masks and block masks of one attention pattern give the same results, compiled or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.models.eagle3 import Eagle3Config, Eagle3Head
from jetspec.models.heads import Head
from jetspec.models.masked_attention import make_block_mask
from jetspec.train.blocks import choose_anchors, document_mask, lay_out
from jetspec.train.config import LossConfig
from jetspec.train.loss import DraftLoss, HeadWithLoss
from tests.engine.tiny import randomize
from tests.train.tiny_run import packed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB = 50
COMPILATIONS = {"causal windows": 4, "bidirectional windows": 4, "eagle3": 1}
"""Kinds of heads, and most compilations of their layers: all layers of one window and all batches share one."""


def models(kind: str, device: torch.device) -> tuple[Decoder, Head]:
    """Models with heads of size 16, the smallest of FlexAttention's kernels."""
    shape = DecoderConfig("qwen3", VOCAB, 32, 3, 4, 2, 16, 48, max_len=512, qk_norm=True)
    target = randomize(Decoder(replace(shape, windows=(9, None, None))), 3, 0.3)
    layers, causal = replace(shape, windows=(5, None, 5) if "windows" in kind else ()), "bidirectional" not in kind
    config = HeadConfig(layers, (0, 1), 2, 4, causal, causal_windows=not causal, edge=EdgeConfig(4))
    single = Eagle3Config(replace(shape, family="llama", num_layers=1, qk_norm=False), (0, 1, 2), VOCAB, 4)
    head: Head = Eagle3Head(single) if kind == "eagle3" else DraftHead(config)
    return target.to(device), randomize(head, 4, 0.2).to(device).requires_grad_(True)


def loss_and_gradients(target: Decoder, head: Head, seed: int) -> tuple[DraftLoss, dict[str, Tensor | None]]:
    """The loss of one batch, and its gradients."""
    host, device = packed(2, 64, VOCAB, seed), target.embedding.device
    anchors = choose_anchors(host, 9, torch.Generator().manual_seed(seed))
    batch, drafts = host.to(device), lay_out(host, *anchors, head.head_config).to(device)
    with torch.no_grad():
        taps = head.head_config.tap_layers
        seen = target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)
    head.zero_grad()
    result: DraftLoss = HeadWithLoss(head, LossConfig())(target, batch, drafts, seen)
    result.loss_sum.backward()
    return result, {name: p.grad for name, p in head.named_parameters()}


@pytest.mark.parametrize("kind", COMPILATIONS)
def test_compiled_layers_give_the_same_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler of FlexAttention, which has no gradients on a CPU."""
    target, head = models(kind, CPU)
    plain = [loss_and_gradients(target, head, seed) for seed in range(3)]
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr("jetspec.train.blocks.make_visible", make_block_mask)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in head.layers:
        layer.compile(dynamic=False, backend=counter)
    fast = [loss_and_gradients(target, head, seed) for seed in range(3)]
    assert 0 < counter.frame_count <= COMPILATIONS[kind]
    for (loss, grads), (expected, expected_grads) in zip(fast, plain, strict=True):
        torch.testing.assert_close(loss.loss_sum, expected.loss_sum, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "eagle3"])
def test_compiled_training_on_a_gpu_follows_the_cpu(kind: str) -> None:
    expected, expected_grads = loss_and_gradients(*models(kind, CPU), 0)
    target, head = models(kind, CUDA)
    for layer in head.layers:
        layer.compile(dynamic=False)
    loss, grads = loss_and_gradients(target, head, 0)
    torch.testing.assert_close(loss.loss_sum.cpu(), expected.loss_sum, atol=1e-3, rtol=1e-4)
    for name, grad in grads.items():
        assert grad is not None
        torch.testing.assert_close(grad.cpu(), expected_grads[name], atol=1e-3, rtol=1e-3)
