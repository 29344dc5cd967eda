"""The training loop: pack, encode, draft, distill, step. One process per device; the result does not depend on their
number."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from jetspec.capture import GraphPool
from jetspec.config import TreeConfig
from jetspec.data.corpus import Document, PackedBatch, PackedData, Prefetch
from jetspec.models.decoder import Decoder
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.heads import Head, load_any_head, save_any_head
from jetspec.ops.select import force
from jetspec.progress import print_above, progress_bar
from jetspec.train.blocks import Drafts, choose_anchors, lay_out
from jetspec.train.card import model_card
from jetspec.train.checkpoint import checkpoints, load_checkpoint, run_state, save_checkpoint, settings
from jetspec.train.config import TrainConfig
from jetspec.train.evaluate import is_greedy, score_head
from jetspec.train.log import RunLog, Throughput, TimeLimit, was_written
from jetspec.train.loss import DraftLoss, HeadWithLoss, Metrics
from jetspec.train.optimizer import lr_frac, make_optimizers
from jetspec.train.parallel import frozen_copy, shard
from jetspec.train.passes import Passes

MicroBatch = tuple[PackedBatch, list[Drafts]]
"""Packed rows with their drafts, in groups that one pass of the head takes."""
Score = Callable[[Head], dict[str, float]]
"""Decodes with a checkpoint and returns tokens per round by tree."""

SIZE_MULTIPLE = 1024
"""Captured passes have a multiple of so many predictions."""
TREE_BUDGET, TREE_DOCUMENTS, TREE_TOKENS = 64, 8, 64
"""Budget of the trees of a validation, number of its answers, and tokens of each."""


class Trainer:
    """Trains `head` on the target's answers in `data`. The frozen target runs on every batch."""

    def __init__(
        self,
        config: TrainConfig,
        target: Decoder,
        head: Head,
        data: PackedData,
        validation: PackedBatch | None = None,
        score: Score | None = None,
    ) -> None:
        self.config, self.target, self.head = config, target, head
        self.data, self.validation, self.score = data, validation, score
        self.device = target.embedding.device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(name.startswith("edge.") or not config.train_only_edge)
        compiles = self.device.type == "cuda" if config.compile is None else config.compile
        if compiles:
            for layer in head.layers:
                layer.compile(dynamic=False)
        self.model = HeadWithLoss(head, config.loss)
        if config.parallel == "fsdp" and self.world > 1:
            shard(self.model, self.device)
        self.parameters = [p for p in head.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(head, config.optimizer)
        # Eager layers in a graph are slow, and a graph cannot hold the collectives of sharded weights.
        captures = self.device.type == "cuda" and compiles and not isinstance(self.model, FSDPModule)
        self.passes = Passes(self.model, target, GraphPool(self.device) if captures else None)
        self.micro_batches = Prefetch(
            lambda number: self.micro_batch(data.batch(number * config.rows, config.rows), number), self.world
        )
        self.folder = Path(config.out)
        self.results: dict[str, dict[str, Any]] = {}
        """The latest numbers of each kind of report, with their step."""
        self.limit = TimeLimit(config.minutes)
        self.step = 0

    def resume(self, overridden: Collection[str] = ()) -> int:
        """Restores the newest checkpoint of the run's folder, if there is one; returns the step.

        `overridden` are the names of settings given as overrides: a number of steps among them may differ from before.
        """
        found = checkpoints(self.folder / "checkpoints")
        if found:
            state = load_checkpoint(found[-1], self.head, self.optimizers, self.config, self.world, overridden)
            before = state["config"].get("steps", self.config.steps)
            if before != self.config.steps and self.rank == 0:
                print(
                    f"steps is {self.config.steps}, and was {before}: the learning rate follows the new length",
                    file=sys.stderr,
                )
            if state.get("data") not in (None, self._data):
                count, now = state["data"]["conversations"], self._data["conversations"]
                raise ValueError(
                    f"the run in {self.folder} was made with {count:,} conversations, and its data now holds "
                    f"{'other ones' if count == now else f'{now:,}'}; restore the data, or use --fresh or another out"
                )
            self.step, self.limit = state["step"], TimeLimit(self.config.minutes, **state["time"])
            self.results = state.get("results", {})
        return self.step

    @property
    def _data(self) -> dict[str, Any]:
        """Mark of the data in a checkpoint: in other data, held-out prompts could be among the rows."""
        return {"conversations": len(self.data.documents), "digest": self.data.digest}

    def run(self) -> None:
        """Trains to the last step or minute, with logging, validation and checkpoints. Every checkpoint exports a head.

        A killed run may lack the head or the scores of its last checkpoint: these are made first.
        """
        config, log = self.config, RunLog(self.folder, self.step) if self.rank == 0 else None
        total = config.steps if config.minutes is None else None
        bar = progress_bar(total=total, initial=self.step, desc="training", unit="step", disable=self.rank > 0)
        first, throughput = self.step, Throughput()
        is_scored = self.score is None or was_written(self.folder, "decode", self.step)
        if self.step and not (self._is_exported() and is_scored):
            self.publish(log)
        self.limit.start()
        with bar:
            while not self.is_over:
                sums = self.train_step()
                throughput.count(sums)
                bar.update()
                if self.step == first + 1 or self._due(config.log_every):
                    self.limit.update()
                if self._due(config.log_every):
                    metrics = self._finite(sums)
                    bar.set_postfix(loss=f"{metrics.loss:.3f}", chain=f"{metrics.chain:.2f}")
                    pace = {"positions_per_s": throughput.read(), "lr": self.lr, "minutes": self.limit.used_s / 60}
                    self._report(log, "train", asdict(metrics) | pace)
                if self.validation is not None and self._due(config.validate_every):
                    self._report(log, "validation", asdict(self.validate()) | self.tree_lengths())
                    throughput.restart()
                if self._due(config.save_every):
                    self.save(log)
                    throughput.restart()

    @property
    def is_over(self) -> bool:
        return self.step >= self.config.steps or self.limit.is_over

    def save(self, log: RunLog | None = None) -> None:
        """Writes a checkpoint, the head in `out/head`, and its scores. Weights that are not finite are not saved."""
        state = run_state(self.head, self.optimizers)
        if not all(tensor.isfinite().all() for tensor in state[0].values()):
            raise ValueError(self._diverged("the weights are not finite"))
        if self.rank == 0:
            recipe = settings(self.config, self.world)
            extra = {"config": recipe, "data": self._data, "time": self.limit.state, "results": self.results}
            save_checkpoint(self.folder / "checkpoints", self.step, state, self.config.keep, extra)
        self.publish(log)

    def publish(self, log: RunLog | None = None) -> None:
        """Exports the head, scores it, and adds the scores to its card and then to the log.

        The head comes first, because scoring takes longer. The log comes last: scores in it are in the card.
        """
        self.export()
        if self.score is None:
            return
        forced = self._forced()
        head = frozen_copy(self.head, self.target.embedding.dtype)
        if self.rank > 0:
            return
        scores = self.score(head)
        self.results["decode"] = {"step": self.step, **scores}
        card = self.folder / ".card"  # outside the head's folder, so that a killed run leaves no partial file there
        card.write_text(self._card(), encoding="utf-8")
        card.replace(self.folder / "head" / CARD_FILE)
        self._report(log, "decode", scores)
        print_above(f"step {self.step}: {describe_scores(scores, forced)}")

    def _forced(self) -> dict[str, float]:
        """Teacher-forced tokens per round at this step, from its validation if there was one."""
        last = self.results.get("validation", {})
        if last.get("step") == self.step or self.validation is None:
            return {name: value for name, value in last.items() if name.startswith("tree_")}
        return self.tree_lengths()

    def export(self) -> None:
        """Writes the head in the published layout and in bfloat16, with its model card."""
        head = frozen_copy(self.head, torch.bfloat16)
        if self.rank == 0:
            save_any_head(head, self.folder / "head", self._card())

    def _card(self) -> str:
        minutes, count = self.limit.used_s / 60, len(self.data.documents)
        return model_card(self.config, self.head.head_config, self.step, minutes, count, self.results)

    def _is_exported(self) -> bool:
        """True if `out/head` holds the current weights."""
        now = frozen_copy(self.head, torch.bfloat16).state_dict()
        folder = self.folder.absolute() / "head"
        try:
            there = load_any_head(folder, device=self.device).state_dict() if folder.is_dir() else {}
        except (ValueError, OSError):
            return False
        return there.keys() == now.keys() and all(torch.equal(there[name], value) for name, value in now.items())

    def train_step(self) -> DraftLoss:
        """One update from `accumulate` micro-batches on every device. Sums are divided once, at the end."""
        self.passes.zero_gradients()
        parts = []
        for micro in range(self.config.accumulate):
            number = (self.step * self.config.accumulate + micro) * self.world + self.rank
            batch, groups = self.micro_batches.take(number)
            self.passes.encode(batch)
            for i, drafts in enumerate(groups, 1):
                is_last = micro + 1 == self.config.accumulate and i == len(groups)
                self.passes.sync_gradients(is_last)
                parts.append(self.passes.backward(drafts))
        sums = DraftLoss.add_up(parts, across=True)
        self._average_gradients(sums.weight_sum)
        nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        step = max(self.step, self.limit.done * self.config.steps)
        self.lr = self.config.optimizer.lr * lr_frac(step, self.config.steps, self.config.optimizer)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            optimizer.step()
        self.step += 1
        return sums

    def validate(self) -> Metrics:
        """Metrics of the held-out rows, with the same anchors every time.

        The passes have the sizes of training, so nothing new is compiled.
        """
        assert self.validation is not None
        parts: list[DraftLoss] = []
        for first in range(0, len(self.validation.token_RT), self.config.rows):
            rows = self.validation.rows(first, self.config.rows).padded(self.config.rows)
            batch, groups = self.micro_batch(rows, first)
            self.passes.encode(batch)
            parts += map(self.passes.score, groups)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # normally part of a backward
        return self._finite(DraftLoss.add_up(parts, across=False))

    def tree_lengths(self) -> dict[str, float]:
        """Teacher-forced tokens per round of a tree, on a few held-out documents.

        Only greedy ones, for comparison with decoding: sampled text leaves the likely path. By reference operations:
        compiling kernels would take longer than so few documents.
        """
        head = frozen_copy(self.head, self.target.embedding.dtype)
        if self.rank > 0 or not self.greedy:
            return {}
        name = str(TREE_BUDGET)
        with force("reference"):
            score = score_head(self.target, head, self.greedy, [name], TreeConfig(), num_gaps=0)
        return {f"tree_{name}": score.tokens_per_round[name]}

    @cached_property
    def greedy(self) -> list[Document]:
        """First tokens of some held-out documents that the target wrote greedily."""
        with force("reference"):
            return list(islice((start for start in self._starts() if is_greedy(self.target, start)), TREE_DOCUMENTS))

    @cached_property
    def decoded_documents(self) -> list[Document]:
        """Documents that a checkpoint decodes: the greedy ones, for comparison with teacher forcing, or, if there are
        none, any held-out ones."""
        return self.greedy or list(islice(self._starts(), TREE_DOCUMENTS))

    def _starts(self) -> Iterator[Document]:
        assert self.validation is not None
        return (truncated(document, TREE_TOKENS) for document in self.validation.documents())

    def micro_batch(self, batch: PackedBatch, number: int) -> MicroBatch:
        """A batch on the host with its drafts. `number` seeds the choice of anchors."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        anchor_RA, valid_RA = choose_anchors(batch, self.config.anchors, generator)
        parts = zip(*(x.split(self.config.anchors_at_once, dim=1) for x in (anchor_RA, valid_RA)), strict=True)
        multiple = 1 if self.passes.pool is None else SIZE_MULTIPLE
        groups = [lay_out(batch, anchor, valid, self.head.head_config, multiple) for anchor, valid in parts]
        if self.device.type == "cuda":
            batch, groups = batch.pinned(), [group.pinned() for group in groups]
        return batch, groups

    def _average_gradients(self, weight_sum: Tensor) -> None:
        grads = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world > 1 and not isinstance(self.model, FSDPModule):
                dist.all_reduce(parameter.grad)
            grads.append(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
        torch._foreach_div_(grads, weight_sum.to(grads[0].dtype))

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.is_over

    def _finite(self, sums: DraftLoss) -> Metrics:
        metrics = sums.metrics()
        if not math.isfinite(metrics.loss):
            raise ValueError(self._diverged(f"the loss is {metrics.loss}"))
        return metrics

    def _diverged(self, what: str) -> str:
        again = " and start with --fresh" if checkpoints(self.folder / "checkpoints") else ""
        return f"{what} at step {self.step}: lower the learning rate{again}"

    def _report(self, log: RunLog | None, kind: str, numbers: dict[str, Any]) -> None:
        self.results[kind] = {"step": self.step, **numbers}
        if log is not None:
            log.write(kind, self.step, numbers)


def describe_scores(scores: dict[str, float], forced: dict[str, float]) -> str:
    """Tokens per round of decoding, and their difference to teacher forcing where both are known."""
    words = []
    for name, value in scores.items():
        more = f" ({forced[name]:.2f} teacher-forced, gap {value - forced[name]:+.2f})" if name in forced else ""
        words.append(f"{name} {value:.2f}{more}")
    return f"decodes at tokens per round: {', '.join(words)}"


def truncated(document: Document, count: int) -> Document:
    """A document up to `count` tokens after the start of its first answer."""
    end = int(document.written.argmax()) + count
    return Document(document.tokens[:end], document.written[:end])
