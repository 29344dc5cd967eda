"""Heads of the speculators library with random weights, and what they compute."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

# The library imports it for training only.
sys.modules.setdefault("datasets", ModuleType("datasets")).__dict__.setdefault("load_from_disk", None)

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models import attention, dflash, dflash2, dspark, eagle3, peagle, xpress  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

create_mask = dflash.core.create_anchor_block_mask_mod


def moving_windows(
    anchor_positions: Tensor, block_size: int, total_seq_len: int, sliding_window: int | None, **settings: Any
) -> tuple[Any, int, int]:
    """Returns the library's mask with windows that move with the slots, as in vLLM, which runs these heads; those of
    the library stay at the anchor."""
    window = sliding_window or 0
    blocks = {"anchor_positions": anchor_positions, "block_size": block_size, "total_seq_len": total_seq_len}
    mask, queries, keys = create_mask(**blocks, sliding_window=(window and total_seq_len) or None, **settings)
    position = anchor_positions.repeat_interleave(block_size) + torch.arange(queries) % block_size

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask(batch, head, query, key) & ((key >= total_seq_len) | (key > position[query] - window))

    return (near if window else mask), queries, keys


dflash.core.create_anchor_block_mask_mod = moving_windows


def broadcast_mask(rule: Any, *, Q_LEN: int, KV_LEN: int, **_: Any) -> Tensor:
    """Evaluates the rule of a mask at once. The original maps it over each dimension, which takes most of a pass."""
    zero = torch.tensor(0)
    return rule(zero, zero, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN))[None, None]


attention._create_mask = broadcast_mask
VOCAB, HIDDEN, MASK, TAPS = 37, 16, 36, (1, 3)
KINDS = {
    "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
    "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
    "dflash2": (dflash2.DFlash2SpeculatorConfig, dflash2.DFlash2DraftModel),
    "xpress": (xpress.XPressSpeculatorConfig, xpress.XPressDraftModel),
    "eagle3": (eagle3.Eagle3SpeculatorConfig, eagle3.Eagle3DraftModel),
    "peagle": (peagle.PEagleSpeculatorConfig, peagle.PEagleDraftModel),
}
FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig}

COPIES = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}
"""Modules with weights of the target."""


@dataclass
class Peer:
    """A head of the library."""

    kind: str
    model: Any

    @staticmethod
    def make(
        kind: str,
        draft_vocab: int = VOCAB,
        layers: Mapping[str, Any] | None = None,
        family: str = "qwen3",
        taps: Sequence[int] = TAPS,
        **settings: Any,
    ) -> Peer:
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "max_position_embeddings": 128,
            "rope_theta": 1000.0,
        }
        layer_config = FAMILIES[family](**{**sizes, **(layers or {})})
        layer_config._attn_implementation = "eager"
        make_config, make_model = KINDS[kind]
        ids = "eagle_aux_hidden_state_layer_ids" if "eagle" in kind else "aux_hidden_state_layer_ids"
        block = {} if kind == "eagle3" else {"mask_token_id": MASK}
        block |= {} if "eagle" in kind else {"block_size": 5}
        config = make_config(
            transformer_layer_config=layer_config,
            draft_vocab_size=draft_vocab,
            speculators_config=SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
            **{ids: [layer + 1 for layer in taps], **block, **settings},
        )
        model = randomize(make_model(config=config))
        if model.d2t is not None:
            token = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
            model.d2t.copy_(token - torch.arange(draft_vocab))
            model.t2d.zero_()[token] = True
        return Peer(kind, model)

    @staticmethod
    def load(kind: str, folder: Path) -> Peer:
        """Loads a folder that was not written by the library; embedding and output matrix are random."""
        make_config, make_model = KINDS[kind]
        raw = json.loads((folder / "config.json").read_text())
        config = make_config(**{key: value for key, value in raw.items() if key != "dtype"})
        config.transformer_layer_config._attn_implementation = "eager"
        model = randomize(make_model(config=config))
        unset = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert not unset.unexpected_keys
        assert {name.rpartition(".")[0] for name in unset.missing_keys} <= COPIES
        return Peer(kind, model)

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    @property
    def target_tokens(self) -> Tensor:
        """Target token of each token that the head drafts."""
        size = self.model.draft_vocab_size
        return torch.arange(size) if self.model.d2t is None else torch.arange(size) + self.model.d2t

    def block(self, text: Tensor, tap: Tensor, anchor: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns states (S, M), corrected logits (S, V) over all target tokens and the logits of the confidence of
        all slots of the block at an anchor, whose tokens are those of the text."""
        if self.kind == "peagle":
            return self._parallel(text, tap, anchor)
        model, size = self.model, self.model.block_size
        mask = torch.zeros(1, len(text), dtype=torch.long)
        mask[0, anchor] = 1
        documents = torch.zeros_like(mask)
        states = torch.zeros(1, len(text), HIDDEN)
        hidden, logits, _, _, index = model._backbone_forward(
            tap[None], text[None], mask, states, documents, max_anchors=1
        )
        block_tokens, confidence = text[index.flatten()][None], None
        first = block_tokens[:, :1]
        is_anchor_first = model.config.sample_from_anchor
        previous = block_tokens if is_anchor_first else torch.cat((first, block_tokens[:, :-1]), 1)
        hidden, logits = hidden.view(1, size, -1), logits.view(1, size, -1)
        if self.kind == "dspark" and model.markov_head is not None:
            logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        if self.kind == "dspark" and model.confidence_head is not None:
            features = [hidden]
            if model.config.confidence_head_with_markov:
                features.append(model.markov_head.prev_embeddings(previous))
            confidence = model.confidence_head(torch.cat(features, -1))[0]
        if self.kind == "dflash2":
            candidate, score = model.candidate_selector.select(logits, hidden, previous)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, candidate, score)
        if self.kind == "xpress":
            if not is_anchor_first:
                previous = torch.cat((text[None, anchor - 1 : anchor], block_tokens[:, :-1]), 1)
            logits = logits + model.refiner_head.block_bias(previous, hidden)
        full = torch.full((size, VOCAB), -torch.inf)
        full[:, self.target_tokens] = logits[0]
        return hidden[0], full, confidence

    def _parallel(self, text: Tensor, tap: Tensor, anchor: int) -> tuple[Tensor, Tensor, None]:
        """A row for each token up to the anchor but the first, then the masked slots."""
        settings = self.model.config.speculators_config
        size = settings.proposal_methods[0].speculative_tokens if settings else 8
        slots = torch.arange(1, size)
        anchors = torch.cat((torch.arange(anchor), torch.full_like(slots, anchor - 1)))
        depths = torch.cat((torch.zeros(anchor, dtype=torch.long), slots))
        found: list[tuple[Tensor, Tensor]] = []
        hook = self.model.lm_head.register_forward_hook(lambda _, x, out: found.append((x[0][0], out[0])))
        chosen = patch.object(peagle.core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
        documents, last = torch.zeros(1, len(text) - 1, dtype=torch.long), torch.zeros(1, len(text) - 1, HIDDEN)
        with chosen, patch.object(peagle.core, "compute_metrics", lambda **_: (None, None)):
            self.model(tap[None, :-1], text[None, 1:], documents, verifier_last_hidden_states=last)
        hook.remove()
        full = torch.full((size, VOCAB), -torch.inf)
        full[:, self.target_tokens] = found[0][1][-size:]
        return found[0][0][-size:], full, None

    def unrolled(self, text: Tensor, tap: Tensor, steps: int) -> Tensor:
        """Returns the logits (steps, T - 1, V) of chains along a text, from a first row for each of its tokens but the
        first."""
        found: list[Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda _, __, out: found.append(out[0]))
        self.model(tap[None, :-1], text[None, 1:], torch.zeros(1, len(text) - 1, dtype=torch.long), ttt_steps=steps)
        hook.remove()
        return torch.stack(found)


def randomize(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.normal_(0.6 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of a config.json; None removes one."""
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def to_specforge(folder: Path) -> None:
    """Rewrites a P-EAGLE folder in SpecForge's layout."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    own = ("mask_token_id", "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    top = {"architectures": ["PEagleDraftModel"], **{key: raw[key] for key in own}}
    path.write_text(json.dumps(raw["transformer_layer_config"] | top))


def to_authors_layout(folder: Path, architecture: str, own_table: bool, **own: Any) -> None:
    """Rewrites a folder of speculators in the layout of authors: layers at the top, taps counted from 0."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    draft = {
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
        **own,
    }
    top: dict[str, Any] = {"dflash_config": draft} if own_table else draft
    layers = raw["transformer_layer_config"]
    names = {"architectures": [architecture], "num_target_layers": 6, "block_size": raw["block_size"]}
    path.write_text(json.dumps({**layers, **names, **top}))
