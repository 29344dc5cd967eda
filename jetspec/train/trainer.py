"""The loop: pack, capture, draft, distil, step. One process per device; any number of them gives the same curve."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from jetspec.capture import GraphPool
from jetspec.config import TreeConfig
from jetspec.data.corpus import Ahead, Document, PackedBatch, PackedData
from jetspec.models.decoder import Decoder, Hidden
from jetspec.models.eagle3 import Eagle3Head
from jetspec.models.head_folder import CARD_FILE
from jetspec.models.heads import Head, load_any_head, save_any_head
from jetspec.ops.select import force
from jetspec.train.blocks import Blocks, Drafts, choose_anchors, document_mask, lay_out, lay_out_chains
from jetspec.train.card import model_card
from jetspec.train.checkpoint import checkpoints, load_checkpoint, run_state, save_checkpoint, settings
from jetspec.train.clock import Speed, TimeLimit
from jetspec.train.config import LossConfig, TrainConfig
from jetspec.train.evaluate import is_greedy, score_head
from jetspec.train.log import RunLog, was_written
from jetspec.train.loss import DraftLoss, Metrics, draft_loss, unrolled_loss
from jetspec.train.optimizer import lr_frac, make_optimizers
from jetspec.train.parallel import frozen_copy, local, shard
from jetspec.train.passes import EagerPasses, GraphPasses, Passes

Score = Callable[[Head], dict[str, float]]
"""How a checkpoint does when it really decodes."""
Lesson = tuple[PackedBatch, list[Drafts]]
"""Packed rows, and the drafts to make in them, as many at a time as fit in one pass."""

SIZES = 1024
"""Captured passes teach a multiple of so many predictions."""
TREE_BUDGET, TREE_DOCUMENTS, TREE_TOKENS = 64, 8, 64
"""Validation counts rounds of such trees on the first tokens of so many answers."""


class Drafting(nn.Module):
    """A head with its loss: all that backward goes through, as one module, which is what can be sharded."""

    def __init__(self, head: Head, config: LossConfig) -> None:
        super().__init__()
        self.head, self.config = head, config

    def forward(self, target: Decoder, batch: PackedBatch, drafts: Drafts, seen: Hidden) -> DraftLoss:
        if isinstance(self.head, Eagle3Head):
            return unrolled_loss(self.head, target, batch, drafts, seen, self.config)
        assert isinstance(drafts, Blocks)
        return draft_loss(self.head, target, batch, drafts, seen, self.config)


class Trainer:
    """Trains `head` on what `target` wrote in `data`. The target is frozen and sees every batch live."""

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
        head.requires_grad_(not config.train_only_edge)
        if config.train_only_edge:
            assert not isinstance(head, Eagle3Head) and head.edge is not None
            head.edge.requires_grad_(True)
        self.drafting = Drafting(head, config.loss)
        if self._compiles:
            for layer in head.layers:
                layer.compile(dynamic=False)
        if config.parallel == "fsdp" and self.world > 1:
            shard(self.drafting, self.device)
        self.parameters = [p for p in head.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(head, config.optimizer)
        self.full_lr = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        # Graphs take what is compiled, or it would be slow; and they cannot meet other processes on the way.
        self.captures = self.device.type == "cuda" and self._compiles and not isinstance(self.drafting, FSDPModule)
        self.passes: Passes = EagerPasses(self)
        if self.captures:
            self.passes = GraphPasses(self, self.parameters, GraphPool(self.device))
        self.lessons = Ahead(self._numbered_lesson, stride=self.world)
        self.folder = Path(config.out)
        self.results: dict[
            str, dict[str, Any]
        ] = {}  # the last numbers of each kind that were reported, with their step
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
            self._check_data(state)
            self.step, self.limit = state["step"], TimeLimit(self.config.minutes, **state["time"])
            self.results = state.get("results", {})
        return self.step

    def _check_data(self, state: dict[str, Any]) -> None:
        """Other rows, or more of them, would make another run: prompts kept out of it could be trained on."""
        before, now = state.get("data"), self._data
        if before not in (None, now):
            count, new = before["conversations"], now["conversations"]
            said = "other ones" if count == new else f"{new:,}"
            raise ValueError(
                f"the run in {self.folder} was made with {count:,} conversations, and its data now holds {said};"
                " bring the data back, or use --fresh or another out"
            )

    @property
    def _data(self) -> dict[str, Any]:
        return {"conversations": len(self.data.documents), "digest": self.data.digest}

    def run(self) -> None:
        """Train to the last step or minute, logging, validating and saving on the way. Every save leaves a head.

        A kill may have come between a checkpoint and its head or its scores: what is missing is made up for first.
        """
        config, log = self.config, RunLog(self.folder, self.step) if self.rank == 0 else None
        total = config.steps if config.minutes is None else None
        bar = tqdm(total=total, initial=self.step, desc="training", unit="step", disable=self.rank > 0)
        first, speed = self.step, Speed()
        if self.step and not (self._is_exported() and self._is_scored()):
            self.publish(log)
        self.limit.start()
        with bar:
            while not self.is_over:
                sums = self.train_step()
                speed.count(sums)
                bar.update()
                if self.step == first + 1 or self._due(config.log_every):
                    self.limit.look()
                if self._due(config.log_every):
                    metrics = self._finite(sums)
                    bar.set_postfix(loss=f"{metrics.loss:.3f}", chain=f"{metrics.chain:.2f}")
                    pace = {"positions_per_s": speed.read(), "lr": self.lr, "minutes": self.limit.used_s / 60}
                    self._report(log, "train", asdict(metrics) | pace)
                if self.validation is not None and self._due(config.validate_every):
                    self._report(log, "validation", asdict(self.validate()) | self.tree_lengths())
                    speed.restart()
                if self._due(config.save_every):
                    self.save(log)
                    speed.restart()

    @property
    def is_over(self) -> bool:
        return self.step >= self.config.steps or self.limit.is_over

    def save(self, log: RunLog | None = None) -> None:
        """A checkpoint, the head as it stands in `out/head`, and how that decodes. Broken weights are not saved."""
        state = run_state(self.head, self.optimizers)
        if not all(tensor.isfinite().all() for tensor in state[0].values()):
            raise ValueError(self._diverged("the weights are not finite"))
        if self.rank == 0:
            recipe = settings(self.config, self.world)
            extra = {"config": recipe, "data": self._data, "time": self.limit.state, "results": self.results}
            save_checkpoint(self.folder / "checkpoints", self.step, state, self.config.keep, extra)
        self.publish(log)

    def publish(self, log: RunLog | None = None) -> None:
        """The head first, since scoring it takes longer; then its card again, with the scores.

        The log comes last: scores in it are in the card.
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
        card = self.folder / ".card"  # not in the head's folder, where half a file would stay
        card.write_text(self._card(), encoding="utf-8")
        card.replace(self.folder / "head" / CARD_FILE)
        self._report(log, "decode", scores)
        tqdm.write(f"step {self.step}: {gap(scores, forced)}")

    def _forced(self) -> dict[str, float]:
        """What the scores of this step are compared with: the last validation's, if that was of this step."""
        last = self.results.get("validation", {})
        if last.get("step") == self.step or self.validation is None:
            return {name: value for name, value in last.items() if name.startswith("tree_")}
        return self.tree_lengths()

    def export(self) -> None:
        """The head in the published layout and in bfloat16, with a card that says where it comes from."""
        head = frozen_copy(self.head, torch.bfloat16)
        if self.rank == 0:
            save_any_head(head, self.folder / "head", self._card())

    def _card(self) -> str:
        minutes, count = self.limit.used_s / 60, len(self.data.documents)
        return model_card(self.config, self.head.head_config, self.step, minutes, count, self.results)

    def _is_exported(self) -> bool:
        """Whether `out/head` holds these weights."""
        now = frozen_copy(self.head, torch.bfloat16).state_dict()
        folder = self.folder.absolute() / "head"
        try:
            there = load_any_head(folder, device=self.device).state_dict() if folder.is_dir() else {}
        except (ValueError, OSError):
            return False
        return there.keys() == now.keys() and all(torch.equal(there[name], value) for name, value in now.items())

    def _is_scored(self) -> bool:
        return self.score is None or was_written(self.folder, "decode", self.step)

    def train_step(self) -> DraftLoss:
        """One update from `accumulate` micro-batches on every device. Sums are divided once, at the end."""
        self._forget_gradients()
        parts = []
        for micro in range(self.config.accumulate):
            number = (self.step * self.config.accumulate + micro) * self.world + self.rank
            batch, groups = self.lessons.take(number)
            self.passes.look(batch)
            for group, drafts in enumerate(groups):
                self._meet_after(micro + 1 == self.config.accumulate and group + 1 == len(groups))
                parts.append(self.passes.teach(drafts))
        sums = DraftLoss.add_up(parts, across=True)
        self._average_gradients(sums.weight_sum)
        nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        self._set_lr()
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return sums

    def validate(self) -> Metrics:
        """The same numbers on rows kept out of training, with the same anchors every time.

        This is a training pass without its backward, on equally many rows: what was compiled for that serves here.
        """
        assert self.validation is not None
        parts: list[DraftLoss] = []
        for first in range(0, len(self.validation.token_RT), self.config.rows):
            rows = self.validation.rows(first, self.config.rows).padded(self.config.rows)
            batch, groups = self.lesson(rows, first)
            self.passes.look(batch)
            parts += map(self.passes.score, groups)
        if isinstance(self.drafting, FSDPModule):
            self.drafting.reshard()  # which a backward would have done
        return self._finite(DraftLoss.add_up(parts, across=False))

    def tree_lengths(self) -> dict[str, float]:
        """Teacher-forced tokens per round of a tree, on a few of the documents kept out of training.

        Only greedy ones: sampled text leaves the likely path, and decoding is compared with this.
        Without kernels: so few documents take less time than compiling those would.
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
        """The beginnings of some documents that the target wrote greedily, none of them trained on."""
        with force("reference"):
            return list(islice((start for start in self._starts() if is_greedy(self.target, start)), TREE_DOCUMENTS))

    @cached_property
    def beginnings(self) -> list[Document]:
        """What heads are let write again: what they are teacher-forced on, so that the two can be compared, or where
        nothing was written greedily, just some beginnings."""
        return self.greedy or list(islice(self._starts(), TREE_DOCUMENTS))

    def _starts(self) -> Iterator[Document]:
        assert self.validation is not None
        return (cut(document, TREE_TOKENS) for document in self.validation.documents())

    def lesson(self, batch: PackedBatch, number: int) -> Lesson:
        """Drafts for a batch on the host; its number chooses the anchors."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + number)
        anchor_RA, valid_RA = choose_anchors(batch, self.config.anchors, generator)
        groups = zip(*(x.split(self.config.anchors_at_once, dim=1) for x in (anchor_RA, valid_RA)), strict=True)
        drafts = [self._lay_out(batch, anchor, valid) for anchor, valid in groups]
        if self.device.type != "cuda":
            return batch, drafts
        return batch.pinned(), [part.pinned() for part in drafts]

    def _lay_out(self, batch: PackedBatch, anchor_RA: Tensor, valid_RA: Tensor) -> Drafts:
        multiple = SIZES if self.captures else 1
        if isinstance(self.head, Eagle3Head):
            return lay_out_chains(batch, anchor_RA, valid_RA, self.head.head_config.depth, multiple)
        return lay_out(batch, anchor_RA, valid_RA, self.head.head_config, multiple)

    @torch.no_grad()
    def capture_states(self, batch: PackedBatch) -> Hidden:
        """The target's states, once for all drafts of a batch."""
        taps = self.head.head_config.tap_layers
        return self.target.forward_dense(batch.token_RT, batch.position_RT, document_mask(batch), taps)

    def draft(self, batch: PackedBatch, drafts: Drafts, seen: Hidden) -> DraftLoss:
        with self._precision():
            part: DraftLoss = self.drafting(self.target, batch, drafts, seen)
        return part

    @property
    def lr(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def _numbered_lesson(self, number: int) -> Lesson:
        return self.lesson(self.data.batch(number * self.config.rows, self.config.rows), number)

    @property
    def _compiles(self) -> bool:
        return self.device.type == "cuda" if self.config.compile is None else self.config.compile

    def _precision(self) -> AbstractContextManager[Any]:
        dtype = self.target.embedding.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)

    def _meet_after(self, last: bool) -> None:
        """Sharded gradients are added up across processes by backward: by the last one only."""
        if isinstance(self.drafting, FSDPModule):
            self.drafting.set_requires_gradient_sync(last)

    def _forget_gradients(self) -> None:
        """Captured passes add to gradients where they lie, all others make new ones."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.captures and grads:
            torch._foreach_zero_(grads)
        elif not self.captures:
            for parameter in self.parameters:
                parameter.grad = None

    def _average_gradients(self, weight_sum: Tensor) -> None:
        grads = []
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world > 1 and not isinstance(self.drafting, FSDPModule):
                dist.all_reduce(parameter.grad)
            grads.append(local(parameter.grad))
        torch._foreach_div_(grads, weight_sum.to(grads[0].dtype))

    def _set_lr(self) -> None:
        step = max(self.step, self.limit.done * self.config.steps)
        share = lr_frac(step, self.config.steps, self.config.optimizer)
        for optimizer, full in zip(self.optimizers, self.full_lr, strict=True):
            for group, lr in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = lr * share

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


def gap(scores: dict[str, float], forced: dict[str, float]) -> str:
    """How a head decodes, and how far that is from what it does teacher-forced, where both count the same."""
    words = []
    for name, value in scores.items():
        more = f" ({forced[name]:.2f} teacher-forced, gap {value - forced[name]:+.2f})" if name in forced else ""
        words.append(f"{name} {value:.2f}{more}")
    return f"decodes at tokens per round: {', '.join(words)}"


def cut(document: Document, count: int) -> Document:
    """A document up to its `count`th token from the first written one on."""
    end = int(document.written.argmax()) + count
    return Document(document.tokens[:end], document.written[:end])
