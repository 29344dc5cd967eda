"""Heads in the layouts of others compute what the modules of their authors do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.config import TreeConfig
from jetspec.models.describe import describe
from jetspec.models.draft_head import DraftHead, HeadConfig, HeadState
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.heads import load_any_head
from jetspec.models.peagle import PEagleHead
from tests.models.head_paged import Embedder, HeadPages
from tests.models.peers import HIDDEN, TAPS, VOCAB, Peer, edit_config, to_authors_layout, to_specforge

LAYERS: dict[str, dict[str, Any]] = {
    "full": {},
    "windowed": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "use_sliding_window": True,
    },
}
DFLASH, DSPARK, XPRESS = {"kind": "dflash"}, {"kind": "dspark", "markov_rank": 6}, {"kind": "xpress", "xpress_rank": 6}
DFLASH2 = {"kind": "dflash2", "selector_rank": 6, "selector_top_k": 7}
PEAGLE = {"kind": "peagle", "taps": (0, 1, 2), "layers": {"num_hidden_layers": 3}}
GATED, RNN = DSPARK | {"markov_head_type": "gated"}, DSPARK | {"markov_head_type": "rnn"}
CONFIDENT, BY_PARENT = (
    {"enable_confidence_head": True, "confidence_head_with_markov": by_parent} for by_parent in (False, True)
)
PEERS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "dflash windowed": DFLASH | {"layers": LAYERS["windowed"]},
    "dflash open windows": DFLASH | {"layers": LAYERS["windowed"], "sliding_window_non_causal": True},
    "dflash anchor first": DFLASH | {"sample_from_anchor": True},
    "dflash reduced": DFLASH | {"draft_vocab": 20},
    "dspark": DSPARK,
    "dspark plain": DSPARK | {"markov_rank": 0, "confidence_head_with_markov": False},
    "dspark fill-in": DSPARK | {"sample_from_anchor": False},
    "dspark gated": GATED,
    "dspark rnn": RNN,
    "dspark rnn fill-in": RNN | {"sample_from_anchor": False},
    "dspark reduced": DSPARK | {"draft_vocab": 20},
    "dspark rnn reduced": RNN | {"draft_vocab": 20},
    "dspark confident": DSPARK | CONFIDENT,
    "dspark confident by parent": DSPARK | BY_PARENT,
    "dspark gated confident": GATED | BY_PARENT,
    "dflash2": DFLASH2 | {"conv_group_size": 4},
    "dflash2 open windows": DFLASH2 | {"conv_group_size": 4, "layers": LAYERS["windowed"]},
    "dflash2 three taps": DFLASH2 | {"conv_group_size": 8, "conv_kernel_size": 3},
    "peagle": PEAGLE,
    "peagle llama": PEAGLE | {"family": "llama", "norm_before_residual": True, "norm_output": True},
    "peagle reduced": PEAGLE | {"draft_vocab": 20, "fc_norm": True},
    "peagle of one layer": PEAGLE | {"layers": {"num_hidden_layers": 1}, "norm_before_fc": True},
    "xpress": XPRESS,
    "xpress anchor first": XPRESS | {"xpress_mlp_ratio": 3, "sample_from_anchor": True},
    "xpress reduced": XPRESS | {"draft_vocab": 20},
}
each_peer = pytest.mark.parametrize("settings", PEERS.values(), ids=PEERS.keys())


def target_of(peer: Peer) -> Embedder:
    """Embedding and output matrix of a peer's target."""
    matrix = torch.zeros(VOCAB, HIDDEN) if peer.model.d2t is not None else peer.model.lm_head.weight
    return Embedder(peer.model.embed_tokens.weight, matrix)


def draft_along(
    head: DraftHead | PEagleHead, target: Embedder, text: Tensor, tap: Tensor, anchor: int
) -> tuple[Tensor, list[Tensor]]:
    """Returns the states of a block, and the log-probabilities of the children of each node along the text, (V) each,
    from a cache in which the text before the anchor was committed in two parts."""
    pages, features = HeadPages(head, 1), torch.zeros(32, head.feature_size) if head.feature_size else None
    state, config = HeadState(target, pages.layers, features, None), head.head_config
    for start, end in ((0, anchor // 2), (anchor // 2, anchor)):
        head.observe(tap[start:end], pages.batch(text[None, start:end]), state)
        pages.lens = [end]
    size = config.block_size if isinstance(config, HeadConfig) else config.depth
    block = pages.batch(torch.zeros(1, size, dtype=torch.long))
    tree, states = TreeConfig(shortlist=0, width=VOCAB, depth=config.depth), list[Tensor]()
    hook = head.norm.register_forward_hook(lambda _, __, out: states.append(out))
    found = head.draft(block, text[anchor : anchor + 1], tree, state, None)
    hook.remove()
    path_state, rows = None if found.path is None else found.path.root_B1S, []
    for depth in range(1, config.depth + 1):
        parent_B1 = text[anchor + depth - 1].view(1, 1)
        token_B1K, logprob_B1K, path_state = found.expand(depth, parent_B1, VOCAB, path_state)
        rows.append(torch.full((VOCAB,), -torch.inf).scatter(0, token_B1K[0, 0], logprob_B1K[0, 0]))
    return states[0], rows


def assert_equal_to(peer: Peer, folder: Path, head: DraftHead | None = None) -> None:
    """A head, by default that of the folder, computes several blocks as a peer does, and drafts the same tokens."""
    loaded, generator = head or load_any_head(folder), torch.Generator().manual_seed(1)
    assert not isinstance(loaded, Eagle3Head)
    for anchor in range(4, 24, 3):
        text = torch.randint(VOCAB - 1, (32,), generator=generator)
        tap = torch.randn(32, loaded.head_config.tap_size, generator=generator)
        assert_equal_block(peer, loaded, text, tap, anchor)


def assert_equal_block(peer: Peer, head: DraftHead | PEagleHead, text: Tensor, tap: Tensor, anchor: int) -> None:
    hidden_SM, logits_SV, confidence_S = peer.block(text, tap, anchor)
    states, rows = draft_along(head, target_of(peer), text, tap, anchor)
    torch.testing.assert_close(states, hidden_SM, atol=1e-4, rtol=0)
    first, edge = len(states) - head.head_config.depth, getattr(head.head_config, "edge", None)
    assert len(rows) == len(states) - first
    for slot, row in enumerate(rows, first):
        expected = logits_SV[slot].log_softmax(-1)
        if confidence_S is not None:
            expected = expected + torch.nn.functional.logsigmoid(confidence_S[slot])
        if edge is None or edge.candidates is None:
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        else:  # the mass of the shortlist is that of the whole vocabulary, not 1
            torch.testing.assert_close(row - row.logsumexp(-1), expected, atol=1e-4, rtol=0)
        assert row.argmax() == expected.argmax()


@each_peer
def test_speculators_folder_computes_what_its_module_does(settings: dict[str, Any], tmp_path: Path) -> None:
    peer = Peer.make(**settings)
    peer.save(tmp_path)
    assert_equal_to(peer, tmp_path)


PARTS: dict[str, dict[str, Any]] = {
    "dspark rnn reduced": {"path_term": "recurrent", "draft_vocab_size": 20, "last_tap": "raw"},
    "dspark confident by parent": {"confidence": "state_and_parent", "edge_rank": 6, "path_term": None},
    "dflash2 three taps": {"convolution_taps": 3, "edge_rank": 6, "last_tap": None},
}


@pytest.mark.parametrize("name", PARTS)
def test_description_names_the_parts(name: str, tmp_path: Path) -> None:
    Peer.make(**PEERS[name]).save(tmp_path)
    edit_config(tmp_path, last_tap=PARTS[name].get("last_tap"))
    facts = describe(tmp_path)
    assert {key: facts[key] for key in PARTS[name]} == PARTS[name]


EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole vocabulary": {"draft_vocab": VOCAB},
    "five taps": {"taps": (0, 1, 2, 3, 4)},
    "residual and output": {"norm_before_residual": True, "norm_output": True},
    "taps together": {"norm_before_fc": True},
    "each tap": {"fc_norm": True},
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("settings", EAGLE3.values(), ids=EAGLE3.keys())
def test_eagle3_folder_computes_what_its_module_does(settings: dict[str, Any], family: str, tmp_path: Path) -> None:
    peer = Peer.make(
        **{"kind": "eagle3", "draft_vocab": 20, "taps": (0, 1, 2), "family": family, **settings},
        layers={"num_hidden_layers": 1},
    )
    peer.save(tmp_path)
    edit_config(tmp_path, has_no_defaults_at_init=False)  # as the library's earlier versions
    head, steps, embedding = load_any_head(tmp_path), 4, peer.model.embed_tokens.weight
    assert isinstance(head, Eagle3Head)
    tap = torch.randn(len(TEXT), head.head_config.tap_size, generator=torch.Generator().manual_seed(3))
    anchor_A, position_T = torch.arange(1, len(TEXT) - steps), torch.arange(len(TEXT))
    drafted = torch.stack([embedding[TEXT[anchor_A + step]] for step in range(steps)], 1)
    visible = (position_T < anchor_A[:, None]) & (position_T > 0)
    rows = (embedding[TEXT], tap, position_T, anchor_A, drafted, visible)
    states_ASM = head.forward_unrolled(*(x[None] for x in rows))[0]
    expected_SAV = peer.unrolled(TEXT, tap, steps)[:, anchor_A - 1]
    torch.testing.assert_close(head.lm_head(states_ASM).transpose(0, 1), expected_SAV, atol=1e-4, rtol=0)
    assert torch.equal(head.token_of, peer.target_tokens)


def test_peagle_of_specforge_computes_the_same(tmp_path: Path) -> None:
    peer = Peer.make(**PEERS["peagle llama"])
    peer.save(tmp_path)
    to_specforge(tmp_path)
    head = load_any_head(tmp_path)
    assert isinstance(head, PEagleHead) and head.head_config.depth == 8 and describe(tmp_path)["format"] == "P-EAGLE"
    head.head_config = replace(head.head_config, depth=4)
    assert_equal_block(peer, head, TEXT, torch.randn(32, 48), 9)


def edit_tensors(folder: Path, rename: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): value for name, value in tensors.items()}, folder / "model.safetensors")


MARKOV: dict[str, Any] = {"markov_rank": 6, **BY_PARENT}
SELECTOR = {"selector_rank": 6, "selector_top_k": 7, "conv_group_size": 4, "conv_kernel_size": 2}
AUTHORS: dict[str, tuple[dict[str, Any], str, bool, dict[str, Any]]] = {
    "plain DeepSpec": (DFLASH | {"sample_from_anchor": True}, "Qwen3DSparkModel", False, {"markov_rank": 0}),
    "DFlash2": (DFLASH2 | {"conv_group_size": 4}, "DFlash2DraftModel", True, SELECTOR),
}
for kind in ("vanilla", "gated", "rnn"):
    typed = {"markov_head_type": kind}
    made = DSPARK | typed | {"enable_confidence_head": True}
    AUTHORS[f"DeepSpec {kind}"] = made, "Qwen3DSparkModel", False, MARKOV | typed | {"num_anchors": 512}
    AUTHORS[f"SpecForge {kind}"] = made, "DSparkDraftModel", True, MARKOV | typed | {"projector_type": "dspark"}
"""Settings of a peer, and the architecture, place and values of its own keys in the layout of its authors."""


@pytest.mark.parametrize("name", AUTHORS)
def test_heads_in_the_layouts_of_their_authors(name: str, tmp_path: Path) -> None:
    settings, architecture, own_table, own = AUTHORS[name]
    peer = Peer.make(**settings)
    peer.save(tmp_path)
    to_authors_layout(tmp_path, architecture, own_table, **own)
    if name.startswith("SpecForge"):  # as in its early files
        edit_tensors(tmp_path, lambda tensor: "logit_head." + tensor if "_head." in tensor else tensor)
    assert_equal_to(peer, tmp_path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_keys_of_dflash_are_read_in_both_places(is_nested: bool, tmp_path: Path) -> None:
    """The table of its own comes first."""
    peer = Peer.make("dflash")
    peer.save(tmp_path)
    to_authors_layout(tmp_path, "DFlashDraftModel", is_nested)
    if is_nested:
        edit_config(tmp_path, target_layer_ids=[0, 2], mask_token_id=1)
    else:
        edit_config(tmp_path, dflash_config={})
    assert_equal_to(peer, tmp_path)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "input_embedding_scale": lambda logits: logits,
    "output_multiplier": lambda logits: logits * 2,
    "logit_scale": lambda logits: logits * 2,
    "final_logit_softcapping": lambda logits: 2 * torch.tanh(logits / 2),
}


@pytest.mark.parametrize("key", SCALES)
def test_scales_of_dflash_are_applied(key: str, tmp_path: Path) -> None:
    peer = Peer.make("dflash")
    peer.save(tmp_path)
    to_authors_layout(tmp_path, "DFlashDraftModel", True, **{key: 2.0})
    head, target = load_any_head(tmp_path), target_of(peer)
    assert isinstance(head, DraftHead)
    if "embedding" in key:  # the target's own embedding stays
        target.embedding = target.embedding.clone()
        peer.model.embed_tokens.weight.mul_(2)
    hidden_SM, logits_SV, _ = peer.block(TEXT, TAP, 9)
    states, rows = draft_along(head, target, TEXT, TAP, 9)
    torch.testing.assert_close(states, hidden_SM, atol=1e-4, rtol=0)
    torch.testing.assert_close(rows, log_softmax_along(SCALES[key](logits_SV), 1), atol=1e-4, rtol=0)


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def log_softmax_along(logits_SV: Tensor, first: int) -> list[Tensor]:
    return [row.log_softmax(-1) for row in logits_SV[first:]]


TEXT = torch.randint(VOCAB - 1, (32,), generator=torch.Generator().manual_seed(1))
TAP = torch.randn(32, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(2))


def write_domino(folder: Path, shifted: bool = True, prefix: int = 1) -> tuple[Peer, dict[str, Tensor]]:
    """Returns a DFlash head whose folder also holds a Domino term, and the tensors of that term."""
    peer, inner, rank = Peer.make("dflash", sample_from_anchor=shifted), 10, 6
    peer.save(folder)
    own = {"projector_type": "domino", "emb_dim": rank, "gru_hidden_dim": inner, "pure_draft_prefix_len": prefix}
    to_authors_layout(folder, "DFlashDraftModel", True, **own, shift_label=shifted)
    added = random_tensors(
        {
            "prefix_gru.weight_ih_l0": (3 * inner, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * inner, inner),
            "embed_proj.0.weight": (rank, HIDDEN + inner),
            "embed_proj.2.weight": (VOCAB, rank),
        }
    )
    save_file(load_file(folder / "model.safetensors") | added, folder / "model.safetensors")
    return peer, added


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_domino_follows_its_formula(shifted: bool, prefix: int, tmp_path: Path) -> None:
    """The state of a GRU over the block's tokens, and an MLP of it and the slot's state."""
    peer, added = write_domino(tmp_path, shifted, prefix)
    head, target = load_any_head(tmp_path), target_of(peer)
    assert isinstance(head, DraftHead)
    gru = torch.nn.GRU(HIDDEN, 10, bias=False, batch_first=True).requires_grad_(False)
    gru.weight_ih_l0, gru.weight_hh_l0 = (
        torch.nn.Parameter(added[f"prefix_gru.weight_{part}_l0"], requires_grad=False) for part in ("ih", "hh")
    )
    for anchor in range(4, 24, 3):
        hidden_SM, logits_SV, _ = peer.block(TEXT, TAP, anchor)
        first = 0 if shifted else 1
        state_SX = gru(target.embed(TEXT[anchor : anchor + 5])[None])[0][0]  # after the anchor, after its successor, ..
        for slot in range(first + prefix, 5):
            joined = torch.cat((hidden_SM[slot], state_SX[slot - first]))
            inner_R = torch.nn.functional.silu(added["embed_proj.0.weight"] @ joined)
            logits_SV[slot] += added["embed_proj.2.weight"] @ inner_R
        _, rows = draft_along(head, target, TEXT, TAP, anchor)
        torch.testing.assert_close(rows, log_softmax_along(logits_SV, first), atol=1e-4, rtol=0)


def write_dfly(folder: Path, corrected: bool = True) -> tuple[Peer, dict[str, Tensor]]:
    """Returns a DFlash head whose folder is that of a DFly head, and the tensors that a DFlash head does not have."""
    peer, inner = Peer.make("dflash"), 12
    peer.save(folder)
    own = {"enable_hidden_correction": corrected, "hidden_correction_intermediate_size": inner if corrected else None}
    to_authors_layout(folder, "Qwen3DFlyModel", False, **own)
    edit_config(folder, num_target_layers=len(TAPS), target_num_hidden_layers=6 if corrected else None)
    names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    names["norm.weight"] = "final_norm.weight"
    shapes: dict[str, tuple[int, ...]] = {"layer_fusion_weights": (2, len(TAPS))}
    if corrected:
        shapes |= {f"hidden_correction.{name}.weight": (HIDDEN,) for name in ("hidden_norm", "embed_norm")}
        shapes |= {f"hidden_correction.{name}.weight": (inner, 2 * HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {"hidden_correction.down_proj.weight": (HIDDEN, inner)}
    added = random_tensors(shapes)
    stored = {names.get(name, name): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(stored | added, folder / "model.safetensors")
    return peer, added


@pytest.mark.parametrize("corrected", [False, True])
def test_dfly_follows_its_formula(corrected: bool, tmp_path: Path) -> None:
    """Each layer adds its own mixture of the taps to its context, and an MLP corrects the state by the parent."""
    peer, added = write_dfly(tmp_path, corrected)
    edit_tensors(tmp_path, lambda name: f"module.draft_model.{name}" if corrected else name)
    head, target, model = load_any_head(tmp_path), target_of(peer), peer.model
    assert isinstance(head, DraftHead)
    assert head.head_config.num_target_layers == (6 if corrected else None)

    fused = model.fc(TAP)
    mixtures = added["layer_fusion_weights"].softmax(-1) @ TAP.unflatten(-1, (len(TAPS), -1))
    contexts = [model.hidden_norm(fused + mixtures[:, i])[None] for i in range(2)]
    for i, layer in enumerate(model.layers):  # the layers read what the hook gives them, not what the model does
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: (args, {**kwargs, "target_hidden": contexts[i]}), with_kwargs=True
        )
    for anchor in range(4, 24, 3):
        hidden_SM, logits_SV, _ = peer.block(TEXT, TAP, anchor)
        for slot in range(1, 5) if corrected else ():
            part = {name.split(".")[1]: value for name, value in added.items() if "." in name}
            embedded = target.embed(TEXT[anchor + slot - 1])
            z = torch.cat((unit(hidden_SM[slot]) * part["hidden_norm"], unit(embedded) * part["embed_norm"]))
            correction = torch.nn.functional.silu(part["gate_proj"] @ z) * (part["up_proj"] @ z)
            logits_SV[slot] = target.logits(hidden_SM[slot] + part["down_proj"] @ correction)
        states, rows = draft_along(head, target, TEXT, TAP, anchor)
        torch.testing.assert_close(states, hidden_SM, atol=1e-4, rtol=0)
        torch.testing.assert_close(rows, log_softmax_along(logits_SV, 1), atol=1e-4, rtol=0)


def unit(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt()
