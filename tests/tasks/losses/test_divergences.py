"""Losses per token against float64 autograd, and the traps that they avoid."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.losses import (
    FUNCTIONS,
    cross_entropy,
    forward_kl,
    reverse_kl,
    top1_agreement,
)

DIVERGENCES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}


def random_logits(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def reference(name: str, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The textbook definition, from probabilities in float64, where nothing overflows."""
    q, p = (torch.softmax(logits.double() / temperature, -1) for logits in (student, teacher))
    first, second = (p, q) if name == "forward_kl" else (q, p)
    return (first * (first / second).log()).sum(-1) * temperature**2


def gradient_of(function, student: Tensor, teacher: Tensor, **kwargs) -> Tensor:
    student = student.clone().requires_grad_()
    function(student, teacher, **kwargs).sum().backward()
    return student.grad


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_and_its_gradient_equal_float64_autograd(name, temperature):
    student, teacher = random_logits(4, 7, 200, seed=0), random_logits(4, 7, 200, seed=1)
    weights = random_logits(4, 7, seed=2)  # a gradient per token, so that tokens cannot be mixed up

    value = DIVERGENCES[name](student, teacher, temperature=temperature)
    ours = gradient_of(lambda s, t: DIVERGENCES[name](s, t, temperature=temperature) * weights, student, teacher)
    exact_value = reference(name, student, teacher, temperature)
    exact = gradient_of(lambda s, t: reference(name, s, t, temperature) * weights, student.double(), teacher)

    assert value.dtype == torch.float32 and value.shape == (4, 7)
    # float32 rounds a logit of size 3 to 2e-7, halved temperatures double it, and 200 terms add up.
    torch.testing.assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)


def test_cross_entropy_and_its_gradient_equal_float64_autograd():
    logits, labels = random_logits(4, 7, 200, seed=0), torch.arange(28).view(4, 7)

    value, ours = cross_entropy(logits, labels), gradient_of(cross_entropy, logits, labels)

    def exact(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.exp().sum(-1).log() - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    torch.testing.assert_close(value.double(), exact(logits.double(), labels), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.double(), gradient_of(exact, logits.double(), labels), rtol=1e-5, atol=1e-7)


def test_forward_kl_is_the_teacher_against_the_student_and_reverse_the_other_way_round():
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()

    assert forward_kl(student, teacher).item() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert reverse_kl(student, teacher).item() == pytest.approx(-0.5 * math.log(1.8) - 0.5 * math.log(0.2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_logits_give_zero_and_a_gradient_of_exactly_zero(name, dtype):
    logits = random_logits(16, 5000, seed=0, scale=8.0).to(dtype)

    assert DIVERGENCES[name](logits, logits, temperature=3.0).abs().max() == 0
    assert gradient_of(DIVERGENCES[name], logits, logits, temperature=3.0).abs().max() == 0


def test_autograd_through_log_softmax_leaves_a_gradient_at_equal_logits():
    logits = random_logits(16, 5000, seed=0, scale=8.0)

    def plain(student: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)

    assert gradient_of(plain, logits, logits).abs().max() > 0  # why ours is the closed form


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_is_never_negative_and_learns_where_rounding_would_make_it_so(name):
    teacher = random_logits(2000, 300, seed=0)
    student = teacher + random_logits(2000, 300, seed=1, scale=1e-4)

    value, gradient = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    assert (value >= 0).all() and (value == 0).any()  # some were clamped
    assert (gradient[value == 0].abs().amax(-1) > 0).all()  # and still have their gradient


@pytest.mark.parametrize("name", DIVERGENCES)
def test_teacher_gets_no_gradient(name):
    student, teacher = (random_logits(3, 50, seed=seed).requires_grad_() for seed in (0, 1))

    DIVERGENCES[name](student, teacher).sum().backward()

    assert teacher.grad is None and student.grad is not None


def test_temperature_squared_keeps_the_gradient_near_flat():
    student, teacher = random_logits(64, 1000, seed=0, scale=2.0), random_logits(64, 1000, seed=1, scale=2.0)

    norms = {t: gradient_of(forward_kl, student, teacher, temperature=t).norm().item() for t in (1.0, 2.0, 4.0, 8.0)}
    bare = {t: norm / t**2 for t, norm in norms.items()}

    assert bare[1.0] / bare[8.0] > 100  # without T² the term all but vanishes
    assert norms[1.0] / norms[8.0] < 8  # with it, the size stays
    assert norms[4.0] / norms[8.0] == pytest.approx(1.0, abs=0.15)  # and is flat where the softmax is near linear


def test_bfloat16_logits_are_computed_in_float32():
    teacher = random_logits(64, 30000, seed=0, scale=2.0)
    student = teacher + random_logits(64, 30000, seed=1, scale=0.1)
    exact = reference("forward_kl", student.bfloat16(), teacher.bfloat16(), 1.0)

    ours = forward_kl(student.bfloat16(), teacher.bfloat16())
    log_q, log_p = student.bfloat16().log_softmax(-1), teacher.bfloat16().log_softmax(-1)
    in_bfloat16 = (log_p.exp() * (log_p - log_q)).float().sum(-1)

    # float32 rounds a log-probability of -10 to 5e-7, and an error of the normaliser is the same for all tokens.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-6)
    assert ((in_bfloat16 - exact).abs() / exact).max() > 0.1  # the trap
    assert gradient_of(forward_kl, student.bfloat16(), teacher.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", DIVERGENCES)
def test_extreme_logits_stay_finite(name):
    student, teacher = random_logits(4, 100, seed=0), random_logits(4, 100, seed=1)
    student[:, 3], teacher[:, 5] = 120.0, 300.0  # exp of either overflows float32

    value, gradient = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    exact = F.kl_div(
        *(x.double().log_softmax(-1) for x in ((student, teacher) if name == "forward_kl" else (teacher, student))),
        log_target=True,
        reduction="none",
    ).sum(-1)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    assert gradient.isfinite().all()


def test_wrong_by_far_is_where_the_student_learns_most():
    student, teacher = torch.zeros(1, 50), torch.zeros(1, 50)
    student[0, 0], teacher[0, 0] = -34.0, 4.0  # a clamp of log-probabilities at -10 leaves a gradient of 7e-7 here

    assert gradient_of(forward_kl, student, teacher)[0, 0].item() == pytest.approx(-0.527, abs=0.01)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_both_exclude_count_nothing(name):
    student, teacher = random_logits(4, 100, seed=0), random_logits(4, 100, seed=1)
    masked = [torch.cat([logits, torch.full((4, 3), -torch.inf)], -1) for logits in (student, teacher)]

    value, gradient = DIVERGENCES[name](*masked), gradient_of(DIVERGENCES[name], *masked)

    torch.testing.assert_close(value, DIVERGENCES[name](student, teacher))
    torch.testing.assert_close(gradient[:, :100], gradient_of(DIVERGENCES[name], student, teacher))
    assert (gradient[:, 100:] == 0).all()


def test_what_is_infinite_or_not_a_number_stays_visible():
    clean = random_logits(1, 10, seed=0)
    excluded, infinite, unknown = clean.clone(), clean.clone(), clean.clone()
    excluded[0, 0], infinite[0, 0], unknown[0, 0] = -torch.inf, torch.inf, torch.nan

    assert forward_kl(excluded, clean).item() == math.inf and reverse_kl(clean, excluded).item() == math.inf
    for bad in (infinite, unknown):
        for divergence in (forward_kl, reverse_kl):
            assert divergence(bad, clean).isnan().all() and divergence(clean, bad).isnan().all()
            assert gradient_of(divergence, bad, clean).isnan().any()
        assert cross_entropy(bad, torch.tensor([1])).isnan().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_token_gives_a_zero_with_a_graph(name):
    student = torch.randn(0, 50, requires_grad=True)

    total = FUNCTIONS[name](student, torch.randn(0, 50), torch.empty(0, dtype=torch.long), temperature=2.0).sum()
    total.backward()

    assert total.item() == 0 and student.grad.shape == (0, 50)


def test_top1_agreement_is_one_where_the_most_likely_tokens_are_the_same():
    student, teacher = torch.eye(3), torch.eye(3)[[0, 2, 2]]

    assert top1_agreement(student, teacher).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_reductions_of_torch_are_no_token_means():
    log_q, log_p = (random_logits(2, 8, 100, seed=seed).log_softmax(-1) for seed in (0, 1))
    token_mean = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean().item()

    # Why no reduction of torch's is used: one forgets the time, the other also divides by the vocabulary.
    assert F.kl_div(log_q, log_p, log_target=True, reduction="batchmean").item() == pytest.approx(8 * token_mean)
    assert F.kl_div(log_q, log_p, log_target=True, reduction="mean").item() == pytest.approx(token_mean / 100)


def test_different_vocabularies_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"\(4, 50\).*\(4, 60\)"):
        forward_kl(torch.zeros(4, 50), torch.zeros(4, 60))


def test_padding_a_vocabulary_with_zeros_would_change_the_divergence():
    teacher = random_logits(32, 1000, seed=0, scale=1.0) - 8.0
    student = teacher[:, :990] + random_logits(32, 990, seed=1, scale=0.3)

    cut = forward_kl(student, teacher[:, :990]).mean()
    padded = forward_kl(F.pad(student, (0, 10)), teacher).mean()

    assert padded > 10 * cut
