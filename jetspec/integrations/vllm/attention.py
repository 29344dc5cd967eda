"""vLLM's attention over its own pages, by our tree attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_layout import KVCacheLayout

from jetspec import ops
from jetspec.ops import AttentionPlan
from jetspec.tree import DraftTree, pack_bits
from jetspec.types import BatchLayout, KVPages, TreeBatch


@dataclass
class StepTrees:
    """The trees that the rows of the current step are. The runner writes it, attention reads it."""

    tree: DraftTree | None = None
    """None: every request of the step is a chain."""
    is_tree_B: Tensor | None = None
    """Which requests have one; the others are chains."""

    def ancestors(self, num_rows: int) -> Tensor | None:
        """Who sees whom among the rows of each request, which has at most `num_rows`. None: chains."""
        if self.tree is None or self.is_tree_B is None:
            return None
        chain_NN = torch.ones(num_rows, num_rows, dtype=torch.bool, device=self.is_tree_B.device).tril_()
        more = num_rows - self.tree.token_BN.shape[1]
        visible_BNN = F.pad(self.tree.visible_BNN(), (0, more, 0, more))
        return pack_bits(torch.where(self.is_tree_B[:, None, None], visible_BNN, chain_NN))


@dataclass(frozen=True)
class TreeMetadata:
    """What all layers of a group share in one forward."""

    plan: AttentionPlan
    num_tokens: int


class TreeMetadataBuilder(AttentionMetadataBuilder[TreeMetadata]):
    """Plans attention once per step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.trees = StepTrees()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TreeMetadata:
        given = common_attn_metadata
        start_B1 = given.query_start_loc.long()
        layout = BatchLayout(
            page_BP=given.block_table_tensor.long(),
            cached_len_B=given.seq_lens.long() - start_B1.diff(),
            query_start_B1=start_B1,
            page_size=self.kv_cache_spec.block_size,
            max_queries=given.max_query_len,
        )
        slot_T = given.slot_mapping
        # Positions matter to windows alone, and there are none.
        batch = TreeBatch(slot_T, slot_T, slot_T, layout, self.trees.ancestors(given.max_query_len))
        plan = ops.plan_attention(batch)
        assert isinstance(plan, AttentionPlan)
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
        real_T = slot_T >= 0  # rows of a dummy run have no slot
        ops.store_kv(pages_of(kv_cache), key[: len(slot_T)][real_T], value[: len(slot_T)][real_T], slot_T[real_T])

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
        if attn_metadata is None:  # memory is being measured
            return output.zero_()
        T = attn_metadata.num_tokens
        out_THE = ops.tree_attention(query[:T], pages_of(kv_cache), attn_metadata.plan, self.scale, None)
        output[:T].view_as(out_THE).copy_(out_THE)
        return output


class TreeAttentionBackend(AttentionBackend):
    """Pages of (position, head, key and value side by side): what our operations read in place."""

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
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


def pages_of(kv_cache: Tensor) -> KVPages:
    """A layer's cache as pages of keys and of values. vLLM shows it as (pages, G, S, 2 E) and stores it position by
    position, so these are views whose slots are evenly spaced."""
    k, v = kv_cache.transpose(1, 2).chunk(2, -1)
    return KVPages(k, v)
