"""Random weights have the dtype and device of real ones."""

from __future__ import annotations

import pytest
import torch

from jetspec.models.decoder import DecoderConfig
from jetspec.models.random_weights import random_head, random_target
from jetspec.train.config import HeadShape
from jetspec.train.run import head_config

TARGET = DecoderConfig("qwen3", 64, 32, 6, 4, 2, 16, 48, max_len=256, qk_norm=True)
HEAD = head_config(HeadShape(num_layers=2, mask_token=63, edge_rank=4), TARGET)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("what", ["target", "head"])
def test_dtype_and_device(what: str, device: str) -> None:
    """Rotary angles stay in float32."""
    where, dtype = torch.device(device), torch.bfloat16
    model = random_target(TARGET, dtype, where) if what == "target" else random_head(HEAD, dtype, where)
    state = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in state} == {device}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    torch.testing.assert_close(model.inv_freq.cpu(), TARGET.rope.inv_freq(TARGET.head_dim), rtol=0, atol=0)
