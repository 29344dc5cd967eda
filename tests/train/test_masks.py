"""Dense masks and block masks of one attention pattern give the same results, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention

from jetspec.data.corpus import PackedBatch
from jetspec.models.decoder import Decoder, DecoderConfig
from jetspec.models.draft_head import DraftHead, EdgeConfig, HeadConfig
from jetspec.models.masked_attention import (
    make_block_mask,
)
from jetspec.train.blocks import choose_anchors, document_mask, lay_out_blocks
from jetspec.train.config import LossConfig
from jetspec.train.loss import DraftLoss, block_loss
from tests.models.head_paged import make_head

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows gradients of FlexAttention on a CPU without its compiler."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def packed(rows: int, length: int, seed: int = 0) -> PackedBatch:
    """Rows of three documents, then padding."""
    sizes = [length // 2, length // 8, length // 4]
    padding = length - sum(sizes)
    document = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([*sizes, padding]))
    position = torch.cat([*(torch.arange(n) for n in sizes), torch.zeros(padding, dtype=torch.long)])
    token = torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(seed))
    written = (document >= 0) & (position > 1)
    return PackedBatch(token, *(x.repeat(rows, 1) for x in (position, document, written)))


def layers(num_layers: int = 3, windows: tuple[int | None, ...] = ()) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=50,
        hidden_size=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        inner_size=48,
        max_len=512,
        qk_norm=True,
        windows=windows,
    )


def head_config(causal: bool = True, block_size: int = 4, windows: tuple[int | None, ...] = ()) -> HeadConfig:
    return HeadConfig(
        layers(windows=windows),
        tap_layers=(0, 1),
        mask_token=2,
        block_size=block_size,
        causal=causal,
        causal_windows=not causal,
        edge=EdgeConfig(4),
    )


def models(causal: bool, windows: tuple[int | None, ...], device: torch.device) -> tuple[Decoder, DraftHead]:
    target = Decoder(layers(2, (9, None))).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3, generator=generator)
    head = make_head(head_config(causal, windows=windows), seed=4)
    return target.to(device), head.to(device)


def loss_and_gradients(
    target: Decoder, head: DraftHead, seed: int, device: torch.device
) -> tuple[DraftLoss, dict[str, Tensor | None]]:
    """The loss of one batch, and its gradients."""
    host = packed(2, 64, seed)
    anchors = choose_anchors(host, 9, torch.Generator().manual_seed(seed))
    batch, blocks = host.to(device), lay_out_blocks(host, *anchors, head.head_config).to(device)
    with torch.no_grad():
        taps = head.head_config.tap_layers
        seen = target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)
    head.zero_grad()
    result = block_loss(head, target, batch, blocks, seen, LossConfig())
    result.loss_sum.backward()
    # copies, because Module.to moves gradients with the weights
    return result, {name: None if p.grad is None else p.grad.clone() for name, p in head.named_parameters()}


@pytest.mark.parametrize(("causal", "windows"), [(True, ()), (True, (5, None, 5)), (False, (5, None, 5))])
def test_compiled_layers_give_the_same_gradients(
    causal: bool, windows: tuple[int | None, ...], flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = models(causal, windows, CPU)
    plain = [loss_and_gradients(target, head, seed, CPU) for seed in range(3)]
    monkeypatch.setattr("jetspec.train.blocks.make_visible", make_block_mask)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in head.layers:
        layer.compile(dynamic=False, backend=counter)
    fast = [loss_and_gradients(target, head, seed, CPU) for seed in range(3)]
    assert counter.frame_count <= 2 + len(set(windows)), "all layers and batches share a compilation"
    for (loss, grads), (expected, expected_grads) in zip(fast, plain, strict=True):
        torch.testing.assert_close(loss.loss_sum, expected.loss_sum, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_compiled_training_on_a_gpu_follows_the_cpu() -> None:
    target, head = models(True, (), CPU)
    expected, expected_grads = loss_and_gradients(target, head, 0, CPU)
    target, head = target.to(CUDA), head.to(CUDA)
    for layer in head.layers:
        layer.compile(dynamic=False)
    loss, grads = loss_and_gradients(target, head, 0, CUDA)
    torch.testing.assert_close(loss.loss_sum.cpu(), expected.loss_sum, atol=1e-3, rtol=1e-4)
    for name, grad in grads.items():
        assert grad is not None and expected_grads[name] is not None
        torch.testing.assert_close(grad.cpu(), expected_grads[name], atol=1e-3, rtol=1e-3)
