"""Drafter for vLLM: the draft head proposes a tree per request. Its KV cache lies in pages that vLLM manages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from jetspec.models.draft_head import DraftHead
from jetspec.models.head_format import load_head, read_config
from jetspec.models.hub import resolve
from jetspec.models.weights import random_weights
from jetspec.tree import WORD, DraftTree, build_tree
from jetspec.types import BatchLayout, ChoiceModel, KVPages, TreeBatch
from jetspec_vllm.attention import TreeAttentionBackend, pages_of
from jetspec_vllm.draft_graphs import DraftGraphs, DraftInputs
from jetspec_vllm.options import tree_config

MAX_CAPTURED = 64
"""Largest batch whose draft is captured; a graph keeps the memory of its batch."""


class HeadPages(AttentionLayerBase):
    """KV cache of one layer of the head, at the same slots as the target's. vLLM allocates it and shares it by
    prefix, so a prefix hit restores both."""

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[TreeAttentionBackend]:
        return TreeAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )


class SlotTrees:
    """Proposed tree of each request, indexed by vLLM's request state: the order of a batch changes between steps.
    The last entry is a dummy for padding."""

    def __init__(self, num_requests: int, budget: int, device: torch.device) -> None:
        shape, words = (num_requests + 1, budget), -(-budget // WORD)
        self.parent_RN = torch.zeros(shape, dtype=torch.int64, device=device)
        self.depth_RN = torch.zeros(shape, dtype=torch.int64, device=device)
        self.ancestor_RNW = torch.zeros(*shape, words, dtype=torch.int32, device=device)
        self.size_R = torch.ones(num_requests + 1, dtype=torch.int64, device=device)
        self.node_N = torch.arange(budget, device=device)

    def write(self, state_B: Tensor, tree: DraftTree) -> Tensor:
        """Store the shapes of the trees. Returns the tokens below the anchors, (B, budget - 1)."""
        missing = self.parent_RN.shape[1] - tree.token_BN.shape[1]
        words = self.ancestor_RNW.shape[2] - tree.ancestor_BNW.shape[2]
        self.parent_RN[state_B] = F.pad(tree.parent_BN, (0, missing)).long()
        self.depth_RN[state_B] = F.pad(tree.depth_BN, (0, missing)).long()
        self.ancestor_RNW[state_B] = F.pad(tree.ancestor_BNW, (0, words, 0, missing))
        self.size_R[state_B] = tree.size_B.long()
        return F.pad(tree.token_BN[:, 1:], (0, missing))

    def read(self, state_B: Tensor, token_BN: Tensor, size_B: Tensor, max_depth: int) -> DraftTree:
        """Trees of the given requests with these tokens, cut to `size_B` nodes each."""
        depth_BN = torch.where(self.node_N < size_B[:, None], self.depth_RN[state_B], 0)
        return DraftTree(token_BN, self.parent_RN[state_B], depth_BN, self.ancestor_RNW[state_B], size_B, max_depth)


@dataclass(frozen=True)
class Committed:
    """Committed tokens of a step: rows of their hidden states, their positions, and the rows whose slots hold them.
    Entries after the end of a path repeat its anchor."""

    row_T: Tensor
    position_T: Tensor
    place_T: Tensor
    is_path: bool
    """True: one path per request. False: all rows of the step."""


class TreeDrafter(DraftModelSpeculator):
    """Drafts with one pass of the head per step and builds the best tree from its candidates."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.supports_mm_inputs = False
        self.tree = tree_config(vllm_config.additional_config, self.num_speculative_steps)
        self.trees = SlotTrees(self.max_num_reqs, self.tree.budget, device)
        self.page_size = 0
        self.committed: Committed | None = None
        """Set by the runner in every step."""
        self.graphs: DraftGraphs | None = None
        """Captured drafts, bound to the cache they were captured with."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> DraftHead:
        head = self.load_head()
        self.head = head
        self.target: Any = SimpleNamespace(embed=target_model.embed_input_ids, logits=target_model.compute_logits)
        """Embedding and output matrices of the target, which may be sharded over several processes."""
        self.context_weights = head.context_weights()
        self.depth = min(head.head_config.draft_depth(self.tree.depth), self.tree.budget - 1)
        self.layers = {
            f"jetspec_head.layers.{i}": HeadPages(head.config.num_kv_heads, head.config.head_dim, self.dtype)
            for i in range(head.config.num_layers)
        }
        self.vllm_config.compilation_config.static_forward_context.update(self.layers)
        return head

    def load_head(self) -> DraftHead:
        """Loads the head, or random weights of its shape for vLLM's load format `dummy`."""
        name = self.draft_model_config.model
        if self.vllm_config.load_config.load_format != "dummy":
            return load_head(name, dtype=self.dtype, device=self.device)
        return random_weights(DraftHead, read_config(resolve(name)), self.dtype, self.device)

    def set_attn(self, *args: Any) -> None:
        super().set_attn(*args)
        groups = self.kv_cache_config.kv_cache_groups
        self.group = next(i for i, group in enumerate(groups) if not self.layers.keys().isdisjoint(group.layer_names))
        if not self.layers.keys() <= set(groups[self.group].layer_names):
            raise ValueError("vLLM has spread the head's layers over several groups of its KV cache")
        self.page_size = self.block_tables.block_sizes[self.group]

    def profile(self, tap_TX: Tensor) -> None:
        """Draft once for the largest batch, reading `tap_TX`, in a dummy page, so that vLLM counts the memory."""
        page_size, layers = self.vllm_config.cache_config.block_size, self.layers.values()
        inputs = replace(
            self.idle_inputs(self.max_num_reqs, path=1, pages=1),
            tap_TX=tap_TX.clone(),
            position_T=torch.zeros(len(tap_TX), dtype=torch.int64, device=self.device),
            slot_T=torch.zeros(len(tap_TX), dtype=torch.int64, device=self.device),
        )
        kept = self.page_size, [layer.kv_cache for layer in layers]
        self.page_size = page_size
        for layer in layers:
            page = torch.zeros(
                1, page_size, layer.num_kv_heads, 2 * layer.head_dim, dtype=self.dtype, device=self.device
            )
            layer.kv_cache = page.transpose(1, 2)
        self.draft(inputs)
        self.page_size = kept[0]
        for layer, cache in zip(layers, kept[1], strict=True):
            layer.kv_cache = cache

    def idle_inputs(self, num_requests: int, path: int, pages: int) -> DraftInputs:
        """Padding requests: they write to page 0 and to an unused tree."""
        zero_T, zero_B = (
            torch.zeros(count, dtype=torch.int64, device=self.device) for count in (num_requests * path, num_requests)
        )
        return DraftInputs(
            tap_TX=torch.zeros(len(zero_T), self.head.head_config.tap_size, dtype=self.dtype, device=self.device),
            position_T=zero_T,
            slot_T=zero_T.clone(),
            page_BP=torch.zeros(num_requests, pages, dtype=torch.int32, device=self.device),
            anchor_B=zero_B,
            length_B=zero_B.clone(),
            temperature_B=torch.ones(num_requests, dtype=torch.float32, device=self.device),
            state_B=torch.full_like(zero_B, self.max_num_reqs),
        )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Does nothing: drafts are captured by `capture_drafts`."""

    def capture(self) -> None:
        with graph_capture(device=self.device):
            self.capture_drafts()

    def capture_drafts(self) -> None:
        """Capture the draft that follows a decode step, for several batch sizes."""
        self.graphs = None  # frees the memory of the old graphs first
        largest = min(self.max_num_reqs, MAX_CAPTURED)
        pages = self.block_tables.input_block_tables[self.group].shape[1]
        inputs = self.idle_inputs(largest, path=self.depth + 1, pages=pages)
        self.graphs = DraftGraphs(self.draft, inputs, largest)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """Update the head's cache with the committed tokens, then draft. Returns (B, budget - 1) tokens."""
        batch, committed = input_batch, self.committed
        if kwargs.get("dummy_run"):
            return last_sampled.new_zeros(batch.num_reqs, self.num_speculative_steps)
        assert aux_hidden_states and committed is not None
        state_B = batch.idx_mapping.long()
        anchor_B = torch.where(num_sampled > 0, last_sampled.flatten()[state_B], next_prefill_tokens.flatten()[state_B])
        inputs = DraftInputs(
            tap_TX=torch.cat([tap[committed.row_T] for tap in aux_hidden_states], -1),
            position_T=committed.position_T,
            slot_T=slot_mappings[next(iter(self.layers))][committed.place_T],
            page_BP=self.block_tables.input_block_tables[self.group][: batch.num_reqs],
            anchor_B=anchor_B.long(),
            length_B=(batch.seq_lens[: batch.num_reqs] - num_rejected).long(),
            temperature_B=torch.where(temperature[state_B] > 0, temperature[state_B], self.tree.draft_temperature),
            state_B=state_B,
        )
        if self.graphs is not None and committed.is_path and batch.num_reqs <= self.graphs.sizes[-1]:
            return self.graphs.run(inputs)
        return self.draft(inputs)

    def draft(self, inputs: DraftInputs) -> Tensor:
        """Rows of rejected nodes land behind the end of the context, where the block overwrites them."""
        cache = [pages_of(layer.kv_cache) for layer in self.layers.values()]
        self.head.write_context(inputs.tap_TX, inputs.position_T, inputs.slot_T, cache, self.context_weights)
        block = self.block(inputs.anchor_B, inputs.length_B, inputs.page_BP)
        return self.trees.write(inputs.state_B, self.guess(block, inputs.anchor_B, inputs.temperature_B, cache))

    def guess(self, block: TreeBatch, anchor_B: Tensor, temperature_B: Tensor, cache: list[KVPages]) -> DraftTree:
        """Best trees below the anchors, drafted at the temperatures of their requests."""
        hidden_BDM = self.head.propose(block, self.target, cache)[:, : self.depth]
        candidates = self.head.candidates(
            hidden_BDM, anchor_B, self.target, self.tree, ChoiceModel(temperature_B[:, None])
        )
        return build_tree(anchor_B, candidates, self.tree, self.depth)

    def block(self, anchor_B: Tensor, length_B: Tensor, page_BP: Tensor) -> TreeBatch:
        """Input block of the head after each context. Positions past the longest sequence map to page 0, which is
        unused."""
        token_BS = self.head.block_tokens(anchor_B)
        (B, size), page_size = token_BS.shape, self.page_size
        page_BP = F.pad(page_BP, (0, size // page_size + 2)).long()
        position_BS = length_B[:, None] + torch.arange(size, device=length_B.device)
        slot_BS = page_BP.gather(1, position_BS // page_size) * page_size + position_BS % page_size
        start_B1 = torch.arange(0, B * size + 1, size, device=length_B.device)
        layout = BatchLayout(page_BP, length_B, start_B1, page_size, size)
        return TreeBatch(token_BS.flatten(), position_BS.flatten(), slot_BS.flatten(), layout, None)
