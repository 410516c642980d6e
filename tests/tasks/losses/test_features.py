"""Losses between states and embeddings against their textbook forms in float64 autograd, a row and a head at a time."""

import math

import pytest
import torch
from torch import Tensor

from tasks.losses.features import attention_relations, hidden_cosine, hidden_mse, similarity_kl, similarity_mse
from trainer import ConfigError


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosine(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum() / (first.norm() * second.norm())


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = teacher.softmax(0), student.softmax(0)
    return (p * (p / q).log()).sum()


def plain_mse(student: Tensor, teacher: Tensor) -> Tensor:
    return torch.stack(
        [sum((s - t) ** 2 for s, t in zip(*rows, strict=True)) / 32 for rows in zip(student, teacher, strict=True)]
    )


def plain_cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return torch.stack([1 - cosine(mine, theirs) for mine, theirs in zip(student, teacher, strict=True)])


def others(rows: Tensor, index: int) -> Tensor:
    return torch.stack([cosine(rows[index], row) for other, row in enumerate(rows) if other != index])


def plain_similarity_mse(student: Tensor, teacher: Tensor) -> Tensor:
    differences = [others(student, index) - others(teacher, index) for index in range(len(student))]
    return torch.stack([(difference**2).mean() for difference in differences])


def plain_similarity_kl(student: Tensor, teacher: Tensor, temperature: float = 0.05) -> Tensor:
    pairs = [(others(teacher, index), others(student, index)) for index in range(len(student))]
    return torch.stack([kl(theirs / temperature, mine / temperature) for theirs, mine in pairs])


def plain_relations(student: Tensor, teacher: Tensor, heads: int, allowed: Tensor) -> Tensor:
    """Args: allowed: (B, T, T)."""

    def relation(states: Tensor, head: int, query: int, keys: Tensor) -> Tensor:
        size = states.shape[-1] // heads
        part = states[:, head * size : (head + 1) * size]
        return part[keys] @ part[query] / math.sqrt(size)

    rows = []
    for mine, theirs, may in zip(student, teacher, allowed, strict=True):
        for query in range(len(mine)):
            keys = may[query].nonzero().squeeze(-1)
            parts = [
                kl(relation(theirs, head, query, keys), relation(mine, head, query, keys))
                if len(keys)
                else mine.sum() * 0
                for head in range(heads)
            ]
            rows.append(sum(parts) / heads)
    return torch.stack(rows).view(student.shape[:2])


def check(function, plain, student: Tensor, teacher: Tensor) -> None:
    """Value and gradient, with a weight per row, so that rows cannot be mixed up."""
    mine, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    value, expected = function(mine, teacher), plain(exact, teacher.double())
    weights = draw(*value.shape, seed=9)
    (value * weights).sum().backward()
    (expected * weights.double()).sum().backward()

    assert value.dtype == torch.float32 and value.shape == expected.shape
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        (hidden_mse, plain_mse),
        (hidden_cosine, plain_cosine),
        (similarity_mse, plain_similarity_mse),
        (similarity_kl, plain_similarity_kl),
    ],
)
def test_value_and_gradient_equal_float64_autograd(function, plain):
    check(function, plain, draw(6, 32, seed=0) * 3, draw(6, 32, seed=1))


def test_similarities_compare_embeddings_of_different_width():
    check(similarity_mse, plain_similarity_mse, draw(5, 16, seed=0), draw(5, 24, seed=1))
    check(similarity_kl, plain_similarity_kl, draw(5, 16, seed=0), draw(5, 24, seed=1))


MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_relations_equal_float64_autograd(heads, causal, packed):
    """Two widths; padding at the end, and an item of padding only; or several documents in a row."""
    student, teacher = draw(3, 6, 16, seed=0), draw(3, 6, 24, seed=1)
    same = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
    mask = same if packed else MASK
    allowed = same if packed else MASK[:, :, None] & MASK[:, None, :]
    allowed = allowed & torch.ones(6, 6).bool().tril() if causal else allowed

    check(
        lambda mine, theirs: attention_relations(mine, theirs, heads=heads, mask=mask, causal=causal),
        lambda mine, theirs: plain_relations(mine, theirs, heads, allowed),
        student,
        teacher,
    )


def test_padding_and_what_stands_there_count_nothing():
    student, teacher, other = draw(3, 6, 16, seed=0), draw(3, 6, 16, seed=1), draw(3, 6, 16, seed=2)
    student.requires_grad_()

    value = attention_relations(student, teacher, heads=2, mask=MASK)
    changed = attention_relations(torch.where(MASK[..., None], student, other), teacher, heads=2, mask=MASK)
    value.sum().backward()

    assert torch.equal(value, changed)
    assert value[~MASK].abs().sum() == 0 and value[MASK].min() > 0
    assert torch.isfinite(student.grad).all() and student.grad[~MASK].abs().sum() == 0


def test_relations_of_grouped_keys_need_no_more_than_a_number_of_heads_that_divides_them():
    """A teacher of 9 heads with 3 of keys, 64 wide each, and a student of 6 heads with 2."""
    value = attention_relations(draw(2, 5, 128, seed=0), draw(2, 5, 192, seed=1), heads=8, mask=torch.ones(2, 5).bool())

    assert value.shape == (2, 5)
    with pytest.raises(
        ConfigError, match=r"student's states have 128 features, which 12 relation heads .* 128 and 192"
    ):
        attention_relations(draw(2, 5, 128, seed=0), draw(2, 5, 192, seed=1), heads=12, mask=torch.ones(2, 5).bool())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_nothing_is_lost_to_oneself(scale):
    states = draw(4, 6, 32, seed=0) * scale
    rows, mask = states.flatten(0, 1), torch.ones(4, 6).bool()
    values = [function(rows, rows) for function in (hidden_mse, hidden_cosine, similarity_mse, similarity_kl)]
    values.append(attention_relations(states, states, heads=4, mask=mask))

    assert all(value.min() >= 0 and value.max() <= 1e-6 for value in values)


def test_cosine_keeps_its_digits_where_both_nearly_agree():
    teacher = draw(8, 384, seed=0)
    student = teacher + 1e-4 * draw(8, 384, seed=1)

    exact = plain_cosine(student.double(), teacher.double())

    torch.testing.assert_close(hidden_cosine(student, teacher).double(), exact, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("function", [hidden_mse, hidden_cosine, similarity_mse, similarity_kl])
def test_half_precision_is_computed_in_float32_and_the_teacher_gets_no_gradient(function):
    student, teacher = draw(6, 32, seed=0).bfloat16(), draw(6, 32, seed=1).requires_grad_()
    mine = student.clone().requires_grad_()

    value = function(mine, teacher)
    value.sum().backward()

    assert torch.equal(value, function(student.float(), teacher.detach()))
    assert mine.grad.dtype == torch.bfloat16 and teacher.grad is None


@pytest.mark.parametrize("function", [similarity_mse, similarity_kl])
def test_a_part_of_the_sentences_against_all_gives_the_same_rows(function):
    student, teacher = draw(7, 16, seed=0), draw(7, 24, seed=1)

    whole = function(student, teacher)
    parts = [
        function(student[rows], teacher[rows], students=student, teachers=teacher, first=rows.start)
        for rows in (slice(0, 3), slice(3, 3), slice(3, 7))
    ]

    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("function", [hidden_mse, hidden_cosine, similarity_mse, similarity_kl])
@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_keep_their_graph(function, count):
    student = draw(count, 8, seed=0).requires_grad_()

    function(student, draw(count, 8, seed=1)).sum().backward()

    assert torch.isfinite(student.grad).all()


def test_states_of_different_width_are_refused_with_the_way_out():
    for function in (hidden_mse, hidden_cosine):
        with pytest.raises(ConfigError, match=r"\(5, 16\).*\(5, 24\).*models.projection.*student_size: 16.*size: 24"):
            function(draw(5, 16, seed=0), draw(5, 24, seed=1))
