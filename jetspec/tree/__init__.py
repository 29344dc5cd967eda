"""Draft trees: what they are, how they are built from candidates, and which path of them the target keeps."""

from jetspec.tree.accept import Acceptance, accept, accepted_tokens
from jetspec.tree.build import Candidates, EdgeFactors, GrowingTree, build_tree, build_tree_reference
from jetspec.tree.draft_tree import DraftTree, draw, pack_bits, unpack_bits
from jetspec.tree.sample import choose_nodes, choose_token, filter_logits, gumbel

__all__ = [
    "Acceptance",
    "Candidates",
    "DraftTree",
    "EdgeFactors",
    "GrowingTree",
    "accept",
    "accepted_tokens",
    "build_tree",
    "build_tree_reference",
    "choose_nodes",
    "choose_token",
    "draw",
    "filter_logits",
    "gumbel",
    "pack_bits",
    "unpack_bits",
]
