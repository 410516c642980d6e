"""Universal logit distance: by hand, against float64 autograd, and where the vocabularies differ in size."""

import pytest
import torch
from torch import Tensor

from tasks.losses.unaligned import universal_logit_distance


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """Row by row in float64: |difference| of the sorted probabilities, zeros for tokens that are not there."""
    values = []
    for own, given in zip(student.double(), teacher.double(), strict=True):
        q = sorted(torch.softmax(own / temperature, 0), key=Tensor.item, reverse=True)
        p = sorted(torch.softmax(given / temperature, 0), key=Tensor.item, reverse=True)
        zeros = [torch.zeros((), dtype=torch.float64)] * abs(len(q) - len(p))
        q, p = (q + zeros, p) if len(q) < len(p) else (q, p + zeros)
        values.append(sum((left - right).abs() for left, right in zip(q, p, strict=True)))
    return torch.stack(values)


@pytest.mark.parametrize("sizes", [(7, 7), (5, 11), (11, 5)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_value_and_gradient_are_those_of_float64(sizes: tuple[int, int], temperature: float) -> None:
    student, teacher = draw(4, sizes[0], seed=1).requires_grad_(), draw(4, sizes[1], seed=2).requires_grad_()
    check = student.detach().double().requires_grad_()
    expected = reference(check, teacher.detach(), temperature=temperature)
    expected.sum().backward()

    values = universal_logit_distance(student, teacher, temperature=temperature)
    values.sum().backward()

    assert values.dtype == torch.float32
    assert torch.allclose(values.double(), expected.detach(), atol=1e-6)
    assert torch.allclose(student.grad.double(), check.grad, atol=1e-6)
    assert teacher.grad is None


def test_by_hand() -> None:
    student = torch.tensor([[0.2, 0.7, 0.1]]).log()
    teacher = torch.tensor([[0.1, 0.1, 0.2, 0.6]]).log()

    # 0.7 0.2 0.1 0 against 0.6 0.2 0.1 0.1
    assert universal_logit_distance(student, teacher).tolist() == pytest.approx([0.2])


def test_names_of_tokens_do_not_matter() -> None:
    teacher = draw(5, 9, seed=3)

    assert universal_logit_distance(teacher[:, torch.randperm(9)], teacher).abs().max() <= 1e-6


def test_sure_and_unsure_are_two_apart_at_most() -> None:
    sure, unsure = torch.eye(1, 1000) * 100, torch.zeros(1, 1000)

    assert universal_logit_distance(sure, unsure).tolist() == pytest.approx([2 * 0.999], abs=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    student, teacher = draw(4, 500, seed=4).bfloat16(), draw(4, 600, seed=5).bfloat16()

    expected = reference(student, teacher, temperature=1.0)

    assert torch.allclose(universal_logit_distance(student, teacher).double(), expected, atol=1e-5)


def test_no_position_is_a_zero_with_a_graph() -> None:
    student = draw(0, 5, seed=1).requires_grad_()

    total = universal_logit_distance(student, draw(0, 7, seed=2)).sum()

    assert total.requires_grad
    assert total.item() == 0


def test_positions_that_are_not_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="3 positions of the student and 2 of the teacher"):
        universal_logit_distance(draw(3, 5, seed=1), draw(2, 5, seed=2))
