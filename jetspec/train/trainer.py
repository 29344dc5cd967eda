"""The loop: pack, capture, draft, distil, step. One process per device; any number of them gives the same curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from jetspec.models.decoder import Decoder
from jetspec.models.draft_head import DraftHead
from jetspec.models.head_format import save_head
from jetspec.train.blocks import causal_documents, choose_anchors, lay_out
from jetspec.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from jetspec.train.config import TrainConfig
from jetspec.train.data import PackedBatch, PackedData
from jetspec.train.loss import DraftLoss, draft_loss
from jetspec.train.optimizer import lr_frac, make_optimizers

Score = Callable[[DraftHead], dict[str, float]]
"""How a checkpoint does when it really decodes."""


@dataclass(frozen=True)
class Metrics:
    """What a step or a validation found. `chain` is the expected tokens per round of a chain: right slots + 1."""

    loss: float
    chain: float
    hit_rate: list[float]
    """Per depth: of the blocks that have a label there, those that are right up to it."""
    positions: int


class Trainer:
    """Trains `head` on what `target` wrote in `data`. The target is frozen and sees every batch live."""

    def __init__(
        self,
        config: TrainConfig,
        target: Decoder,
        head: DraftHead,
        data: PackedData,
        validation: PackedBatch | None = None,
        score: Score | None = None,
    ) -> None:
        self.config, self.target, self.head = config, target, head
        self.data, self.validation, self.score = data, validation, score
        self.device = target.embedding.device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        head.requires_grad_(not config.train_only_edge)
        if config.train_only_edge:
            assert head.edge is not None
            head.edge.requires_grad_(True)
        self.parameters = [p for p in head.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(head, config.optimizer)
        self.full_lr = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.folder = Path(config.out)
        self.validated: Metrics | None = None
        self.step = 0

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run's folder, if there is one; returns the step."""
        found = checkpoints(self.folder / "checkpoints")
        if found:
            self.step = load_checkpoint(found[-1], self.head, self.optimizers)["step"]
        return self.step

    def run(self) -> None:
        """Train to the last step, logging, validating and saving on the way; leaves the finished head in `out/head`."""
        config = self.config
        began, positions = time.perf_counter(), 0
        bar = tqdm(total=config.steps, initial=self.step, desc="training", unit="step", disable=self.rank > 0)
        with bar:
            while self.step < config.steps:
                metrics = self.train_step()
                positions += metrics.positions
                bar.update()
                if self.step % config.log_every == 0 or self.step == config.steps:
                    seconds = time.perf_counter() - began
                    bar.set_postfix(loss=f"{metrics.loss:.3f}", chain=f"{metrics.chain:.2f}")
                    self._log("train", metrics, positions_per_s=positions / seconds, lr=self.lr)
                if self.validation is not None and self._due(config.validate_every):
                    self._log("validation", self.validate())
                if self._due(config.save_every):
                    self.save()
        if self.rank == 0:
            save_head(self.head, self.folder / "head")

    def save(self) -> None:
        """A checkpoint, and how it decodes."""
        if self.rank > 0:
            return
        extra = {"config": asdict(self.config)}
        folder = self.folder / "checkpoints"
        save_checkpoint(folder, self.step, self.head, self.optimizers, self.config.keep, extra)
        if self.score is not None:
            scores = self.score(self.head)
            self._write({"kind": "decode", "step": self.step, **scores})
            shown = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            forced = f"; chain {self.validated.chain:.2f} teacher-forced" if self.validated else ""
            tqdm.write(f"step {self.step} decodes at tokens per round: {shown}{forced}")

    def train_step(self) -> Metrics:
        """One update from `accumulate` micro-batches on every device. Sums are divided once, at the end."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        parts = []
        for micro in range(self.config.accumulate):
            number = (self.step * self.config.accumulate + micro) * self.world + self.rank
            batch = self.data.batch(number * self.config.rows, self.config.rows).to(self.device)
            part = self.draft(batch, number)
            part.loss_sum.backward()
            parts.append(part)
        sums = self._sum(parts)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world > 1:
                dist.all_reduce(parameter.grad)
            parameter.grad /= sums["weight_sum"].to(parameter.grad.dtype)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        self._set_lr()
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return to_metrics(sums)

    @torch.no_grad()
    def validate(self) -> Metrics:
        """The same numbers on rows kept out of training, with the same anchors every time."""
        assert self.validation is not None
        parts = []
        for first in range(0, len(self.validation.token_RT), self.config.rows):
            rows = PackedBatch(*(x[first : first + self.config.rows] for x in self.validation.tensors))
            parts.append(self.draft(rows.to(self.device), first))
        self.validated = to_metrics(self._sum(parts, across=False))
        return self.validated

    def draft(self, batch: PackedBatch, number: int) -> DraftLoss:
        """Capture the target's states, choose anchors for this batch's number, and draft from them."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        with torch.no_grad():
            visible = causal_documents(batch)
            taps = self.head.head_config.tap_layers
            seen = self.target.forward_dense(batch.token_RT, batch.position_RT, visible, taps)
        anchors = choose_anchors(batch, self.config.anchors, generator)
        blocks = lay_out(batch, *anchors, self.head.head_config)
        with self._precision():
            return draft_loss(self.head, self.target, batch, blocks, seen, self.config.loss)

    @property
    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def _set_lr(self) -> None:
        share = lr_frac(self.step, self.config.steps, self.config.optimizer)
        for optimizer, full in zip(self.optimizers, self.full_lr, strict=True):
            for group, lr in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = lr * share

    def _precision(self) -> Any:
        dtype = self.target.embedding.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)

    def _sum(self, parts: list[DraftLoss], across: bool = True) -> dict[str, Tensor]:
        """Add up micro-batches, and devices if asked."""
        sums = {name: sum(getattr(part, name).double() for part in parts) for name in DraftLoss.names()}
        sums["loss_sum"] = sum(part.loss_sum.detach().double() for part in parts)
        tensors = {name: torch.as_tensor(value, device=self.device) for name, value in sums.items()}
        if across and self.world > 1:
            for value in tensors.values():
                dist.all_reduce(value)
        return tensors

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _log(self, kind: str, metrics: Metrics, **more: float) -> None:
        if not math.isfinite(metrics.loss):
            raise ValueError(f"the loss is {metrics.loss} at step {self.step}: lower the learning rate")
        self._write({"kind": kind, "step": self.step, **asdict(metrics), **more})

    def _write(self, row: dict[str, Any]) -> None:
        if self.rank > 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def to_metrics(sums: dict[str, Tensor]) -> Metrics:
    hits, reach = sums["hit_D"].tolist(), sums["reach_D"].tolist()
    return Metrics(
        loss=float(sums["loss_sum"] / sums["weight_sum"]),
        chain=1 + sum(hits) / max(1.0, float(sums["num_blocks"])),
        hit_rate=[h / r if r else 0.0 for h, r in zip(hits, reach, strict=True)],
        positions=int(sum(reach)),
    )
