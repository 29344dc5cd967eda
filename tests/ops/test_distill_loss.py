"""The fused loss equals autograd over full logits, and the Triton kernel equals the reference."""

from __future__ import annotations

import importlib
import weakref
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.ops.distill_loss import DistillLoss, distill_loss, label_prob
from jetspec.ops.layouts import LossKind, RowScores
from jetspec.ops.select import Kernels, force

module = importlib.import_module("jetspec.ops.distill_loss")

KINDS: list[LossKind] = ["forward_kl", "reverse_kl", "sft"]


@dataclass
class Problem:
    """Random inputs of a loss, with a row of weight 0 if there is more than one."""

    hidden: Tensor
    teacher: Tensor
    lm_head: Tensor
    label: Tensor
    weight: Tensor
    edge: Tensor | None
    successor: Tensor | None
    kind: LossKind
    temperature: float
    teacher_of: Tensor | None = None

    @staticmethod
    def draw(
        kind: LossKind = "forward_kl",
        rows: int = 7,
        vocab: int = 23,
        rank: int | None = 3,
        temperature: float = 1.0,
        seed: int = 0,
        size: int = 5,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> Problem:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        hidden, teacher, lm_head = normal(rows, size), normal(rows, size), normal(vocab, size)
        edge = successor = None
        if rank is not None:
            edge, successor = normal(rows, rank), normal(vocab, rank)
        label = torch.randint(vocab, (rows,), generator=generator, device=device)
        weight = torch.rand(rows, generator=generator, device=device)
        weight[1::4] = 0
        return Problem(hidden, teacher, lm_head, label, weight, edge, successor, kind, temperature)

    def shared(self, chunk: int, states: int) -> tuple[Problem, Problem]:
        """Return this problem with a few teacher states per chunk, and its equal with one state per row."""
        rows = len(self.label)
        teacher_of, chunk_of = torch.arange(rows) * 5 % 7 % states, torch.arange(rows) // chunk
        few = self.teacher.repeat(states, 1)[: states * (int(chunk_of[-1]) + 1)]
        alone = replace(self, teacher=few[chunk_of * states + teacher_of])
        return replace(self, teacher=few, teacher_of=teacher_of), alone

    @property
    def student(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.edge, self.successor) if x is not None]

    def trainable(self) -> Problem:
        for x in self.student:
            x.requires_grad_()
        return self

    def to(self, dtype: torch.dtype) -> Problem:
        numbers = {name: getattr(self, name) for name in ("hidden", "teacher", "lm_head", "edge", "successor")}
        changed: dict[str, Any] = {name: x if x is None else x.detach().to(dtype) for name, x in numbers.items()}
        return replace(self, **changed)

    def solve(self, chunk: int = 1024, kernels: Kernels = "auto") -> DistillLoss:
        with force(kernels):
            return distill_loss(
                self.hidden,
                None if self.kind == "sft" else self.teacher,
                self.lm_head,
                self.label,
                self.weight,
                kind=self.kind,
                temperature=self.temperature,
                edge_RQ=self.edge,
                successor_VQ=self.successor,
                teacher_of_R=self.teacher_of,
                chunk=chunk,
            )

    def gradients(self, loss_sum: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss_sum, self.student))


def full_logits(problem: Problem) -> Tensor:
    z = problem.hidden @ problem.lm_head.T
    return z if problem.edge is None or problem.successor is None else z + problem.edge @ problem.successor.T


def naive(problem: Problem) -> DistillLoss:
    """The definition, with every logit in memory and autograd through all of it."""
    z, temperature = full_logits(problem), 1.0 if problem.kind == "sft" else problem.temperature
    log_q = (z / temperature).log_softmax(-1)
    log_p = (problem.teacher @ problem.lm_head.T / temperature).log_softmax(-1)
    if problem.kind == "sft":
        loss = F.cross_entropy(z, problem.label, reduction="none")
    elif problem.kind == "forward_kl":
        loss = temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    else:
        loss = temperature**2 * F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    active = problem.weight != 0
    prob = log_q.exp()[torch.arange(len(z)), problem.label]
    hit = (z.argmax(-1) == problem.label) & active
    return DistillLoss((problem.weight * loss).sum(), loss.detach() * active, hit, prob.detach() * active)


def assert_same_gradients(got: list[Tensor], want: list[Tensor], atol: float, rtol: float = 0.0) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, check_dtype=False)


def assert_same(a: DistillLoss, b: DistillLoss, atol: float, rtol: float = 0.0) -> None:
    for name in ("loss_sum", "loss_R", "label_prob_R"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=atol, rtol=rtol, check_dtype=False)
    assert torch.equal(a.hit_R, b.hit_R)


@settings(max_examples=80)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 9),
    vocab=st.integers(2, 40),
    rank=st.sampled_from([None, 1, 4]),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 999),
)
def test_equals_autograd_over_full_logits(
    kind: LossKind, rows: int, vocab: int, rank: int | None, temperature: float, chunk: int, seed: int
) -> None:
    problem = Problem.draw(kind, rows, vocab, rank, temperature, seed).trainable()
    result, expected = problem.solve(chunk), naive(problem)
    assert_same(result, expected, atol=1e-11)
    assert_same_gradients(problem.gradients(result.loss_sum), problem.gradients(expected.loss_sum), 1e-11)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_inputs_stay_close_to_wide_ones(kind: LossKind, dtype: torch.dtype, atol: float) -> None:
    narrow = Problem.draw(kind, rows=11, temperature=2.0, dtype=dtype)
    wide = narrow.to(torch.float64).trainable()
    result, expected = narrow.trainable().solve(chunk=4), wide.solve()
    assert result.loss_sum.dtype == result.loss_R.dtype == torch.float32
    torch.testing.assert_close(result.loss_R.double(), expected.loss_R, atol=atol, rtol=0)
    grads = narrow.gradients(result.loss_sum)
    assert {grad.dtype for grad in grads} == {dtype}
    assert_same_gradients(grads, wide.gradients(expected.loss_sum), atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "states"), [(3, 2), (4, 4), (20, 5), (1, 1)])
def test_rows_may_share_teacher_states(kind: LossKind, chunk: int, states: int) -> None:
    shared, alone = Problem.draw(kind, rows=10).trainable().shared(chunk, states)
    result, expected = shared.solve(chunk), alone.solve(chunk)
    assert_same(result, expected, atol=1e-13)
    assert_same_gradients(shared.gradients(result.loss_sum), alone.gradients(expected.loss_sum), 1e-13)


def test_backward_scales_and_may_run_again() -> None:
    problem = Problem.draw().trainable()
    loss_sum = problem.solve(chunk=2).loss_sum
    once = torch.autograd.grad(loss_sum, problem.student, retain_graph=True)
    again = torch.autograd.grad(-3 * loss_sum, problem.student)
    assert_same_gradients([-3 * grad for grad in once], list(again), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_weight_zero_are_skipped(kind: LossKind) -> None:
    problem = Problem.draw(kind, rows=6, rank=None)
    problem.hidden[1] = torch.nan
    result = problem.trainable().solve(chunk=3)
    assert problem.weight[1] == 0 and bool(result.loss_sum.isfinite())
    for numbers in (result.loss_R, result.hit_R, result.label_prob_R):
        assert numbers[1] == 0
    assert not problem.gradients(result.loss_sum)[0][1].any()


def test_only_the_student_gets_gradients() -> None:
    problem = Problem.draw().trainable()
    constants = [problem.teacher, problem.lm_head, problem.weight]
    for x in constants:
        x.requires_grad_()
    result = problem.solve(chunk=3)
    result.loss_sum.backward()
    assert all(x.grad is None for x in constants)
    assert all(x.grad is not None for x in problem.student)
    assert not any(x.requires_grad for x in (result.loss_R, result.hit_R, result.label_prob_R))


def test_edge_term_trains_alone_on_a_frozen_head() -> None:
    problem = Problem.draw().trainable()
    together = problem.gradients(problem.solve().loss_sum)
    problem.hidden.requires_grad_(False)
    alone = torch.autograd.grad(problem.solve(chunk=2).loss_sum, problem.student[1:])
    assert_same_gradients(together[1:], list(alone), 1e-12)


@dataclass
class Spy:
    """Reference that records its calls and asserts that the logits of the previous chunk have been freed."""

    rows: list[int]
    dtypes: set[torch.dtype]
    with_grad: set[bool]
    last: list[weakref.ref[Tensor]]

    def __call__(self, z: Tensor, u: Tensor | None, *rest: Any) -> RowScores:
        assert all(ref() is None for ref in self.last)
        logits = [x for x in (z, u) if x is not None]
        self.last = [weakref.ref(x) for x in logits]
        self.rows.append(len(z))
        self.dtypes |= {x.dtype for x in logits}
        self.with_grad.add(rest[-1])
        return reference(z, u, *rest)


reference = module.distill_loss_reference


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy([], set(), set(), [])
    monkeypatch.setattr(module, "distill_loss_reference", spy)
    return spy


@pytest.mark.parametrize("kind", KINDS)
def test_one_chunk_of_logits_exists_at_a_time(kind: LossKind, spy: Spy) -> None:
    Problem.draw(kind, rows=11).trainable().solve(chunk=4).loss_sum.backward()
    assert spy.rows == [4, 4, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradients_are_computed_without_need(kind: LossKind, spy: Spy) -> None:
    problem = Problem.draw(kind).trainable()
    with torch.no_grad():
        result = problem.solve(chunk=3)
    frozen = Problem.draw(kind)
    frozen.lm_head.requires_grad_()
    for other in (result, frozen.solve(chunk=3)):
        assert not other.loss_sum.requires_grad
        assert_same(other, naive(problem), atol=1e-11)
    assert spy.with_grad == {False}


def test_label_prob_is_the_softmax_at_the_label(spy: Spy) -> None:
    problem = Problem.draw(rows=9).trainable()
    prob = label_prob(
        problem.hidden, problem.lm_head, problem.label, edge_RQ=problem.edge, successor_VQ=problem.successor, chunk=4
    )
    expected = full_logits(problem).softmax(-1).gather(1, problem.label[:, None])[:, 0]
    torch.testing.assert_close(prob, expected.detach())
    assert not prob.requires_grad and spy.with_grad == {False}


def test_autocast_decides_the_dtype_of_products_only(spy: Spy) -> None:
    wide = Problem.draw(rows=9, dtype=torch.bfloat16).to(torch.float32).trainable()
    narrow = wide.to(torch.bfloat16).trainable()
    with torch.autocast("cpu", torch.bfloat16):
        result = wide.solve(chunk=4)
    expected = narrow.solve(chunk=4)
    assert spy.dtypes == {torch.bfloat16}
    assert_same(result, expected, atol=0)
    grads = wide.gradients(result.loss_sum)
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert_same_gradients([grad.bfloat16() for grad in grads], narrow.gradients(expected.loss_sum), 0)


def test_many_small_chunks_add_up() -> None:
    """A sum kept in bf16 stops growing at 256 equal terms."""
    one = Problem.draw(rows=1, dtype=torch.bfloat16)
    many = replace(
        one,
        **{name: getattr(one, name).repeat(600, 1) for name in ("hidden", "teacher", "edge")},
        label=one.label.repeat(600),
        weight=one.weight.repeat(600),
    )
    single = one.trainable().gradients(one.solve().loss_sum)[-1]
    total = many.trainable().gradients(many.solve(chunk=1).loss_sum)[-1]
    torch.testing.assert_close(total.float(), 600 * single.float(), atol=0, rtol=0.01)


def test_lowest_of_equal_tokens_is_best() -> None:
    assert tied().solve().hit_R.tolist() == [True, False]


def tied() -> Problem:
    """Tokens 2 and 3 of 6 tie for the best; they are the labels of the two rows."""
    lm_head = torch.tensor([0.0, -1, 1, 1, 0, -1])[:, None]
    ones, label = torch.ones(2, 1), torch.tensor([2, 3])
    return Problem(ones, ones, lm_head, label, torch.ones(2), None, None, "forward_kl", 1.0)


def compare_interpreted(problem: Problem, block: int, tolerance: float = 1e-5) -> None:
    """Compare both implementations, without gradients and with them."""
    kernel = importlib.import_module("jetspec.ops.distill_loss_triton")
    kernel.BLOCK = block  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    assert_same(problem.solve(3, "triton"), problem.solve(3, "reference"), tolerance, tolerance)
    problem.trainable()
    result, expected = problem.solve(3, "triton"), problem.solve(3, "reference")
    assert_same(result, expected, tolerance, tolerance)
    grads, expected_grads = problem.gradients(result.loss_sum), problem.gradients(expected.loss_sum)
    assert_same_gradients(grads, expected_grads, tolerance, tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "temperature"), [(2, 1.0), (37, 2.5), (64, 1.0)])
def test_kernel_equals_reference(interpreter: Executor, kind: LossKind, vocab: int, temperature: float) -> None:
    problem = Problem.draw(kind, rows=6, vocab=vocab, temperature=temperature, dtype=torch.float32, seed=vocab)
    interpreter.submit(compare_interpreted, problem, 16).result()


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_reads_shared_teachers(interpreter: Executor, kind: LossKind) -> None:
    problem, _ = Problem.draw(kind, rows=7, vocab=37, dtype=torch.float32).shared(chunk=3, states=2)
    interpreter.submit(compare_interpreted, problem, 16).result()


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_accurate_for_large_logits(interpreter: Executor, kind: LossKind) -> None:
    problem = Problem.draw(kind, vocab=37, rank=None, dtype=torch.float32)
    problem.lm_head[:, 0] += 100
    problem.hidden[:, 0] = problem.teacher[:, 0] = 5
    interpreter.submit(compare_interpreted, problem, 16, 1e-3).result()


def test_kernel_breaks_ties_like_the_reference(interpreter: Executor) -> None:
    interpreter.submit(compare_interpreted, tied(), 2).result()


def test_kernel_reads_labels_and_weights_of_any_stride(interpreter: Executor) -> None:
    problem = Problem.draw(rows=6, dtype=torch.float32)
    problem = replace(problem, label=problem.label.repeat_interleave(2)[::2], weight=torch.ones(1).expand(6))
    interpreter.submit(compare_interpreted, problem, 16).result()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [49152, 50257, 151936])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_kernel_on_a_gpu(kind: LossKind, vocab: int, dtype: torch.dtype, rtol: float) -> None:
    """Both compute in fp32, so bf16 gradients of the same logits differ by at most one rounding."""
    from jetspec.ops.distill_loss_triton import distill_loss_triton

    generator = torch.Generator("cuda").manual_seed(0)
    z, u = (3 * torch.randn(2, 64, vocab, device="cuda", generator=generator)).to(dtype)
    problem = Problem.draw(kind, rows=64, vocab=vocab, device="cuda")
    rest = torch.arange(64, device="cuda") // 2, problem.label, problem.weight, kind, 1.5, True
    teacher = None if kind == "sft" else u
    expected_grad, grad = z.clone(), z.clone()
    expected = reference(expected_grad, teacher, *rest)
    loss, hit, prob = distill_loss_triton(grad, teacher, *rest)
    torch.testing.assert_close(loss, expected[0], atol=1e-4, rtol=1e-5)
    assert torch.equal(hit, expected[1])
    torch.testing.assert_close(prob, expected[2], atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(grad, expected_grad, atol=3e-8, rtol=rtol)


@pytest.mark.gpu
def test_peak_memory_on_a_gpu_is_one_chunk() -> None:
    rows, vocab, chunk = 4096, 49152, 256
    problem = Problem.draw(rows=rows, vocab=vocab, rank=16, size=64, dtype=torch.bfloat16, device="cuda").trainable()
    problem.solve(chunk=chunk).loss_sum.backward()  # cuBLAS allocates its workspace at its first product
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.solve(chunk=chunk).loss_sum.backward()
    logits = 2 * chunk * vocab * 2
    assert torch.cuda.max_memory_allocated() - before < 1.5 * logits < rows * vocab * 2
