"""Choice models of the requests of an engine, on the device: one set of weights per sampling setting in use, refined by
what the target chooses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetspec.models.choices import ChoiceFits
from jetspec.ops.transfer import Download, send, upload
from jetspec.tree import SUMS, Acceptance, DraftTree, Drawn, tally_choices
from jetspec.types import ChoiceModel, RowSampling, SamplingParams

GREEDY = 0
"""Entry of all greedy requests."""
SPARE = 16
"""Entries of settings that no admitted request has, kept for later requests."""

STEP_ROUNDS = 64
"""Rounds of sampled requests between two Newton steps."""
PRIOR, MEMORY = 300.0, 0.98
"""Choices that the fitted weights count for, and the share of their count that earlier choices keep at each step."""
MAX_STEP, MAX_SCALE, MAX_NOISE = 0.1, 2.0, 0.5
"""Bounds of a step, of the factor between a temperature and the fitted one, and of the distance from a fitted weight of
the noise."""

Setting = tuple[float, float, int, float]
"""Temperature, top_p, top_k and min_p."""


class Refinement:
    """Weights on the host, which start as the fitted ones and take a Newton step by every tally of choices."""

    def __init__(self, num_entries: int, depth: int) -> None:
        self.fitted_3SD = torch.ones(3, num_entries, depth, dtype=torch.float64)
        self.weight_3SD = self.fitted_3SD.clone()
        self.curvature_SDX = torch.zeros(num_entries, depth, 3, dtype=torch.float64)
        self.choices_SD = torch.zeros(num_entries, depth, dtype=torch.float64)
        self.steps = 0
        self.began_S = torch.zeros(num_entries, dtype=torch.int64)
        """Steps before an entry got its setting."""

    def begin(self, entries: list[int], fitted_3ED: Tensor) -> None:
        """Gives entries a setting."""
        self.fitted_3SD[:, entries] = self.weight_3SD[:, entries] = fitted_3ED
        self.curvature_SDX[entries], self.choices_SD[entries], self.began_S[entries] = 0, 0, self.steps

    def step(self, tally_SDX: Tensor) -> list[int]:
        """Returns the entries that have changed. Choices from before an entry got its setting are left out."""
        entries = ((self.began_S < self.steps) & (tally_SDX[..., 0] > 0).any(1)).nonzero()[:, 0].tolist()
        tally_EDX = tally_SDX[entries]
        self.choices_SD[entries] += tally_EDX[..., 0]
        self.curvature_SDX[entries] = MEMORY * self.curvature_SDX[entries] + tally_EDX[..., 3:]
        curvature_ED22 = self.curvature_SDX[entries][..., [0, 1, 1, 2]].unflatten(-1, (2, 2)) + PRIOR * torch.eye(2)
        step_ED2 = torch.linalg.solve(curvature_ED22, tally_EDX[..., 1:3]).nan_to_num().clamp(-MAX_STEP, MAX_STEP)
        fitted_ED, fitted_noise_ED, _ = self.fitted_3SD[:, entries]
        temperature_ED, noise_ED, bonus_ED = self.weight_3SD[:, entries]
        cooler_ED = temperature_ED / (1 + step_ED2[..., 0])
        cooler_ED = cooler_ED.clamp(fitted_ED / MAX_SCALE, fitted_ED * MAX_SCALE)
        noise_ED = (noise_ED + step_ED2[..., 1]).clamp(fitted_noise_ED - MAX_NOISE, fitted_noise_ED + MAX_NOISE)
        self.weight_3SD[:, entries] = torch.stack((cooler_ED, noise_ED, bonus_ED * temperature_ED / cooler_ED))
        return entries


class ChoiceTable:
    """Weights of the choice model per sampling setting and depth, which predict the target's choices from the head's
    logits. Requests with the same setting share an entry."""

    def __init__(self, fits: ChoiceFits, greedy: float, entry_R: Tensor, depth: int, refine: bool = False) -> None:
        """`entry_R` is the column with the entry of each row."""
        self.fits, self.greedy, self.depth, self.entry_R = fits, greedy, depth, entry_R
        self.device = device = entry_R.device
        num_entries = 1 + len(entry_R) + SPARE
        self.weight_3SD = torch.zeros(3, num_entries, depth, device=device)
        """Temperature, weight of the noise, and bonus of the values that the filters keep."""
        self.weight_3SD[0] = greedy
        self.tally_SDX = torch.zeros(num_entries, depth, SUMS, device=device) if refine and fits.fits else None
        """Sums of the choices since the last step; None: weights stay as they are."""
        self.refinement = Refinement(num_entries, depth)
        self.rounds = 0
        self.pending: Download | None = None
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
            entries = list(self.new)
            self.refinement.begin(entries, torch.tensor(fitted, dtype=torch.float64).permute(2, 0, 1))
            if self.tally_SDX is not None:
                self.tally_SDX[upload(entries, torch.int64, self.device)] = 0
            self._upload(entries)
            self.new.clear()

    def _upload(self, entries: list[int]) -> None:
        weights = send(self.refinement.weight_3SD[:, entries].float(), self.device)
        self.weight_3SD[:, upload(entries, torch.int64, self.device)] = weights

    def observe(
        self, row_B: Tensor, sampling: RowSampling, cached_len_B: Tensor, tree: DraftTree, verdict: Acceptance
    ) -> None:
        """Counts what the target chose below the nodes of a head's trees."""
        if self.tally_SDX is not None and sampling.any_sampled:
            drawn = Drawn(self.entry_R[row_B], sampling.seed_B, cached_len_B, self.weight_3SD[1])
            tally_choices(self.tally_SDX, drawn, tree, verdict)

    def refine(self) -> None:
        """Before a round of sampled requests: now and then a Newton step by the choices of the step before, which have
        arrived meanwhile, so that nothing waits for the device."""
        if self.tally_SDX is None:
            return
        self.rounds += 1
        if self.rounds % STEP_ROUNDS:
            return
        if self.pending is not None:
            self._upload(self.refinement.step(self.pending.read().double()))
        self.refinement.steps += 1
        self.pending = Download(self.tally_SDX.clone())
        self.tally_SDX.zero_()

    def report(self) -> list[dict[str, Any]]:
        """Settings in use with the choices that were counted and the weights of every depth."""
        names = ("temperature", "top_p", "top_k", "min_p")
        return [
            dict(zip(names, setting, strict=True))
            | {
                "choices": int(self.refinement.choices_SD[entry].sum()),
                "depths": self.refinement.weight_3SD[:, entry].T.tolist(),
            }
            for setting, entry in list(self.entries.items())  # the server reads in a thread of its own
            if entry not in self.new
        ]

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
