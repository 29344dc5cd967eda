"""Attention backend for vLLM: `ops.tree_attention` over vLLM's KV cache pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from jetspec import ops
from jetspec.ops import AttentionPlan, KernelPlan
from jetspec.ops.select import uses_kernel
from jetspec.tree import WORD
from jetspec.types import BatchLayout, KVPages, TreeBatch
from jetspec_vllm.compat import page_layouts


class StepTrees:
    """Trees of the current step, written by the runner and read by attention.

    The tensors keep their addresses, so captured passes can read them.
    """

    def __init__(self, num_requests: int, budget: int, device: torch.device) -> None:
        words = -(-budget // WORD)
        self.ancestor_RNW = torch.zeros(num_requests, budget, words, dtype=torch.int32, device=device)
        self.is_tree_R = torch.zeros(num_requests, dtype=torch.bool, device=device)
        self.has_trees = False

    def put(self, ancestor_BNW: Tensor, is_tree_B: Tensor) -> None:
        """Set the trees; all other requests are chains."""
        self.clear()
        count = len(is_tree_B)
        self.ancestor_RNW[:count] = ancestor_BNW
        self.is_tree_R[:count] = is_tree_B
        self.has_trees = True

    def clear(self) -> None:
        """Make every request a chain."""
        if self.has_trees:
            self.is_tree_R.zero_()
        self.has_trees = False

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """Ancestor masks of the first `count` requests, and which of these are trees."""
        return self.ancestor_RNW[:count], self.is_tree_R[:count]


@dataclass(frozen=True)
class TreeMetadata:
    """Attention plan shared by all layers of a group in one forward."""

    plan: AttentionPlan | KernelPlan
    num_tokens: int


class TreeMetadataBuilder(AttentionMetadataBuilder[TreeMetadata]):
    """Plans attention once per step. Captured passes read persistent buffers: vLLM's own, or those kept here."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        num_requests = vllm_config.scheduler_config.max_num_seqs
        self.trees: StepTrees | None = None
        """Set by the runner. None: all requests are chains."""
        self.cached_len_R = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeMetadata:
        given = common_attn_metadata
        if given.causal is not True:
            raise ValueError("JetSpec's attention is causal outside its trees")
        start_B1, slot_T = given.query_start_loc, given.slot_mapping
        cached_len_B = self.cached_len_R[: given.num_reqs]
        torch.sub(given.seq_lens, start_B1.diff(), out=cached_len_B)
        layout = BatchLayout(
            page_BP=given.block_table_tensor,
            cached_len_B=cached_len_B,
            query_start_B1=start_B1,
            page_size=self.kv_cache_spec.block_size,
            max_queries=given.max_query_len,
        )
        masks: tuple[Tensor | None, Tensor | None] = (None, None)
        # A captured pass serves chains and trees, so it always reads masks. The reference plans per step: chains are
        # cheaper without.
        if self.trees is not None and (self.trees.has_trees or uses_kernel(slot_T)):
            masks = self.trees.masks(given.num_reqs)
        # Only windows read positions, and windows are refused.
        plan = ops.plan_attention(TreeBatch(slot_T, slot_T, slot_T, layout, *masks))
        return TreeMetadata(plan, given.num_actual_tokens)


class TreeAttentionImpl(AttentionImpl[TreeMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        asked = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "soft-capped attention": logits_soft_cap,
            f"a {kv_cache_dtype} cache": kv_cache_dtype != "auto",
            f"{attn_type} attention": attn_type != "decoder",
            "layers that share a cache": kv_sharing_target_layer_name,
            "attention sinks": sinks is not None,
        }
        if refused := [name for name, value in asked.items() if value]:
            raise ValueError(f"JetSpec's trees do not support {', '.join(refused)}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        slot_T = slot_mapping[: len(key)]
        key, value = key[: len(slot_T)], value[: len(slot_T)]
        if not uses_kernel(slot_T):  # the kernel skips negative slots itself
            real_T = slot_T >= 0
            key, value, slot_T = key[real_T], value[real_T], slot_T[real_T]
        ops.store_kv(pages_of(kv_cache), key, value, slot_T)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TreeMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        T = attn_metadata.num_tokens
        out_THE = output[:T].view(T, self.num_heads, self.head_size)
        ops.tree_attention(query[:T], pages_of(kv_cache), attn_metadata.plan, self.scale, None, out_THE)
        return output


class TreeAttentionBackend(AttentionBackend):
    """Backend with pages of (position, head, key | value), which the operations read in place."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  vLLM's own form
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        return TreeMetadataBuilder

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True: the drafter computes attention of head blocks itself, causal or not."""
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...] | None:
        return page_layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)


def pages_of(kv_cache: Tensor) -> KVPages:
    """Views of a layer's cache as pages of keys and of values. Its shape is (pages, G, S, 2E) with positions
    outermost in memory, so slots are evenly spaced."""
    k, v = kv_cache.transpose(1, 2).chunk(2, -1)
    return KVPages(k, v)
