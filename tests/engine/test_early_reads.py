"""Kernels with programmatic launch read rope tables before they wait, so another kernel must run in between."""

from __future__ import annotations

import pytest
from torch import Tensor

from jetspec import ops
from jetspec.models.decoder import Decoder, DecoderStack
from jetspec.types import SamplingParams
from tests.engine.tiny import engine_of, run, tiny_decoder


@pytest.mark.parametrize("who", ["none", "head", "edge", "eagle3"])
def test_tokens_are_embedded_between_rope_and_attention(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding lookup is a kernel of torch, which is not launched early."""
    steps: list[str] = []
    rope, embed, rotate_store = DecoderStack.rope, Decoder.embed, ops.rotate_store

    def noted_rope(self: DecoderStack, position: Tensor) -> object:
        steps.append("table")
        return rope(self, position)

    def noted_embed(self: Decoder, token: Tensor) -> Tensor:
        steps.append("embed")
        return embed(self, token)

    def noted_rotate(*inputs: object) -> Tensor:
        steps.append("read")
        return rotate_store(*inputs)  # type: ignore[arg-type]

    engine = engine_of(tiny_decoder(), who)
    monkeypatch.setattr(DecoderStack, "rope", noted_rope)
    monkeypatch.setattr(Decoder, "embed", noted_embed)
    monkeypatch.setattr(ops, "rotate_store", noted_rotate)
    run(engine, [[1, 2, 3], [4]], SamplingParams(max_tokens=4))
    assert steps.count("read") > steps.count("table") > 2
    for at, step in enumerate(steps):
        if step == "read":
            last = max(i for i in range(at) if steps[i] == "table")
            assert "embed" in steps[last:at]
