"""EAGLE-3 by its definition: row by row, recomputed for every path."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.models.decoder import Decoder
from jetspec.models.eagle3 import Eagle3Head
from tests.models.paged import run_decoder


def features(head: Eagle3Head, target: Decoder, tokens: list[int]) -> list[Tensor]:
    """Returns f_p for every position of a text."""
    _, tap = run_decoder(target, tokens, head.head_config.tap_layers)
    assert tap is not None
    eps, made = head.config.norm_eps, []
    for row in tap:
        if head.input_norm is not None:
            row = norm(row, head.input_norm.weight, eps)
        if head.fc_norm is not None:
            row = torch.cat([norm(x, w, eps) for x, w in zip(row.chunk(len(head.fc_norm)), head.fc_norm, strict=True)])
        made.append(head.fc.weight @ row)
    return made


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Pairs (i, i + E/2) of each head as complex numbers."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Text:
    """Rows of a text, in order."""

    def __init__(self, head: Eagle3Head, target: Decoder) -> None:
        self.head, self.target, self.layer, self.c = head, target, head.layer, head.config
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, token: int, hidden: Tensor) -> Tensor:
        """Returns the layer's output for the next row."""
        layer, c = self.layer, self.c
        embedding = self.target.embedding if self.head.embedding is None else self.head.embedding
        read = norm(hidden, layer.hidden_norm.weight, c.norm_eps)
        row = torch.cat((norm(embedding[token], layer.input_norm.weight, c.norm_eps), read))
        qkv = (layer.attention.qkv.weight @ row).view(-1, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads))
        position = len(self.keys)
        self.keys.append(turn(k, position, c.rope.theta))
        self.values.append(v)
        q = turn(q, position, c.rope.theta)
        heads = []
        for i in range(c.num_heads):
            group = i * c.num_kv_heads // c.num_heads
            score = torch.stack([q[i] @ key[group] for key in self.keys]) * c.head_dim**-0.5
            heads.append(score.softmax(0) @ torch.stack([value[group] for value in self.values]))
        out = (read if self.head.head_config.norm_before_residual else hidden) + layer.attention.out.weight @ torch.cat(
            heads
        )
        gate, up = (layer.mlp.gate_up.weight @ norm(out, layer.post_norm.weight, c.norm_eps)).chunk(2)  # type: ignore[union-attr]
        out = out + layer.mlp.down.weight @ (torch.nn.functional.silu(gate) * up)  # type: ignore[union-attr]
        return norm(out, self.head.norm.weight, c.norm_eps) if self.head.head_config.norm_output else out


def state_after(head: Eagle3Head, target: Decoder, tokens: list[int], path: list[int]) -> Tensor:
    """Returns the normed state after `path`, which follows the last of `tokens`, the anchor."""
    feature, text = features(head, target, tokens), Text(head, target)
    for p in range(1, len(tokens)):
        hidden = text.add(tokens[p], feature[p - 1])
    for token in path:
        hidden = text.add(token, hidden)
    return hidden if head.head_config.norm_output else norm(hidden, head.norm.weight, head.config.norm_eps)


def logprobs_after(
    head: Eagle3Head, target: Decoder, tokens: list[int], path: list[int], draft_temperature: float = 1.0
) -> dict[int, float]:
    """Returns the head's log-probability of each target token."""
    logprob = (head.lm_head.weight @ state_after(head, target, tokens, path) / draft_temperature).log_softmax(0)
    return dict(zip(head.token_of.tolist(), logprob.tolist(), strict=True))


def slow_tree(
    head: Eagle3Head, target: Decoder, tokens: list[int], width: int, depth: int, budget: int, draft_temperature: float
) -> dict[tuple[int, ...], float]:
    """Returns paths and scores of the tree: the best of all candidates of a beam search of `width`."""
    if len(tokens) < 2:
        return {(): 0.0}
    found: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        born = {}
        for path in frontier:
            after = logprobs_after(head, target, tokens, list(path), draft_temperature)
            for token in sorted(after, key=lambda t: -after[t])[:width]:
                born[(*path, token)] = found[path] + after[token]
        found |= born
        frontier = sorted(born, key=lambda path: -born[path])[:width]
    best = sorted(found, key=lambda path: -found[path])[:budget]
    return {path: found[path] for path in best}
