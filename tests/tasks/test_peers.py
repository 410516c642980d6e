"""Our divergences against TRL's own functions on the same tensors, and where the two differ on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head
from tasks.losses import forward_kl, generalised_jsd

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]  # 0: forward, 1: reverse; the same meaning in TRL


def random_logits(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def trl_dense(student: Tensor, teacher: Tensor, *, beta: float, temperature: float = 1.0) -> Tensor:
    """TRL's GKDTrainer, before its reduction."""
    elements: Tensor = GKDTrainer.generalized_jsd_loss(
        student, teacher, beta=beta, temperature=temperature, reduction="none"
    )
    return elements.sum(-1)


def textbook(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """The definition in float64, from log-probabilities."""
    log_q, log_p = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if beta in (0, 1):
        terms = q * (log_q - log_p) if beta else p * (log_p - log_q)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        terms = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    return terms.where(terms.isfinite() | (q > 0) | (p > 0), 0.0).sum(-1)


def gradient_of(function: Callable[..., Tensor], student: Tensor, teacher: Tensor, **options: float) -> Tensor:
    student = student.clone().requires_grad_()
    function(student, teacher, **options).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    return student.grad


@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_gkd_trainer(beta: float) -> None:
    student, teacher = random_logits(2, 20, 1000, seed=0), random_logits(2, 20, 1000, seed=1)

    torch.testing.assert_close(
        generalised_jsd(student, teacher, beta=beta), trl_dense(student, teacher, beta=beta), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        gradient_of(generalised_jsd, student, teacher, beta=beta),
        gradient_of(trl_dense, student, teacher, beta=beta),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("beta", BETAS)
def test_temperature_is_theirs_times_its_square(beta: float) -> None:
    student, teacher = random_logits(20, 1000, seed=0), random_logits(20, 1000, seed=1)

    ours, theirs = (f(student, teacher, beta=beta, temperature=3.0) for f in (generalised_jsd, trl_dense))

    # The factor keeps the gradient's size (Hinton et al., 2015); TRL leaves it to the learning rate.
    torch.testing.assert_close(ours, 9.0 * theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "softcap", "biased"), [(1.0, None, False), (0.25, None, True), (1.0, 5.0, False), (0.5, 5.0, True)]
)
@pytest.mark.parametrize("beta", BETAS)
def test_fused_loss_and_its_gradients_are_those_of_the_chunked_function(
    beta: float, scale: float, softcap: float | None, biased: bool
) -> None:
    hidden, teacher_hidden = random_logits(30, 16, seed=0), random_logits(30, 24, seed=1)  # of different width
    weight, teacher_weight = random_logits(700, 16, seed=2, scale=0.7), random_logits(700, 24, seed=3, scale=0.5)
    bias, teacher_bias = (random_logits(700, seed=seed) if biased else None for seed in (4, 5))
    teacher_head = Head(weight=teacher_weight, bias=teacher_bias, scale=scale, softcap=softcap)

    def tile(student: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        total = generalised_jsd(student, teacher_head.logits(teacher_hidden[rows]), beta=beta).sum()
        return total, total.detach().view(1)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        head = Head(weight=weight, bias=bias, scale=scale, softcap=softcap)
        return fused_loss(hidden, head, tile, tile_rows=7)[0]

    def theirs(hidden: Tensor, weight: Tensor) -> Tensor:
        heads = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
        return ChunkedDivergenceFunction.apply(*heads, beta, 1.0, scale, softcap, scale, softcap)[0].sum()

    found = []
    for loss in (ours, theirs):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = loss(*leaves)
        found.append([value, *torch.autograd.grad(value, leaves)])

    # Sums of 30 tokens; the chunked function's own error against float64 is the larger one.
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=5e-5)


# Where they differ ---------------------------------------------------------------------------------------------------


def test_logits_in_bfloat16_are_computed_in_float32_here_and_not_there() -> None:
    teacher = random_logits(64, 30_000, seed=0, scale=2.0)
    student = (teacher + random_logits(64, 30_000, seed=1, scale=0.1)).bfloat16()
    teacher = teacher.bfloat16()
    exact = textbook(student, teacher, beta=0.0)

    ours, theirs = (f(student, teacher, beta=0.0).double() for f in (generalised_jsd, trl_dense))

    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)
    assert ((theirs - exact).abs() / exact).max() > 0.1  # of GKDTrainer; the chunked function computes in float32


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_tokens_that_both_exclude_count_nothing_here_and_are_no_number_there(beta: float) -> None:
    student, teacher = random_logits(8, 100, seed=0), random_logits(8, 100, seed=1)
    student[:, 90:] = teacher[:, 90:] = -torch.inf

    ours, theirs = (f(student, teacher, beta=beta) for f in (generalised_jsd, trl_dense))

    exact = textbook(student[:, :90], teacher[:, :90], beta=beta)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    assert theirs.isnan().all()


def test_equal_models_have_a_gradient_of_exactly_zero_here_and_not_there() -> None:
    logits = random_logits(16, 5000, seed=0, scale=8.0)

    assert gradient_of(forward_kl, logits, logits).abs().max() == 0
    assert gradient_of(trl_dense, logits, logits, beta=0.0).abs().max() > 0
