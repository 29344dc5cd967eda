"""Choice models of the requests of an engine, on the device: one set of weights per sampling setting in use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor

from jetspec.models.choices import ChoiceFits
from jetspec.ops.transfer import upload
from jetspec.types import ChoiceModel, RowSampling, SamplingParams

GREEDY = 0
"""Entry of all greedy requests."""
SPARE = 16
"""Entries of settings that no admitted request has, kept for later requests."""

Setting = tuple[float, float, int, float]
"""Temperature, top_p, top_k and min_p."""


class ChoiceTable:
    """Weights of the choice model per sampling setting and depth, which predict the target's choices from the head's
    logits. Requests with the same setting share an entry."""

    def __init__(self, fits: ChoiceFits, greedy: float, entry_R: Tensor, depth: int) -> None:
        """`entry_R` is the column with the entry of each row."""
        self.fits, self.greedy, self.depth, self.entry_R = fits, greedy, depth, entry_R
        self.device = device = entry_R.device
        self.weight_3SD = torch.zeros(3, 1 + len(entry_R) + SPARE, depth, device=device)
        """Temperature, weight of the noise, and bonus of the values that the filters keep."""
        self.weight_3SD[0] = greedy
        self.step_D = torch.arange(1, depth + 1, device=device)
        self.greedy_11 = torch.full((1, 1), greedy, device=device)
        self.entries: OrderedDict[Setting, int] = OrderedDict()
        """Entries by setting, the one used last at the end."""
        self.entry_of: dict[int, int] = {}
        """Entries by row."""
        self.new: dict[int, SamplingParams] = {}
        """Settings of entries whose weights are not on the device yet."""

    def enter(self, row: int, sampling: SamplingParams) -> int:
        """The entry of an admitted request."""
        self.entry_of[row] = GREEDY
        if sampling.is_sampled:
            setting = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
            if setting not in self.entries:
                self.entries[setting] = self._free_entry()
                self.new[self.entries[setting]] = sampling
            self.entries.move_to_end(setting)
            self.entry_of[row] = self.entries[setting]
        return self.entry_of[row]

    def _free_entry(self) -> int:
        """An entry of no setting; if there is none, that of the setting which no row has had for longest."""
        if 1 + len(self.entries) < self.weight_3SD.shape[1]:
            return 1 + len(self.entries)
        held = set(self.entry_of.values())
        return self.entries.pop(next(setting for setting, entry in self.entries.items() if entry not in held))

    def flush(self) -> None:
        """Uploads the weights of new settings."""
        if self.new:
            fitted = [self.fits.weights(sampling, self.greedy, self.depth) for sampling in self.new.values()]
            entry = upload(list(self.new), torch.int64, self.device)
            self.weight_3SD[:, entry] = upload(fitted, torch.float32, self.device).permute(2, 0, 1)
            self.new.clear()

    def model(self, row_B: Tensor, sampling: RowSampling, cached_len_B: Tensor, depth: int) -> ChoiceModel | None:
        """Returns the model of the choices below anchors at `cached_len_B`. None: the head's own probabilities."""
        if not sampling.any_sampled:
            return None if self.greedy == 1 else ChoiceModel(self.greedy_11.expand(len(row_B), 1))
        temperature_BD, weight_BD, bonus_BD = self.weight_3SD[:, self.entry_R[row_B], :depth]
        if not self.fits.fits:
            return ChoiceModel(temperature_BD)
        position_BD = cached_len_B[:, None] + self.step_D[:depth]
        noise = ChoiceModel(temperature_BD, weight_BD, seed_B=sampling.seed_B, position_BD=position_BD)
        return replace(noise, bonus_BD=bonus_BD, filters=sampling) if sampling.any_filtered else noise
