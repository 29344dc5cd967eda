"""Draft trees: their representation, their construction from candidates, and the acceptance of a path by the target."""

from jetspec.ops.noise import gumbel
from jetspec.tree.accept import accept, choose_nodes, choose_token, filter_logits, forbid, least_kept, penalize, walk
from jetspec.tree.build import GrowingTree, build_tree, build_tree_reference
from jetspec.tree.draft_tree import WORD, Acceptance, Candidates, DraftTree, children_of, pack_bits, unpack_bits
from jetspec.tree.ngrams import MAX_CHAIN, Matches, NgramTable, append, learn, match, merge
from jetspec.tree.tally import SUMS, Drawn, tally_choices

__all__ = [
    "MAX_CHAIN",
    "SUMS",
    "WORD",
    "Acceptance",
    "Candidates",
    "DraftTree",
    "Drawn",
    "GrowingTree",
    "Matches",
    "NgramTable",
    "accept",
    "append",
    "build_tree",
    "build_tree_reference",
    "children_of",
    "choose_nodes",
    "choose_token",
    "filter_logits",
    "forbid",
    "gumbel",
    "learn",
    "least_kept",
    "match",
    "merge",
    "pack_bits",
    "penalize",
    "tally_choices",
    "unpack_bits",
    "walk",
]
