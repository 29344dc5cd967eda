"""Constrained decoding: a token mask for every node of a draft tree, from a grammar that xgrammar compiled.

Masks are computed on the host from the trees of a round, while the device runs the verification forward.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from jetspec.files import missing_package
from jetspec.grammar.schema import enforceable
from jetspec.interrupt import uninterrupted
from jetspec.ops.transfer import Download, send, upload
from jetspec.tree import DraftTree, children_of, pack_bits
from jetspec.tree.draft_tree import WORD
from jetspec.types import Constraint, Grammar, Request

CACHE_BYTES = 256 << 20
"""Memory limit of the compiled grammars, and of the parts that xgrammar shares between them; least recently used go."""
MAX_WHITESPACE = 32
"""Longest run of whitespace between the parts of a JSON text; without a bound a model may never end it."""

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters except line breaks, which xgrammar accepts between the parts of a JSON text."""


class TreeMasks:
    """Token masks of the constrained requests of a batch. Construction starts the copy of the trees to the host."""

    def __init__(self, tree: DraftTree, requests: Sequence[Request]) -> None:
        self.constraints = {row: r.constraint for row, r in enumerate(requests) if r.constraint is not None}
        self.trees = Download(torch.stack((tree.token_BN, tree.parent_BN), 1))

    def compute(self, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the constrained rows of the batch, and for each of their nodes the mask of allowed next tokens."""
        trees = self.trees.read()
        N, V = logits_BNV.shape[1:]
        mask_RNW = torch.full((len(self.constraints), N, -(-V // WORD)), -1, dtype=torch.int32)
        for mask_NW, (row, constraint) in zip(mask_RNW, self.constraints.items(), strict=True):
            tokens, parents = trees[row].tolist()
            mask_tree(constraint, tokens, parents, mask_NW)
        row_R = upload(list(self.constraints), torch.int64, logits_BNV.device)
        return row_R, send(mask_RNW, logits_BNV.device)


@uninterrupted()
def mask_tree(constraint: Constraint, tokens: Sequence[int], parents: Sequence[int], mask_NW: Tensor) -> None:
    """Fills the masks of the nodes whose path is allowed; verification cannot reach the others.

    Node 0 is the anchor, which the constraint has already advanced by. The constraint returns to its state.
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
    """Compiles grammars over one vocabulary, with a cache. Thread-safe; compiling may take seconds."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, end_tokens: frozenset[int]) -> None:
        try:
            import xgrammar
        except ImportError:
            raise missing_package("xgrammar", "serve", "a grammar") from None
        self._library = xgrammar

        def compiler(tokens: list[bytes]) -> Any:
            info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=sorted(end_tokens))
            return xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

        tokens = list(token_bytes[:vocab_size])
        self.vocabulary = (tokens, vocab_size, end_tokens)
        """Arguments with which another process makes equal `Grammars`."""
        self._compiler = compiler(tokens)
        # xgrammar allows raw tabs and other control characters in some strings, which is not JSON. It never allows a
        # token without bytes.
        self._json_compiler = compiler([b"" if CONTROL.search(token) else token for token in tokens])
        self._cache: OrderedDict[Grammar, Any] = OrderedDict()
        self._cache_bytes = 0
        self._lock = Lock()
        self._ends_W = _mask(end_tokens, vocab_size)
        empty = {token for token in range(vocab_size) if token >= len(tokens) or not tokens[token]}
        self._empty = frozenset(empty - end_tokens)
        self._empty_W = _mask(self._empty, vocab_size)

    def find(self, grammar: Grammar) -> Any | None:
        """Returns a compiled grammar from the cache, or None."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar)

    def compile(self, grammar: Grammar) -> Any:
        """Returns the compiled form of a grammar; ValueError if it is malformed or cannot be enforced."""
        compiled = self.find(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                if grammar in self._cache:  # another thread was faster
                    return self._cache[grammar]
                self._cache[grammar] = compiled
                self._cache_bytes += compiled.memory_size_bytes
                while self._cache and self._cache_bytes > CACHE_BYTES:
                    self._cache_bytes -= self._cache.popitem(last=False)[1].memory_size_bytes
        return compiled

    def _compile(self, grammar: Grammar) -> Any:
        schema, tagged = '{"type": "object"}', dict[str, Any]()
        if grammar.kind == "json_schema":
            schema = enforceable(grammar.source)
        elif grammar.kind == "calls":
            tagged = _read_tagged(grammar.source)
        try:
            match grammar.kind:
                case "json_schema" | "json_object":
                    return self._json_compiler.compile_json_schema(
                        schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE
                    )
                case "calls":
                    return self._compiler.compile_structural_tag(self._structural_tag(**tagged))
                case "regex":
                    return self._compiler.compile_regex(grammar.source)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.source)
        except Exception as error:  # xgrammar has no exception class for malformed grammars
            raise ValueError(f"the grammar ({grammar.kind}) cannot be used: {_reason(error)}") from error
        kinds = "json_object, json_schema, calls, regex or ebnf"
        raise ValueError(f"grammar kind {grammar.kind!r} is unknown; use {kinds}")

    def _structural_tag(self, schema: str, begin: str, end: str, once: bool = False) -> dict[str, Any]:
        """Free text in which each `begin` is followed by JSON of the schema and `end`. `once`: the text ends there.

        The schema is compiled to rules first: between tags xgrammar would close its objects to further properties.
        """
        rules = self._library.Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        space = {"type": "regex", "pattern": rf"[ \n\r\t]{{0,{MAX_WHITESPACE}}}"}
        inside = {"type": "sequence", "elements": [space, {"type": "grammar", "grammar": str(rules)}, space]}
        tag = {"type": "tag", "begin": begin, "content": inside, "end": end}
        text = {"type": "triggered_tags", "triggers": [begin], "tags": [tag], "stop_after_first": once}
        return {"type": "structural_tag", "format": text}

    def start(self, grammar: Grammar) -> Constraint:
        """Returns a constraint in the state before the first token."""
        compiled = self.compile(grammar) if grammar.compiled is None else grammar.compiled
        matcher = self._library.GrammarMatcher(compiled)
        if grammar.kind == "calls":
            return CallsConstraint(matcher, self._ends_W, self._empty, self._empty_W)
        return GrammarConstraint(matcher, self._ends_W)


class GrammarConstraint:
    """State of a grammar along one text. Where no token of the vocabulary is allowed, the end tokens are."""

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


class CallsConstraint(GrammarConstraint):
    """Free text with tool calls in it. Outside of calls the text equals unconstrained decoding.

    So tokens without bytes are allowed there. xgrammar never allows them, hence they are not passed to it.
    """

    def __init__(self, matcher: Any, ends_W: Tensor, empty: frozenset[int], empty_W: Tensor) -> None:
        super().__init__(matcher, ends_W)
        self._empty, self._empty_W = empty, empty_W
        self._in_matcher: list[bool] = []
        """For each token of the text, whether it was passed to the matcher."""

    def allow(self, mask_W: Tensor) -> None:
        super().allow(mask_W)
        if self._is_free():
            mask_W |= self._empty_W

    def advance(self, token: int) -> bool:
        in_matcher = token not in self._empty
        follows = super().advance(token) if in_matcher else self._is_free()
        self._in_matcher += [in_matcher] * follows
        return follows

    def rollback(self, count: int) -> None:
        first = len(self._in_matcher) - count
        super().rollback(sum(self._in_matcher[first:]))
        del self._in_matcher[first:]

    def _is_free(self) -> bool:
        return bool(self._matcher.is_completed()) and not self._matcher.is_terminated()


def _read_tagged(source: str) -> dict[str, Any]:
    """Arguments of `Grammars._structural_tag` from the source of a grammar of kind `calls`."""
    try:
        raw = json.loads(source)
        tagged = {name: raw[name] for name in ("begin", "end", "schema")}
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ValueError("a grammar of calls is a JSON object of begin, end and schema") from None
    return {**tagged, "schema": enforceable(json.dumps(tagged["schema"])), "once": raw.get("once") is True}


def _mask(tokens: Iterable[int], vocab_size: int) -> Tensor:
    """Bit mask of a set of tokens."""
    is_set_V = torch.zeros(vocab_size, dtype=torch.bool)
    is_set_V[sorted(tokens)] = True
    return pack_bits(is_set_V)


def _reason(error: Exception) -> str:
    """First line of a message of xgrammar, without the source location in front of it."""
    first = str(error).strip().partition("\n")[0]
    if "Check failed" in first:  # an internal assertion of xgrammar
        return "it is too large or too complex"
    return re.sub(r"^\[[^]]*\] \S+: ", "", first) or "it is not valid"
