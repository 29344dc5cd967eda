"""A transformers model as a target with a dense cache, batch 1. Only this file uses transformers' cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

MASKED_ATTENTION = ("eager", "sdpa")


class HFTarget:
    """A causal language model of transformers with one K and V row per token in every layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation not in MASKED_ATTENTION:
            raise ValueError(
                f"attention {config._attn_implementation!r} does not support a tree mask; "
                f"load the model with attn_implementation={MASKED_ATTENTION[1]!r}"
            )
        self.model = model.eval()
        self.device = model.device
        self.window: int | None = getattr(config, "sliding_window", None)
        self.kinds = _layer_kinds(config, self.window)
        self._taps: list[Tensor] = []
        for layer in _decoder_layers(model, config.num_hidden_layers):
            layer.register_forward_hook(self._tap)

    def new_cache(self) -> DynamicCache:
        """Returns an empty cache. Layers with a window keep every row too: a tree may need any of them."""
        return DynamicCache()

    def cached_len(self, cache: DynamicCache) -> int:
        return cache.get_seq_length()

    def select(self, cache: DynamicCache, rows: Sequence[int]) -> None:
        """Keeps these rows of every layer, in this order."""
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]

    @torch.inference_mode()
    def forward(
        self, token_T: Tensor, position_T: Tensor, visible: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs T tokens and appends their K and V to the cache.

        `visible` is the mask (T, cached + T); windows restrict it further. Returns logits (T, V) and the output of
        every layer (T, M). Hooks read the outputs: the last hidden state that transformers returns is normed.
        """
        self._taps.clear()
        out = self.model(
            input_ids=token_T[None],
            position_ids=position_T[None],
            attention_mask=self._masks(position_T, visible),
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits[0], list(self._taps)

    def embed(self, token: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    def _masks(self, position_T: Tensor, visible: Tensor) -> Tensor | dict[str, Tensor]:
        """Returns the additive mask (1, 1, T, keys); one per layer kind if a model has several."""
        seen = {"full_attention": visible}
        if self.window is not None:
            cached = visible.shape[1] - len(position_T)
            key_position = torch.cat((torch.arange(cached, device=self.device), position_T))
            seen["sliding_attention"] = visible & (key_position > position_T[:, None] - self.window)
        zero = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
        masks = {kind: zero.masked_fill(~seen[kind], torch.finfo(zero.dtype).min)[None, None] for kind in self.kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _tap(self, layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self._taps.append(hidden[0])


def load_hf(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Loads a folder of safetensors or a GGUF file as a transformers model."""
    folder, extra = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **extra)
    return model.eval().to(device)


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    lists = [child for child in model.get_decoder().children() if isinstance(child, nn.ModuleList)]
    return next(layers for layers in lists if len(layers) == num_layers)


def _layer_kinds(config: object, window: int | None) -> set[str]:
    """Returns the kinds of attention in a model: full, sliding or both."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"the model has layers of kind {', '.join(sorted(unknown))}, which do not support a tree mask")
    return kinds
