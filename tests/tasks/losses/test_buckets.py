"""Divergences over a teacher's top tokens and a tail: what goes wrong without one, and that this is a divergence."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.losses import TopTokens, forward_kl, reverse_kl
from tests.tasks.losses.reference import DIVERGENCES, gradient_of, random_logits, textbook


def buckets(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """The log of the probabilities at that temperature of the given tokens and of all others together, in float64."""
    probabilities = torch.softmax(logits.double() / temperature, -1)
    is_top = F.one_hot(ids, logits.shape[-1]).sum(-2).double()
    tail = (probabilities * (1 - is_top)).sum(-1, keepdim=True)
    return torch.cat([probabilities.gather(-1, ids), tail], -1).log()


def reference(name: str, student: Tensor, teacher: Tensor, temperature: float, k: int) -> Tensor:
    ids = teacher.topk(k, -1).indices
    reduced = (buckets(logits, ids, temperature) for logits in (student, teacher))
    return textbook(name, *reduced, 1.0) * temperature ** (1 if name == "total_variation" else 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_top_k_and_top_tokens_equal_float64_autograd_over_the_buckets(name, temperature):
    student, teacher = random_logits(28, 200, seed=0), random_logits(28, 200, seed=1)
    sparse = TopTokens.from_logits(teacher, k=10, temperatures=[temperature])
    weights = random_logits(28, seed=2)

    def dense(s: Tensor, t: Tensor) -> Tensor:
        return DIVERGENCES[name](s, t, temperature=temperature, top_k=10)

    exact_value = reference(name, student, teacher, temperature, 10)
    exact = gradient_of(lambda s, t: reference(name, s, t, temperature, 10) * weights, student.double(), teacher)

    of_dense = dense(student, teacher), gradient_of(lambda s, t: dense(s, t) * weights, student, teacher)
    of_sparse = (
        DIVERGENCES[name](student, sparse, temperature=temperature),
        gradient_of(lambda s, t: DIVERGENCES[name](s, sparse, temperature=temperature) * weights, student, teacher),
    )
    for value, ours in (of_dense, of_sparse):
        assert value.dtype == torch.float32 and value.shape == (28,)
        torch.testing.assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-6 * max(1.0, temperature**2 / 5))
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=2e-6)


# 0.90 of the teacher's and 0.995 of the student's mass is on the top 3, and their tails have one shape.
TEACHER = torch.tensor([0.5, 0.25, 0.15] + [0.1 / 7] * 7)
STUDENT = torch.tensor([0.5543, 0.2754, 0.1653] + [0.005 / 7] * 7)
LEAVING = torch.tensor([0.005, 0.0025, 0.0015] + [0.991 / 7] * 7)  # a student with 0.9 % on the top 3


def rows(*probabilities: Tensor) -> list[Tensor]:
    return [each.log().unsqueeze(0) for each in probabilities]


def truncated_kl(first: Tensor, second: Tensor) -> float:
    return (first[:3] * (first[:3] / second[:3]).log()).sum().item()


def test_top_k_forward_kl_by_the_other_ways_is_far_off():
    renormalised = TEACHER[:3] / TEACHER[:3].sum()

    ours = forward_kl(*rows(STUDENT, TEACHER), top_k=3).item()

    assert truncated_kl(TEACHER, STUDENT) == pytest.approx(-0.0902, abs=2e-4)  # better than the teacher itself
    assert truncated_kl(renormalised, STUDENT[:3] / STUDENT[:3].sum()) == pytest.approx(0.0, abs=1e-4)  # blind
    assert truncated_kl(renormalised, STUDENT) == pytest.approx(0.0051, abs=1e-4)
    assert ours == pytest.approx(0.2093, abs=2e-4)
    assert ours == pytest.approx(forward_kl(*rows(STUDENT, TEACHER)).item(), abs=1e-5)  # nothing is lost in the tail


def test_top_k_reverse_kl_punishes_the_student_that_leaves_the_top():
    ours = {q: reverse_kl(*rows(q, TEACHER), top_k=3).item() for q in (STUDENT, LEAVING)}

    assert truncated_kl(STUDENT, TEACHER) == pytest.approx(0.0999, abs=2e-4)
    assert truncated_kl(LEAVING, TEACHER) == pytest.approx(-0.0414, abs=2e-4)  # the better of the two, if truncated
    assert ours[LEAVING] > 20 * ours[STUDENT]
    assert ours[LEAVING] == pytest.approx(2.23, abs=0.005)
    for q in (STUDENT, LEAVING):
        assert ours[q] == pytest.approx(reverse_kl(*rows(q, TEACHER)).item(), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_buckets_never_have_more_divergence_than_all_tokens_and_all_of_them_have_as_much(name, temperature):
    student, teacher = random_logits(50, 60, seed=0), random_logits(50, 60, seed=1)
    full = DIVERGENCES[name](student, teacher, temperature=temperature)

    values = {k: DIVERGENCES[name](student, teacher, temperature=temperature, top_k=k) for k in (1, 5, 30, 59, 60)}

    for value in values.values():
        assert (value <= full + 1e-5).all()  # the data processing inequality
    assert (values[1] < values[30]).any()
    for k in (59, 60):  # a tail of one token, and of none
        torch.testing.assert_close(values[k], full, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            gradient_of(DIVERGENCES[name], student, teacher, temperature=temperature, top_k=k),
            gradient_of(DIVERGENCES[name], student, teacher, temperature=temperature),
            rtol=1e-4,
            atol=1e-6,
        )
    sparse = TopTokens.from_logits(teacher, k=60, temperatures=[temperature])
    torch.testing.assert_close(DIVERGENCES[name](student, sparse, temperature=temperature), full, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_logits_give_zero_over_buckets_too(name):
    logits = random_logits(16, 5000, seed=0, scale=8.0)
    sparse = TopTokens.from_logits(logits, k=64, temperatures=[1.0, 3.0])

    assert DIVERGENCES[name](logits, logits, temperature=3.0, top_k=64).abs().max() == 0
    assert gradient_of(DIVERGENCES[name], logits, logits, temperature=3.0, top_k=64).abs().max() == 0
    for target in (sparse, replace(sparse, log_tails={})):  # without its tail, that is 1 - sum
        for temperature in (1.0, 3.0):
            assert 0 <= DIVERGENCES[name](logits, target, temperature=temperature).max() <= 1e-6 * temperature**2


@pytest.mark.parametrize("name", DIVERGENCES)
def test_without_its_stored_tail_a_sparse_teacher_has_one_minus_the_sum(name):
    student, teacher = random_logits(28, 200, seed=0), random_logits(28, 200, seed=1)
    stored = TopTokens.from_logits(teacher, k=10)
    assert stored.tail_at(1.0).exp().min() > 0.01

    value = DIVERGENCES[name](student, replace(stored, log_tails={}))

    torch.testing.assert_close(value, DIVERGENCES[name](student, stored), rtol=1e-5, atol=1e-5)


def test_the_stored_tail_of_a_sure_teacher_keeps_the_reverse_kl_that_one_minus_the_sum_loses():
    student, teacher = random_logits(28, 200, seed=0), random_logits(28, 200, seed=1)
    teacher[:, 7] = 30.0
    stored = TopTokens.from_logits(teacher, k=3)
    exact = reference("reverse_kl", student, teacher, 1.0, 3)

    torch.testing.assert_close(reverse_kl(student, stored).double(), exact, rtol=1e-5, atol=1e-5)
    assert (reverse_kl(student, replace(stored, log_tails={})) < exact - 1).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_sure_teacher_and_an_excluded_token_stay_finite(name):
    student, teacher = random_logits(4, 100, seed=0), random_logits(4, 100, seed=1)
    teacher[:, 7] = 40.0  # the tail's mass is 1e-16, and 0 as 1 - sum
    both = [torch.cat([logits, torch.full((4, 5), -torch.inf)], -1) for logits in (student, teacher)]

    sparse = TopTokens.from_logits(both[1], k=3)
    for target in (both[1], sparse, replace(sparse, log_tails={})):
        options = {} if isinstance(target, TopTokens) else {"top_k": 3}
        assert DIVERGENCES[name](both[0], target, **options).isfinite().all()
        gradient = gradient_of(DIVERGENCES[name], both[0], target, **options)
        assert gradient.isfinite().all() and (gradient[:, 100:] == 0).all()
        assert (gradient[:, 7] < 0).all()  # towards the teacher


def test_an_unknown_number_stays_visible():
    student, teacher = random_logits(1, 10, seed=0), random_logits(1, 10, seed=1)
    student[0, 4] = torch.nan

    for divergence in DIVERGENCES.values():
        assert divergence(student, teacher, top_k=3).isnan().all()
        assert gradient_of(divergence, student, teacher, top_k=3).isnan().any()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_fewer_of_the_stored_tokens_are_the_likeliest_whatever_their_order(name):
    student, teacher = random_logits(6, 50, seed=0), random_logits(6, 50, seed=1)
    stored = TopTokens.from_logits(teacher, k=8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = TopTokens(
        ids=stored.ids[:, order], log_probs=stored.log_probs[:, order], log_normalisers={}, log_tails=stored.log_tails
    )

    value = DIVERGENCES[name](student, shuffled, top_k=3)

    torch.testing.assert_close(value, DIVERGENCES[name](student, teacher, top_k=3), rtol=1e-4, atol=1e-6)


def test_half_precision_and_more_dimensions_and_no_tokens():
    student, teacher = random_logits(2, 3, 50, seed=0), random_logits(2, 3, 50, seed=1)

    value = forward_kl(student, teacher, top_k=5)

    torch.testing.assert_close(value.view(-1), forward_kl(student.view(6, 50), teacher.view(6, 50), top_k=5))
    assert gradient_of(forward_kl, student.bfloat16(), teacher.bfloat16(), top_k=5).dtype == torch.bfloat16
    empty = torch.randn(0, 50, requires_grad=True)
    for teacher in (torch.randn(0, 50), TopTokens.from_logits(torch.randn(0, 50), k=5)):
        total = forward_kl(empty, teacher, top_k=5).sum()
        total.backward()
        assert total.item() == 0 and empty.grad.shape == (0, 50)


def test_temperature_divides_all_tokens_before_the_rest_is_put_together():
    teacher = torch.log(torch.tensor([[0.476] + [0.524 / 9999] * 9999]))
    student = torch.zeros(1, 10000)
    sparse = TopTokens.from_logits(teacher, k=1, temperatures=[2.0])
    mass = math.sqrt(0.476) / (math.sqrt(0.476) + 9999 * math.sqrt(0.524 / 9999))  # 0.0095 of 0.476

    expected = 4 * (mass * math.log(mass * 10000) + (1 - mass) * math.log((1 - mass) / 0.9999))

    assert mass < 0.01
    assert forward_kl(student, teacher, temperature=2.0, top_k=1).item() == pytest.approx(expected, rel=1e-3)
    assert forward_kl(student, sparse, temperature=2.0).item() == pytest.approx(expected, rel=1e-3)


def test_what_does_not_fit_is_refused_with_numbers():
    student, teacher = torch.zeros(4, 50), torch.zeros(4, 50)
    sparse = TopTokens.from_logits(teacher, k=5)

    with pytest.raises(ValueError, match="top_k is 51; the teacher gives 1 to 50 tokens"):
        forward_kl(student, teacher, top_k=51)
    with pytest.raises(ValueError, match="top_k is 6; the teacher gives 1 to 5 tokens"):
        forward_kl(student, sparse, top_k=6)
    with pytest.raises(ValueError, match="top_k is 0"):
        forward_kl(student, teacher, top_k=0)
    with pytest.raises(ValueError, match=r"\(3, 50\).*\(4, 5\)"):
        forward_kl(student[:3], sparse)


def test_a_tail_without_any_mass_counts_nothing():
    student, teacher = random_logits(4, 8, seed=0), random_logits(4, 8, seed=1)
    student[:, 3:], teacher[:, 3:] = -torch.inf, -torch.inf

    for divergence in DIVERGENCES.values():
        torch.testing.assert_close(divergence(student, teacher, top_k=3), divergence(student[:, :3], teacher[:, :3]))
        gradient = gradient_of(divergence, student, teacher, top_k=3)
        assert gradient.isfinite().all() and (gradient[:, 3:] == 0).all()
