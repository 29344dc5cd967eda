"""Output that follows a grammar: which tokens may come after every node of a draft tree.

The masks are made on the host, from the trees that a round has built, while the device verifies them. Grammars are
the work of the `xgrammar` library, which is imported when somebody first asks for one.
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

from jetspec.grammar.schema import enforceable
from jetspec.interrupt import uninterrupted
from jetspec.ops.transfer import Download, send, upload
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


@uninterrupted()
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
        self._library = xgrammar

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
        self._ends_W = _mask(end_tokens, vocab_size)
        unseen = {token for token in range(vocab_size) if token >= len(tokens) or not tokens[token]}
        self._silent = frozenset(unseen - end_tokens)
        self._silent_W = _mask(self._silent, vocab_size)

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
        schema, tagged = ANY_OBJECT, dict[str, Any]()
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
                    return self._compiler.compile_structural_tag(self._tagged(**tagged))
                case "regex":
                    return self._compiler.compile_regex(grammar.source)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.source)
        except Exception as error:  # the library has no class for what a user got wrong
            raise ValueError(f"the grammar ({grammar.kind}) cannot be used: {_reason(error)}") from error
        kinds = "json_object, json_schema, calls, regex or ebnf"
        raise ValueError(f"grammar kind {grammar.kind!r} is unknown; use {kinds}")

    def _tagged(self, schema: str, begin: str, end: str, once: bool = False) -> dict[str, Any]:
        """Any text, in which the one tag is always followed by JSON of the schema and the other tag.

        If they may come only `once`, the text ends with them.

        The schema is handed over as the grammar that it is alone, because between tags the library would read it in
        another way, in which objects are closed.
        """
        rules = self._library.Grammar.from_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
        space = {"type": "regex", "pattern": rf"[ \n\r\t]{{0,{MAX_WHITESPACE}}}"}
        inside = {"type": "sequence", "elements": [space, {"type": "grammar", "grammar": str(rules)}, space]}
        tag = {"type": "tag", "begin": begin, "content": inside, "end": end}
        text = {"type": "triggered_tags", "triggers": [begin], "tags": [tag], "stop_after_first": once}
        return {"type": "structural_tag", "format": text}

    def start(self, grammar: Grammar) -> Constraint:
        """A constraint that stands at the beginning of a text."""
        compiled = self.compile(grammar) if grammar.compiled is None else grammar.compiled
        matcher = self._library.GrammarMatcher(compiled)
        if grammar.kind == "calls":
            return CallsConstraint(matcher, self._ends_W, self._silent, self._silent_W)
        return GrammarConstraint(matcher, self._ends_W)


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


class CallsConstraint(GrammarConstraint):
    """Free text with calls in it. Wherever the text may end, outside of calls, it is what plain decoding writes.

    So tokens that add nothing to a text may come there, which the library never allows, and therefore does not see.
    """

    def __init__(self, matcher: Any, ends_W: Tensor, silent: frozenset[int], silent_W: Tensor) -> None:
        super().__init__(matcher, ends_W)
        self._silent, self._silent_W = silent, silent_W
        self._seen: list[bool] = []
        """Of the tokens gone on by, which the library saw."""

    def allow(self, mask_W: Tensor) -> None:
        super().allow(mask_W)
        if self._is_free():
            mask_W |= self._silent_W

    def advance(self, token: int) -> bool:
        is_seen = token not in self._silent
        follows = super().advance(token) if is_seen else self._is_free()
        self._seen += [is_seen] * follows
        return follows

    def rollback(self, count: int) -> None:
        first = len(self._seen) - count
        super().rollback(sum(self._seen[first:]))
        del self._seen[first:]

    def _is_free(self) -> bool:
        return bool(self._matcher.is_completed()) and not self._matcher.is_terminated()


def _read_tagged(source: str) -> dict[str, Any]:
    """The tags around a call, its schema in a form that is enforced, and whether there is only one."""
    try:
        asked = json.loads(source)
        tagged = {name: asked[name] for name in ("begin", "end", "schema")}
    except (ValueError, RecursionError, TypeError, KeyError):
        raise ValueError("a grammar of calls is a JSON object of begin, end and schema") from None
    return {**tagged, "schema": enforceable(json.dumps(tagged["schema"])), "once": asked.get("once") is True}


def _mask(tokens: Iterable[int], vocab_size: int) -> Tensor:
    """Words in which the bits of these tokens are set."""
    is_set_V = torch.zeros(vocab_size, dtype=torch.bool)
    is_set_V[sorted(tokens)] = True
    return pack_bits(is_set_V)


def _reason(error: Exception) -> str:
    """The first line of a message, without the place in the library's source that it comes from."""
    first = str(error).strip().partition("\n")[0]
    if "Check failed" in first:  # an assertion of the library's, in terms of its inside
        return "it is too large or too intricate"
    return re.sub(r"^\[[^]]*\] \S+: ", "", first) or "it is not valid"
