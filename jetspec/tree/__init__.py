"""Draft trees: what they are, how they are built from candidates, and which path of them the target keeps."""

from jetspec.tree.accept import Acceptance, accept, walk
from jetspec.tree.adjust import forbid, penalize
from jetspec.tree.build import Candidates, GrowingTree, build_tree, build_tree_reference
from jetspec.tree.draft_tree import WORD, DraftTree, children_of, draw, pack_bits, unpack_bits
from jetspec.tree.sample import choose_nodes, choose_token, filter_logits, gumbel

__all__ = [
    "WORD",
    "Acceptance",
    "Candidates",
    "DraftTree",
    "GrowingTree",
    "accept",
    "build_tree",
    "build_tree_reference",
    "children_of",
    "choose_nodes",
    "choose_token",
    "draw",
    "filter_logits",
    "forbid",
    "gumbel",
    "pack_bits",
    "penalize",
    "unpack_bits",
    "walk",
]
