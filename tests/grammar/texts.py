"""Grammars over the tokens of the tiny model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from jetspec.grammar.constraint import Grammars
from jetspec.tree import unpack_bits
from tests.train.tiny_model import END_TOKEN, VOCAB, byte_tokenizer


@cache
def grammars() -> Grammars:
    pytest.importorskip("xgrammar", reason="grammars need xgrammar")
    return Grammars(byte_tokenizer().token_bytes(), VOCAB, frozenset({END_TOKEN}))


def allowed_tokens(constraint: Any, vocab: int = VOCAB) -> list[int]:
    mask_W = torch.full((-(-vocab // 32),), -1, dtype=torch.int32)
    constraint.allow(mask_W)
    return list(unpack_bits(mask_W, vocab).nonzero().flatten().tolist())
