"""Output that follows a grammar: which tokens may come after every node of a draft tree.

The masks are made on the host, from the trees that a round has built, while the device verifies them. Grammars are
the work of the `xgrammar` library, which is imported when somebody first asks for one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from jetspec.engine.rows import Download, send, upload
from jetspec.engine.schema import enforceable
from jetspec.tree import DraftTree, children_of, pack_bits
from jetspec.tree.draft_tree import WORD
from jetspec.types import Constraint, Grammar, Request

CACHE_BYTES = 256 << 20
"""Memory for compiled grammars, and for those of their parts that others may share; the longest unused go first."""
MAX_WHITESPACE = 32
"""Longest run of spaces and line breaks between the parts of a JSON text; without a bound a model may never end it."""

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters, but for line breaks, which the library keeps between the parts of a JSON text."""
ANY_OBJECT = '{"type": "object"}'


class TreeMasks:
    """What the constrained requests of a batch may write. The trees travel to the host while the device goes on."""

    def __init__(self, tree: DraftTree, requests: Sequence[Request]) -> None:
        self.constraints = {row: r.constraint for row, r in enumerate(requests) if r.constraint is not None}
        self.trees = Download(torch.stack((tree.token_BN, tree.parent_BN), 1))

    def compute(self, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the batch that are constrained, and for each of their nodes a mask of the tokens that may follow."""
        trees = self.trees.read()
        N, V = logits_BNV.shape[1:]
        mask_RNW = torch.full((len(self.constraints), N, -(-V // WORD)), -1, dtype=torch.int32)
        for mask_NW, (row, constraint) in zip(mask_RNW, self.constraints.items(), strict=True):
            tokens, parents = trees[row].tolist()
            mask_tree(constraint, tokens, parents, mask_NW)
        row_R = upload(list(self.constraints), torch.int64, logits_BNV.device)
        return row_R, send(mask_RNW, logits_BNV.device)


def mask_tree(constraint: Constraint, tokens: Sequence[int], parents: Sequence[int], mask_NW: Tensor) -> None:
    """Fill in the masks of the nodes that can be reached; the others are left as they are, for no choice leads there.

    Node 0 is the anchor, which the constraint has seen. It ends where it began.
    """
    children = children_of(parents)

    def visit(node: int) -> None:
        constraint.allow(mask_NW[node])
        for child in children[node]:
            if constraint.advance(tokens[child]):
                visit(child)
                constraint.rollback(1)

    visit(0)


class Grammars:
    """Grammars over one vocabulary. Compiling may take a while, so a server does it beforehand, in any thread."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, end_tokens: frozenset[int]) -> None:
        try:
            import xgrammar
        except ImportError:
            raise ValueError(
                "a grammar needs the package xgrammar; install it with: pip install 'jetspec[serve]'"
            ) from None
        self._matcher = xgrammar.GrammarMatcher

        def compiler(tokens: list[bytes]) -> Any:
            info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=sorted(end_tokens))
            return xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

        tokens = list(token_bytes[:vocab_size])
        self.vocabulary = (tokens, vocab_size, end_tokens)
        """What another process needs to make the same of a grammar."""
        self._compiler = compiler(tokens)
        # The library lets some strings hold tabs and other control characters as they are, which is not JSON. A token
        # without bytes is one that it never allows.
        self._json_compiler = compiler([b"" if CONTROL.search(token) else token for token in tokens])
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()
        ends_V = torch.zeros(vocab_size, dtype=torch.bool)
        ends_V[sorted(end_tokens)] = True
        self._ends_W = pack_bits(ends_V)

    def find(self, grammar: Grammar) -> Any | None:
        """What `compile` has made of this grammar before, if it is still there."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compile(self, grammar: Grammar) -> Any:
        """The library's form of a grammar. It is kept for a while, but only who holds it is sure to have it."""
        compiled = self.find(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                if grammar in self._kept:  # somebody else was faster
                    return self._kept[grammar]
                self._kept[grammar] = compiled
                self._kept_bytes += compiled.memory_size_bytes
                while self._kept and self._kept_bytes > CACHE_BYTES:
                    self._kept_bytes -= self._kept.popitem(last=False)[1].memory_size_bytes
        return compiled

    def _compile(self, grammar: Grammar) -> Any:
        schema = enforceable(grammar.source) if grammar.kind == "json_schema" else ANY_OBJECT
        try:
            match grammar.kind:
                case "json_schema" | "json_object":
                    return self._json_compiler.compile_json_schema(
                        schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                    )
                case "regex":
                    return self._compiler.compile_regex(grammar.source)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.source)
        except Exception as error:  # the library has no class for what a user got wrong
            raise ValueError(f"the grammar ({grammar.kind}) cannot be used: {_reason(error)}") from error
        raise ValueError(f"grammar kind {grammar.kind!r} is unknown; use json_object, json_schema, regex or ebnf")

    def start(self, grammar: Grammar) -> Constraint:
        """A constraint that stands at the beginning of a text."""
        compiled = self.compile(grammar) if grammar.compiled is None else grammar.compiled
        return GrammarConstraint(self._matcher(compiled), self._ends_W)


class GrammarConstraint:
    """A grammar followed through one text. Where no token of the vocabulary can go on, the text may only end."""

    def __init__(self, matcher: Any, ends_W: Tensor) -> None:
        self._matcher, self._ends_W = matcher, ends_W

    def allow(self, mask_W: Tensor) -> None:
        if self._matcher.is_terminated():
            return  # nothing follows the end
        self._matcher.fill_next_token_bitmask(mask_W[None])
        if not mask_W.any():
            mask_W.copy_(self._ends_W)

    def advance(self, token: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


def _reason(error: Exception) -> str:
    """The first line of a message, without the place in the library's source that it comes from."""
    first = str(error).strip().partition("\n")[0]
    if "Check failed" in first:  # an assertion of the library's, in terms of its inside
        return "it is too large or too intricate"
    return re.sub(r"^\[[^]]*\] \S+: ", "", first) or "it is not valid"
