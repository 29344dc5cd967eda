"""A shortlist holds the best children of probable parents; its kernels agree with the definition."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from jetspec.ops import shortlist
from jetspec.ops.select import force
from jetspec.ops.shortlist import log_odds
from jetspec.types import ChoiceModel, EdgeFactors
from tests.ops.test_topk_logprob import random_choice


def random_drafts(
    sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, EdgeFactors]:
    B, D, V, R = sizes
    torch.manual_seed(0)
    logits_BDV = 2 * torch.randn(B, D, V)
    edge = EdgeFactors(torch.randn(B, D, R), torch.randn(V, R).to(dtype), 2 * torch.randn(V, R).to(dtype))
    edge = EdgeFactors(**{name: x.to(device) for name, x in vars(edge).items()})
    return logits_BDV.to(device, dtype), torch.randint(V, (B,)).to(device), edge


def best_logprob(logits: Tensor, root: int, edge: EdgeFactors, row: int, depth: int, num_parents: int) -> Tensor:
    """Log-probability of every token, maximized parent by parent."""
    alone = logits[row, depth].float()
    before = logits[row, depth - 1].float().sort(descending=True, stable=True).indices
    parents = before[:num_parents].tolist() if depth else [root]
    gate = edge.gate_BDR[row, depth].float()
    terms = [edge.successor_VR.float() @ (edge.predecessor_VR[parent].float() * gate) for parent in parents]
    return torch.stack([alone.log_softmax(-1), *((alone + term).log_softmax(-1) for term in terms)]).amax(0)


@pytest.mark.parametrize("num_parents", [1, 3])
def test_shortlist_holds_the_best_children_of_probable_parents(num_parents: int) -> None:
    logits, root_B, edge = random_drafts((2, 3, 50, 4))
    token, logprob = shortlist(logits, root_B, edge, 7, num_parents)
    for row in range(2):
        for depth in range(3):
            best = best_logprob(logits, int(root_B[row]), edge, row, depth, num_parents)
            assert set(token[row, depth].tolist()) == set(best.topk(7).indices.tolist())
    torch.testing.assert_close(logprob, logits.log_softmax(-1).gather(-1, token))


def test_temperature_divides_the_logits() -> None:
    logits, root_B, edge = random_drafts((3, 2, 30, 4))
    temperature_B = torch.tensor([0.5, 1.0, 2.0])
    got = shortlist(logits, root_B, edge, 6, 2, ChoiceModel(temperature_B[:, None]))
    want = shortlist(logits / temperature_B[:, None, None], root_B, edge, 6, 2)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def compare(
    inputs: tuple[Tensor, Tensor, EdgeFactors],
    count: int,
    num_parents: int,
    model: str,
    slack: float,
    programs: int | None = None,
) -> None:
    """Rounding may exchange tokens whose log-probabilities differ by at most `slack`."""
    from jetspec.ops import shortlist_triton

    logits, root_B, edge = inputs
    choice, device = None, logits.device
    if model == "own":
        choice = ChoiceModel(torch.linspace(0.5, 1.5, len(logits), device=device)[:, None])
    elif model == "shared":
        choice = ChoiceModel(torch.tensor([0.7], device=device).expand(len(logits))[:, None])
    elif model != "none":
        choice = random_choice(logits.shape[0], logits.shape[1], model == "filtered", str(device))
    programs = programs or shortlist_triton.PROGRAMS
    with force("triton"), patch.object(shortlist_triton, "PROGRAMS", programs):
        token, logprob = shortlist(logits, root_B, edge, count, num_parents, choice)
    scaled = log_odds(logits, choice).float()
    torch.testing.assert_close(logprob, scaled.log_softmax(-1).gather(-1, token), atol=1e-3, rtol=1e-3)
    for row in range(len(logits)):
        for depth in range(logits.shape[1]):
            assert len(token[row, depth].unique()) == count
            best = best_logprob(scaled, int(root_B[row]), edge, row, depth, num_parents)
            missing = best.topk(count).values[-1] - best[token[row, depth]].min()
            assert missing <= slack, f"{missing} at depth {depth}"


CASES = [
    ((2, 3, 300, 4), 9, 2, "own"),
    ((1, 17, 70, 20), 33, 1, "none"),
    ((3, 2, 40, 16), 5, 4, "shared"),
    ((1, 1, 90, 8), 4, 7, "none"),
    ((1, 5, 80, 8), 6, 40, "none"),
    ((2, 3, 90, 4), 9, 2, "sampled"),
    ((2, 2, 70, 8), 6, 3, "filtered"),
]


@pytest.mark.parametrize(("sizes", "count", "num_parents", "model"), CASES)
@pytest.mark.parametrize("programs", [1, 1024])
def test_kernels_equal_the_definition(
    interpreter: Executor, sizes: Any, count: int, num_parents: int, model: str, programs: int
) -> None:
    interpreter.submit(compare, random_drafts(sizes), count, num_parents, model, 1e-4, programs).result()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "count", "num_parents", "model"),
    [
        ((1, 15, 49152, 128), 256, 7, "shared"),
        ((8, 15, 151_936, 128), 512, 4, "own"),
        ((2, 7, 5000, 32), 300, 2, "none"),
        ((32, 15, 49152, 128), 64, 7, "own"),
    ],
)
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
def test_kernels_on_a_gpu(
    sizes: Any, count: int, num_parents: int, model: str, dtype: torch.dtype, slack: float
) -> None:
    compare(random_drafts(sizes, dtype, "cuda"), count, num_parents, model, slack)
