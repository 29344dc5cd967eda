"""The whole method on one page: draft, build, verify, accept, commit, for one sequence.

Slow and obvious: a dense cache, a heap, a walk in plain Python, and a head that recomputes its context in every round.
Any faster engine must generate the same text by the same trees. Drafts are over the whole vocabulary and by the head
alone: `ngrams`, and `shortlist`, `shortlist_parents` and `batch_trees`, which only save time, have no effect here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from transformers import DynamicCache

from jetspec.config import TreeConfig
from jetspec.models.draft_head import DraftHead
from jetspec.models.hf_target import HFTarget
from jetspec.tree import DraftTree, build_tree_reference, choose_token
from jetspec.types import RowSampling, SamplingParams

GREEDY = SamplingParams()

Children = Callable[[int, int], tuple[list[int], list[float]]]
"""(depth, parent token) -> candidate children, best first, with their log-probabilities."""


@torch.inference_mode()
def generate_reference(
    target: HFTarget,
    head: DraftHead | None,
    prompt: list[int],
    max_tokens: int,
    tree: TreeConfig,
    sampling: SamplingParams = GREEDY,
    eos: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Return the target's continuation of `prompt`, and the accepted length of every round.

    Without a head every tree is its anchor alone: plain decoding. `eos` ends the text and is part of it. Between rounds
    the cache and the taps hold every token but the last, the anchor.
    """
    if not prompt:
        raise ValueError("prompt is empty; it needs at least one token")
    rows = RowSampling.of([sampling], [sampling.seed or 0], target.device)
    ends = () if sampling.ignore_eos else eos
    tokens, accepted_lengths = list(prompt), []
    cache = target.new_cache()
    tap = prefill(target, head, tokens[:-1], cache)

    while (left := len(prompt) + max_tokens - len(tokens)) > 0:
        children, entropy = draft(
            target, head, tokens[-1], tap, tree.width, sampling.temperature or tree.draft_temperature
        )
        depth = min(len(entropy), tree.depth or len(entropy))
        drafted = build_tree_reference(tokens[-1], children, tree, depth, entropy)
        logits, new_tap = verify(target, head, drafted, cache)
        path, bonus = accept(drafted, logits, len(tokens), rows)
        tap = commit(target, path, cache, tap, new_tap)

        written = [*drafted.token_BN[0, path[1:]].tolist(), bonus][:left]
        written = written[: next((i for i, token in enumerate(written, 1) if token in ends), left)]
        tokens += written
        accepted_lengths.append(len(written) - 1)
        if written[-1] in ends:
            break
    return tokens[len(prompt) :], accepted_lengths


def prefill(target: HFTarget, head: DraftHead | None, tokens: list[int], cache: DynamicCache) -> Tensor:
    """Process the prompt up to the first anchor, its last token. Returns the taps, (T, X)."""
    if not tokens:
        return torch.empty(0, head.head_config.tap_size if head else 0, dtype=target.model.dtype, device=target.device)
    position = torch.arange(len(tokens), device=target.device)
    visible = position <= position[:, None]
    _, layers = target.forward(torch.tensor(tokens, device=target.device), position, visible, cache)
    return concatenate_taps(head, layers)


def draft(
    target: HFTarget, head: DraftHead | None, anchor: int, tap: Tensor, width: int, draft_temperature: float
) -> tuple[Children, list[float]]:
    """Run the head over [anchor, MASK, ..]. Returns the children of any node, and the entropy of each depth.

    All nodes of a depth share one distribution, unless the head has an edge term, which depends on the parent's token.
    """
    if head is None:
        return lambda depth, parent: ([], []), []
    hidden = draft_states(target, head, anchor, tap)
    base = target.logits(hidden).float() / draft_temperature

    def children(depth: int, parent: int) -> tuple[list[int], list[float]]:
        logits = base[depth - 1]
        if head.edge is not None:
            logits = logits + head.edge(hidden[depth - 1], torch.tensor(parent)).float() / draft_temperature
        logprob, token = logits.log_softmax(-1).sort(descending=True, stable=True)
        return token[:width].tolist(), logprob[:width].tolist()

    return children, torch.distributions.Categorical(logits=base).entropy().tolist()


def draft_states(target: HFTarget, head: DraftHead, anchor: int, tap: Tensor) -> Tensor:
    """Return the states of the slots that predict depths 1..D, (D, M).

    A slot attends to all context rows, which end before the anchor, and to the slots up to itself; in a bidirectional
    head, to every slot.
    """
    block = head.block_tokens(torch.tensor([anchor], device=tap.device))[0]
    position = torch.arange(len(tap) + len(block), device=tap.device)
    context, slots = position.tensor_split([len(tap)])
    visible = torch.ones(len(slots), len(position), dtype=torch.bool, device=tap.device)
    if head.head_config.causal:
        visible = position <= slots[:, None]
    return head.predicting(head.forward_blocks(target.embed(block), slots, tap, context, visible))


def verify(target: HFTarget, head: DraftHead | None, tree: DraftTree, cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Run the target over all nodes: a node attends to the whole prefix, its ancestors and itself.

    Siblings share a position. Returns the logits of the token after each node, (N, V), and the taps, (N, X).
    """
    cached_len = target.cached_len(cache)
    ancestors = tree.visible_BNN()[0].to(target.device)
    prefix = torch.ones(len(ancestors), cached_len, dtype=torch.bool, device=target.device)
    position = cached_len + tree.depth_BN[0].to(target.device)
    visible = torch.cat((prefix, ancestors), 1)
    logits, layers = target.forward(tree.token_BN[0].to(target.device), position, visible, cache)
    return logits, concatenate_taps(head, layers)


def accept(tree: DraftTree, logits: Tensor, num_tokens: int, sampling: RowSampling) -> tuple[list[int], int]:
    """Walk from the anchor to the child that carries the target's choice, until no child does.

    Every token is the target's own choice after its own prefix, whatever the tree. Returns the path, anchor first, and
    the token after it.
    """
    nodes = zip(tree.parent_BN[0].tolist(), tree.token_BN[0].tolist(), strict=True)
    child_of = {family: node for node, family in enumerate(nodes) if node > 0}
    path = [0]
    while True:
        position = torch.tensor([num_tokens + len(path) - 1], device=logits.device)
        choice = int(choose_token(logits[path[-1]][None], sampling, position))
        child = child_of.get((path[-1], choice))
        if child is None:
            return path, choice
        path.append(child)


def commit(target: HFTarget, path: list[int], cache: DynamicCache, tap: Tensor, new_tap: Tensor) -> Tensor:
    """Keep the rows of the path, of all tree rows in the cache and the taps. Returns the taps, (T, X)."""
    prefix = len(tap)
    target.select(cache, [*range(prefix), *(prefix + node for node in path)])
    return torch.cat((tap, new_tap[path]))


def concatenate_taps(head: DraftHead | None, layers: list[Tensor]) -> Tensor:
    """Return the outputs of the layers that the head reads, (T, X). Without a head X is 0."""
    if head is None:
        return layers[0][:, :0]
    return torch.cat([layers[i] for i in head.head_config.tap_layers], -1)
