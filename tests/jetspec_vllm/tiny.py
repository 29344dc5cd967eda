"""Random Qwen3 target and head on disk, and an oracle drafter that is right on one path of each tree."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetspec.models.decoder import DecoderConfig
from jetspec.models.draft_head import EdgeConfig, HeadConfig
from jetspec.models.head_format import save_head
from jetspec.tree import DraftTree
from jetspec.types import TreeBatch
from tests.models.head_paged import make_head

VOCAB, BLOCK = 512, 8


def write_target(folder: Path, sharpness: float = 1.0) -> Path:
    """Norm weights are random too, so that swapping two of them is detected."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3Config(
        **shape, vocab_size=VOCAB, num_hidden_layers=4, head_dim=32, initializer_range=0.12, tie_word_embeddings=False
    )
    model = Qwen3ForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.7, 1.3)
    model.lm_head.weight.data.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def write_head(folder: Path, *, causal: bool = True, edge: bool = False) -> Path:
    layers = DecoderConfig("qwen3", VOCAB, 128, 3, 4, 2, 32, 256, max_len=1024, qk_norm=True)
    term = EdgeConfig(rank=8) if edge else None
    config = HeadConfig(
        layers, (0, 1, 2), mask_token=5, block_size=BLOCK, causal=causal, edge=term, num_target_layers=4
    )
    save_head(make_head(config, seed=3), folder, dtype=torch.float32)
    return folder


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(16, VOCAB) for _ in range(length)] for length in lengths]


@dataclass
class Oracle:
    """Drafter of randomly shaped trees with the right tokens on one scattered path."""

    texts: list[list[int]]
    seen: list[int] = field(default_factory=list)
    """Number of trees per step."""

    def guess(self, drafter: Any, block: TreeBatch, anchor_B: Tensor, temperature_B: Tensor, cache: Any) -> DraftTree:
        budget, depth, length_B = drafter.tree.budget, drafter.depth, block.layout.cached_len_B
        rows = [
            self.tree(anchor, length, budget, depth)
            for anchor, length in zip(anchor_B.tolist(), length_B.tolist(), strict=True)
        ]
        self.seen.append(len(rows))
        token, parent = (torch.tensor(column) for column in zip(*rows, strict=True))
        return DraftTree.from_parents(token, parent, torch.full((len(rows),), budget), depth)

    def tree(self, anchor: int, length: int, budget: int, depth: int) -> tuple[list[int], list[int]]:
        source = random.Random(1000 * length + anchor)
        parents, depths = [0], [0]
        while len(parents) < budget:
            parent = source.choice([node for node, d in enumerate(depths) if d < depth][-5:])
            parents.append(parent)
            depths.append(depths[parent] + 1)
        # Tokens of siblings differ: a node's token is its own number, unless it is on the right path.
        tokens = [anchor, *range(1, budget)]
        text = next((text for text in self.texts if text[length : length + 1] == [anchor]), [])
        node = max(range(budget), key=depths.__getitem__)
        while node:
            if length + depths[node] < len(text):
                tokens[node] = text[length + depths[node]]
            node = parents[node]
        return tokens, parents
