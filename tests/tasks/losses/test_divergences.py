"""Losses per token against float64 autograd, and the traps that they avoid."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.losses import (
    FUNCTIONS,
    TopTokens,
    cross_entropy,
    entropy,
    forward_kl,
    generalised_jsd,
    reverse_kl,
    skew_kl,
    skew_reverse_kl,
    top1_agreement,
    total_variation,
)
from tasks.losses import divergences as divergences_module
from tests.tasks.losses.reference import DIVERGENCES, gradient_of, random_logits, textbook


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_and_its_gradient_equal_float64_autograd(name, temperature):
    student, teacher = random_logits(4, 7, 200, seed=0), random_logits(4, 7, 200, seed=1)
    weights = random_logits(4, 7, seed=2)  # a gradient per token, so that tokens cannot be mixed up

    value = DIVERGENCES[name](student, teacher, temperature=temperature)
    ours = gradient_of(lambda s, t: DIVERGENCES[name](s, t, temperature=temperature) * weights, student, teacher)
    exact_value = textbook(name, student, teacher, temperature)
    exact = gradient_of(lambda s, t: textbook(name, s, t, temperature) * weights, student.double(), teacher)

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

    assert (value >= 0).all()
    assert (value == 0).any() or name == "total_variation"  # some were clamped; a sum of sizes has nothing to clamp
    assert (gradient.abs().amax(-1) > 0).all()  # and still have their gradient


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
    exact = textbook("forward_kl", student.bfloat16(), teacher.bfloat16(), 1.0)

    ours = forward_kl(student.bfloat16(), teacher.bfloat16())
    log_q, log_p = student.bfloat16().log_softmax(-1), teacher.bfloat16().log_softmax(-1)
    in_bfloat16 = (log_p.exp() * (log_p - log_q)).float().sum(-1)

    # float32 rounds a log-probability of -10 to 5e-7, and an error of the normaliser is the same for all tokens.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-6)
    assert ((in_bfloat16 - exact).abs() / exact).max() > 0.1  # the trap
    assert gradient_of(forward_kl, student.bfloat16(), teacher.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_extreme_logits_stay_finite(name, dtype):
    student, teacher = random_logits(4, 100, seed=0).to(dtype), random_logits(4, 100, seed=1).to(dtype)
    student[:, 3], teacher[:, 5] = 120.0, 300.0  # exp of either overflows float32

    value, ours = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student.float(), teacher)

    exact = gradient_of(lambda s, t: textbook(name, s, t, 1.0), student.double(), teacher)
    torch.testing.assert_close(value.double(), textbook(name, student, teacher, 1.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)


def test_a_logit_of_120_gives_jsd_its_bound_where_plain_probabilities_give_not_a_number():
    student, teacher = torch.zeros(1, 50), torch.zeros(1, 50)
    student[0, 0], teacher[0, 1:] = 120.0, 30.0

    def plain(student: Tensor, teacher: Tensor) -> Tensor:
        q, p = student.softmax(-1), teacher.softmax(-1)
        m = (p + q) / 2
        return ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2

    assert plain(student, teacher).isnan().all()
    assert generalised_jsd(student, teacher).item() == pytest.approx(math.log(2), abs=1e-6)
    assert gradient_of(generalised_jsd, student, teacher).isfinite().all()


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name.startswith(("jsd", "skew"))])
def test_a_mixture_bounds_the_loss_where_one_excludes_what_the_other_has(name):
    student, teacher = random_logits(4, 100, seed=0), random_logits(4, 100, seed=1)
    student[:, :40], teacher[:, 30:70] = -torch.inf, -torch.inf

    value, ours = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    exact = gradient_of(lambda s, t: textbook(name, s, t, 1.0), student.double(), teacher)
    torch.testing.assert_close(value.double(), textbook(name, student, teacher, 1.0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)
    assert (ours[:, :40] == 0).all()


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.999])
def test_a_mixture_with_almost_nothing_of_one_side_is_right(beta):
    student, teacher = random_logits(8, 200, seed=0, scale=6.0), random_logits(8, 200, seed=1, scale=6.0)

    value = generalised_jsd(student, teacher, beta=beta)
    ours = gradient_of(generalised_jsd, student, teacher, beta=beta)

    exact = gradient_of(lambda s, t: textbook("jsd", s, t, 1.0, share=beta), student.double(), teacher)
    torch.testing.assert_close(value.double(), textbook("jsd", student, teacher, 1.0, share=beta), rtol=1e-4, atol=2e-7)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-7)


def test_ends_of_the_jsd_are_the_two_kls_and_it_goes_there_in_proportion():
    student, teacher = random_logits(8, 200, seed=0), random_logits(8, 200, seed=1)

    assert torch.equal(generalised_jsd(student, teacher, beta=0), forward_kl(student, teacher))
    assert torch.equal(generalised_jsd(student, teacher, beta=1), reverse_kl(student, teacher))
    assert torch.equal(skew_kl(student, teacher, skew=0), forward_kl(student, teacher))
    assert torch.equal(skew_reverse_kl(student, teacher, skew=0), reverse_kl(student, teacher))
    near = student + 0.5 * (teacher - student)
    torch.testing.assert_close(
        generalised_jsd(near, teacher, beta=1e-3) / 1e-3, forward_kl(near, teacher), rtol=0.05, atol=0
    )
    torch.testing.assert_close(
        generalised_jsd(near, teacher, beta=0.999) / 1e-3, reverse_kl(near, teacher), rtol=0.05, atol=0
    )


def test_mixtures_by_hand_say_whose_share_is_which():
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()

    m = [0.25 * 0.9 + 0.75 * 0.5, 0.25 * 0.1 + 0.75 * 0.5]  # a quarter of the teacher
    of_teacher = 0.9 * math.log(0.9 / m[0]) + 0.1 * math.log(0.1 / m[1])
    of_student = 0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1])

    assert generalised_jsd(student, teacher, beta=0.25).item() == pytest.approx(
        0.25 * of_teacher + 0.75 * of_student, rel=1e-5
    )
    assert skew_kl(student, teacher, skew=0.25).item() == pytest.approx(of_teacher, rel=1e-5)
    assert skew_reverse_kl(student, teacher, skew=0.75).item() == pytest.approx(of_student, rel=1e-5)
    assert total_variation(student, teacher, temperature=1.0).item() == pytest.approx(0.4, rel=1e-6)


def test_total_variation_takes_the_temperature_once_since_twice_would_grow():
    teacher = random_logits(256, 1000, seed=0, scale=1.0)
    student = teacher + random_logits(256, 1000, seed=1, scale=0.5)

    norms = {t: gradient_of(total_variation, student, teacher, temperature=t).norm().item() for t in (2.0, 4.0, 8.0)}

    assert norms[2.0] / norms[8.0] == pytest.approx(1.0, abs=0.25)
    assert 8 * norms[8.0] > 3 * 2 * norms[2.0]  # temperature²


@pytest.mark.parametrize("name", DIVERGENCES)
def test_pieces_of_rows_change_nothing(name, monkeypatch):
    student, teacher = random_logits(3, 5, 40, seed=0), random_logits(3, 5, 40, seed=1)
    whole = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    monkeypatch.setattr(divergences_module, "_rows_at_once", lambda logits: 4)
    pieces = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_inputs_are_left_as_they_are_and_a_transposed_student_is_read_right(name):
    student, teacher = random_logits(40, 6, seed=0).T, random_logits(6, 50, seed=1)[:, :40]
    before = student.clone(), teacher.clone()

    value, gradient = DIVERGENCES[name](student, teacher), gradient_of(DIVERGENCES[name], student, teacher)

    assert torch.equal(student, before[0]) and torch.equal(teacher, before[1])
    torch.testing.assert_close(value, DIVERGENCES[name](*before))
    torch.testing.assert_close(gradient, gradient_of(DIVERGENCES[name], *before))


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
        for divergence in DIVERGENCES.values():
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
    assert top1_agreement(student, TopTokens.from_logits(teacher, k=2)).tolist() == [1.0, 0.0, 1.0]


def test_entropy_is_in_nats_and_leaves_out_what_is_impossible():
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]).log()

    assert entropy(logits).tolist() == pytest.approx([1.5 * math.log(2), 2 * math.log(2), 0.0], abs=1e-6)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_reductions_of_torch_are_no_token_means():
    log_q, log_p = (random_logits(2, 8, 100, seed=seed).log_softmax(-1) for seed in (0, 1))
    token_mean = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean().item()

    # Why no reduction of torch's is used: one forgets the time, the other also divides by the vocabulary.
    assert F.kl_div(log_q, log_p, log_target=True, reduction="batchmean").item() == pytest.approx(8 * token_mean)
    assert F.kl_div(log_q, log_p, log_target=True, reduction="mean").item() == pytest.approx(token_mean / 100)


def test_different_vocabularies_are_refused_with_the_numbers():
    for divergence in DIVERGENCES.values():
        for options in ({}, {"top_k": 3}):
            with pytest.raises(ValueError, match=r"\(4, 50\).*\(4, 60\)"):
                divergence(torch.zeros(4, 50), torch.zeros(4, 60), **options)


def test_padding_a_vocabulary_with_zeros_would_change_the_divergence():
    teacher = random_logits(32, 1000, seed=0, scale=1.0) - 8.0
    student = teacher[:, :990] + random_logits(32, 990, seed=1, scale=0.3)

    cut = forward_kl(student, teacher[:, :990]).mean()
    padded = forward_kl(F.pad(student, (0, 10)), teacher).mean()

    assert padded > 10 * cut
