"""Model runner for vLLM: places the rows of a request as a tree, verifies it and commits the accepted path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from jetspec import ops
from jetspec.ops import SlotRows
from jetspec.tree import Acceptance, DraftTree, walk
from jetspec_vllm.attention import StepTrees
from jetspec_vllm.compat import draw_tokens, logprob_counts
from jetspec_vllm.drafter import Committed, TreeDrafter

StockRunner: Any = GPUModelRunner
if current_platform.is_cpu():
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner

    StockRunner = CPUModelRunner


@dataclass(frozen=True)
class Placed:
    """Trees of a step and their rows. A request without a tree has its last row only."""

    tree: DraftTree
    is_tree_B: Tensor
    row_BN: Tensor
    """Rows of the nodes; padding repeats the anchor's row."""
    position_T: Tensor
    """Consecutive positions of the rows, as vLLM assigns them."""

    def path_rows(self, verdict: Acceptance) -> tuple[Tensor, Tensor]:
        """Rows of the accepted paths, (B, D + 1), and the rows where plain decoding would have them.

        After the end of a path both are the anchor's row.
        """
        step_D1 = torch.arange(verdict.path_BD1.shape[1], device=self.row_BN.device)
        kept_BD1 = step_D1 <= verdict.length_B[:, None]
        anchor_B1 = self.row_BN[:, :1]
        source_BD1 = torch.where(kept_BD1, self.row_BN.gather(1, verdict.path_BD1), anchor_B1)
        return source_BD1, torch.where(kept_BD1, anchor_B1 + step_D1, anchor_B1)


class TreeRunner(StockRunner):
    """vLLM's model runner with draft trees."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.speculator = TreeDrafter(vllm_config, device)
        self.step = StepTrees(self.max_num_reqs, self.speculator.tree.budget, device)
        self.placed: Placed | None = None
        self.target_rows: list[SlotRows | None] = []
        """KV caches of the target, one entry per group."""
        self.is_plain_R = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        """Requests whose sampling depends on earlier rows, which are not their history in a tree: these decode
        plainly."""

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            self.is_plain_R[self.req_states.req_id_to_index[request.req_id]] = needs_history(request.sampling_params)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self.forget_cache()
        super().initialize_kv_cache(*args, **kwargs)
        for groups in self.attn_groups:
            for group in groups:
                group.get_metadata_builder().trees = self.step
        layers = self.vllm_config.compilation_config.static_forward_context
        drafting = self.speculator.draft_attn_layer_names
        self.target_rows = [
            slot_rows([layers[name] for name in group.layer_names if name not in drafting])
            for group in self.kv_cache_config.kv_cache_groups
        ]

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        super().profile_run(*args, **kwargs)
        self.profile_trees()

    @torch.inference_mode()
    def profile_trees(self) -> None:
        """Allocate once the memory of the largest step, so that vLLM counts it when it sizes its KV cache.

        That is the tapped states, the logits of all nodes with the sampler's copy, and the draft.
        """
        drafter, config = self.speculator, self.vllm_config.model_config
        tap_TX = torch.zeros(
            self.max_num_tokens, drafter.head.head_config.tap_size, dtype=self.dtype, device=self.device
        )
        rows = min(self.max_num_reqs * drafter.tree.budget, self.max_num_tokens)
        hidden_RM = torch.zeros(rows, config.get_hidden_size(), dtype=self.dtype, device=self.device)
        logits_RV = self.model.compute_logits(hidden_RM)
        copy_RV = torch.empty_like(logits_RV, dtype=torch.float32)
        del hidden_RM, logits_RV, copy_RV
        drafter.profile(tap_TX)

    def capture_model(self, **options: Any) -> int:
        """Capture the model. vLLM first captures against a temporary cache to measure memory; state of that cache is
        dropped."""
        size: int = super().capture_model(**options)
        if options.get("profile_only"):
            self.forget_cache()
        return size

    def forget_cache(self) -> None:
        """Drop everything that references the KV cache."""
        self.target_rows = []
        self.speculator.graphs = None

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """Assign slots from consecutive positions, so that every node has its own, then set the positions of the
        trees."""
        block_tables, self.slots = super().prepare_attn(input_batch)
        if input_batch.num_draft_tokens:
            self.placed = self.place(input_batch)
            self.step.put(self.placed.tree.ancestor_BNW, self.placed.is_tree_B)
            self.set_positions(input_batch, self.placed)
        else:
            self.placed = None
            self.step.clear()
        return block_tables, self.slots

    def prepare_dummy_attn(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        self.placed = None
        self.step.clear()
        placed: tuple[tuple[Tensor, ...], Tensor] = super().prepare_dummy_attn(*args, **kwargs)
        return placed

    def place(self, input_batch: Any) -> Placed:
        """Proposed trees as scheduled. The scheduler truncates at the end, so a parent is never missing."""
        batch, trees = input_batch, self.speculator.trees
        state_B, end_B = batch.idx_mapping.long(), batch.query_start_loc[1 : batch.num_reqs + 1].long()
        drafted_B = batch.cu_num_logits[: batch.num_reqs + 1].diff().long() - 1
        anchor_B = end_B - drafted_B - 1
        position_T = batch.positions.clone()
        # Drafts before the end of a prompt are placeholders of the scheduler, not proposed by the head.
        is_tree_B = (drafted_B > 0) & (position_T[anchor_B] >= self.req_states.prefill_len.gpu[state_B])
        is_tree_B &= ~self.is_plain_R[state_B]
        size_B = torch.where(is_tree_B, trees.size_R[state_B].minimum(drafted_B + 1), 1)
        row_BN = anchor_B[:, None] + torch.where(trees.node_N < size_B[:, None], trees.node_N, 0)
        token_BN = batch.input_ids[row_BN].long()
        return Placed(trees.read(state_B, token_BN, size_B, self.speculator.depth), is_tree_B, row_BN, position_T)

    def set_positions(self, input_batch: Any, placed: Placed) -> None:
        """Set each node's position to the anchor's plus its depth, in place."""
        position_BN = placed.position_T[placed.row_BN[:, :1]] + placed.tree.depth_BN
        input_batch.positions[placed.row_BN] = position_BN

    def sample(
        self, hidden_states: Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Sample a token after every node with vLLM's sampler, and accept the path of these choices."""
        placed, batch = self.placed, input_batch
        if placed is None:
            self.speculator.committed = self.committed(batch)
            plain: tuple[SamplerOutput, Tensor, Tensor] = super().sample(hidden_states, batch, grammar_output)
            return plain
        counts = logprob_counts(self.sampler, batch)
        logits_RV, drawn_R = self.draw(hidden_states, batch, grammar_output, want_logprobs=counts is not None)
        batch.positions.copy_(placed.position_T)
        first_B1 = batch.cu_num_logits[: batch.num_reqs, None].long()
        offset_B1 = first_B1 - placed.row_BN[:, :1]
        verdict = walk(placed.tree, drawn_R[placed.row_BN + offset_B1])
        source_BD1, target_BD1 = placed.path_rows(verdict)
        logprobs = None
        if counts is not None:
            logprobs = self.logprobs(batch, counts, logits_RV, drawn_R, source_BD1 + offset_B1, target_BD1 + offset_B1)
        self.compact(source_BD1, target_BD1)
        self.speculator.committed = self.committed(batch, source_BD1, target_BD1)
        return self.report(batch, verdict.token_BD1, verdict.length_B, logprobs)

    def draw(
        self, hidden_states: Tensor, input_batch: Any, grammar_output: Any, *, want_logprobs: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits for log-probabilities, and a sampled token after each row with logits.

        vLLM's noise depends on seed and position. A path has one node per position and positions are still those of the
        trees, so the samples along it equal plain decoding's.
        """
        batch = input_batch
        logits_RV = self.model.compute_logits(hidden_states[batch.logits_indices])
        if grammar_output is not None:
            self.structured_outputs_worker.apply_grammar_bitmask(
                logits_RV, batch, grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            )
        drawn_R, processed_RV = draw_tokens(self.sampler, logits_RV, batch, want_logprobs)
        # Log-probabilities may be those after temperature and filters.
        return processed_RV if str(self.sampler.logprobs_mode).startswith("processed_") else logits_RV, drawn_R

    def logprobs(
        self,
        input_batch: Any,
        counts: tuple[int, int],
        logits_RV: Tensor,
        drawn_R: Tensor,
        source_BD1: Tensor,
        target_BD1: Tensor,
    ) -> Any:
        """Requested log-probabilities. vLLM reads the first rows of a request, so the path's rows are put first."""
        row_R = torch.arange(len(drawn_R), device=self.device)
        row_R[target_BD1] = source_BD1
        return compute_topk_scores(
            logits_RV[row_R],
            counts[0],
            drawn_R[row_R],
            input_batch.cu_num_logits_np.tolist(),
            self.sampler.logprob_token_ids_state,
            input_batch.expanded_idx_mapping,
            counts[1],
            logits_mode=str(self.sampler.logprobs_mode).endswith("_logits"),
        )

    def compact(self, source_BD1: Tensor, target_BD1: Tensor) -> None:
        """Copy K and V of the accepted paths to the slots where plain decoding would have written them."""
        for slot_T, rows in zip(self.slots, self.target_rows, strict=True):
            if rows is not None:
                ops.compact_rows(rows, slot_T[source_BD1], slot_T[target_BD1])

    def committed(
        self, input_batch: Any, source_BD1: Tensor | None = None, target_BD1: Tensor | None = None
    ) -> Committed:
        """Committed tokens of the step: rows of the accepted paths, or all rows if prompts are prefilled in it.
        Positions are consecutive again."""
        if source_BD1 is None or target_BD1 is None or input_batch.is_prefilling_np.any():
            place_T = torch.arange(input_batch.num_tokens, device=self.device)
            row_T = place_T.clone()
            if source_BD1 is not None:
                row_T[target_BD1] = source_BD1
            return Committed(row_T, input_batch.positions[: len(place_T)], place_T, is_path=False)
        target_T = target_BD1.flatten()
        return Committed(source_BD1.flatten(), input_batch.positions[target_T], target_T, is_path=True)

    def report(
        self, input_batch: Any, token_BD1: Tensor, length_B: Tensor, logprobs: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Output of the step for vLLM. Requests whose prompts are not finished commit nothing."""
        batch = input_batch
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (length_B + 1).int(),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        sampled = token_BD1.new_zeros(batch.num_reqs, self.num_speculative_steps + 1)
        sampled[:, : token_BD1.shape[1]] = token_BD1
        return SamplerOutput(sampled, logprobs, None, num_sampled, num_rejected), num_sampled, num_rejected


def slot_rows(layers: list[Any]) -> SlotRows | None:
    """KV caches of a group's layers, one row per slot with K and V of all heads. None: the group has no layers."""
    if not layers:
        return None
    caches = [layer.kv_cache.transpose(1, 2) for layer in layers]
    if len({cache.shape[1:] for cache in caches}) > 1:
        raise ValueError("JetSpec's trees in vLLM do not support layers with different shapes of keys and values")
    if not all(cache.is_contiguous() for cache in caches):
        raise ValueError("JetSpec's trees need pages that follow each other in vLLM's KV cache; these have gaps")
    return SlotRows.of(cache.view(-1, cache.shape[2] * cache.shape[3]) for cache in caches)


def needs_history(params: Any) -> bool:
    """True if the next token of a request depends on history that vLLM's sampler does not see in a tree."""
    return params is not None and bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.structured_outputs
        or getattr(params, "thinking_token_budget", None) is not None
    )
