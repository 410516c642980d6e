"""Which tokens models share, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from tasks.losses import forward_kl
from tasks.text.vocabulary import Alignment, Vocabulary, align, find_alignment_problems, num_ids, shared_vocabulary
from tests.tasks.tiny_tokenizers import SPECIAL, make_tokenizer
from trainer.config import ConfigError


class Tokenizer:
    def __init__(self, *, last_id: int) -> None:
        self.last_id = last_id

    def get_vocab(self) -> dict[str, int]:
        return {"first": 0, "last": self.last_id}  # ids may have gaps: the number of tokens is not the size


def configs(student: int, teacher: int) -> dict[str, LlamaConfig]:
    return {"student": LlamaConfig(vocab_size=student), "teacher": LlamaConfig(vocab_size=teacher)}


@pytest.mark.parametrize(
    ("student", "teacher", "tokenizer", "size"),
    [
        (151936, 152064, Tokenizer(last_id=151664), 151665),
        (152064, 151936, Tokenizer(last_id=151664), 151665),
        (500, 500, Tokenizer(last_id=300), 500),  # one head size: nothing to cut, as each model is trained
        (500, 500, None, 500),
    ],
)
def test_heads_of_different_sizes_share_the_tokenizers_tokens(student, teacher, tokenizer, size):
    assert shared_vocabulary(configs(student, teacher), tokenizer=tokenizer) == size


@pytest.mark.parametrize(
    ("student", "teacher", "tokenizer", "message"),
    [
        (500, 600, None, r"models\.student has 500 logits, models\.teacher has 600 logits, and no tokenizer"),
        (500, 600, Tokenizer(last_id=550), r"500.*600.*551 tokens"),
        (500, 500, Tokenizer(last_id=500), r"500.*500.*501 tokens"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused_with_the_numbers(student, teacher, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        shared_vocabulary(configs(student, teacher), tokenizer=tokenizer)


# Two tokenizers -------------------------------------------------------------------------------------------------------

WORDS = ("t h", "th e", "i n", "in g", "o n")
OTHERS = ("q u", "b r", "h e", "r e", "n o", "e d", "o u", "a t", "i t", "o r", "l e", "t u", "d o")


def side(name: str, tokenizer: Any, *, extra: int = 0, num_logits: int | None = None) -> Vocabulary:
    """A model with so many rows in its head that are no token."""
    return Vocabulary(name=name, tokenizer=tokenizer, num_logits=num_logits or num_ids(tokenizer) + extra)


def aligned(left: Any, right: Any, *, extra: tuple[int, int] = (0, 0)) -> Alignment:
    return align(side("student", left, extra=extra[0]), side("teacher", right, extra=extra[1]))


def draw(size: int, *, seed: int, rows: int = 6) -> Tensor:
    return 2 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def bucketed(logits: Tensor, tokenizer: Any, shared: list[str], *, temperature: float) -> Tensor:
    """Probabilities of the shared tokens and of all other tokens together, in float64; rows without a token dropped."""
    vocabulary = tokenizer.get_vocab()
    real = torch.softmax(logits[:, list(range(len(vocabulary)))].double() / temperature, -1)
    kept = real[:, [vocabulary[token] for token in shared]]
    return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], dim=1)


@pytest.mark.parametrize(("extra", "width"), [((3, 10), 0), ((10, 3), 0), ((7, 7), 7)])
def test_the_same_ids_are_the_first_logits_of_both(extra: tuple[int, int], width: int) -> None:
    tokenizer = make_tokenizer(WORDS)
    student, teacher = (draw(num_ids(tokenizer) + more, seed=more) for more in extra)

    alignment = aligned(tokenizer, make_tokenizer(WORDS), extra=extra)

    assert alignment.first == num_ids(tokenizer) + width  # heads of one size are left whole
    own, given = alignment.apply(student, teacher)
    assert torch.equal(own, student[:, : alignment.first])
    assert torch.equal(given, teacher[:, : alignment.first])
    tokens = torch.tensor([[3, 4]])
    assert torch.equal(alignment.to_teacher(tokens), tokens)
    assert torch.equal(alignment.column_of(tokens), tokens)


def test_rows_without_a_token_get_no_mass_and_the_teacher_nothing_of_the_student() -> None:
    """What Liger does instead, logits of zero, and ms-swift, the student's logits in the teacher, with gradient."""
    tokenizer = make_tokenizer(WORDS)
    size, pads = num_ids(tokenizer), 30
    teacher = draw(size + pads, seed=1) / 2 - 8  # real logits are far from zero, which is no neutral value
    student = (teacher[:, :size] + 0.3 * draw(size, seed=2)).requires_grad_()
    q, p = student.double().softmax(-1), teacher[:, :size].double().softmax(-1)
    right = (p * (p / q).log()).sum(-1)

    own, given = aligned(tokenizer, tokenizer, extra=(0, pads)).apply(student, teacher)
    values = forward_kl(own, given)
    values.sum().backward()

    assert torch.allclose(values.double(), right, rtol=1e-4, atol=1e-6)
    assert not given.requires_grad
    assert torch.allclose(student.grad.double(), (q - p).detach(), atol=1e-6)
    padded = torch.cat([student.detach(), torch.zeros(len(student), pads)], dim=1)
    assert (forward_kl(padded, teacher) > 5 * right).all()
    assert padded.softmax(-1)[:, size:].sum(-1).min() > 0.9


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_tokens_that_one_side_lacks_are_one_bucket_of_each(temperature: float) -> None:
    left = make_tokenizer(WORDS, special=("<pad>", "<end>", "<user>", "<call>", "<bot>", "<reply>"))
    right = make_tokenizer(WORDS, special=("<end>", "<bot>", "<pad>", "<user>", "<think>", "<plan>", "<act>"))
    alignment = aligned(left, right, extra=(4, 9))
    student = draw(num_ids(left) + 4, seed=3).requires_grad_()
    teacher = draw(num_ids(right) + 9, seed=4)

    own, given = alignment.apply(student, teacher, temperature=temperature)

    shared = sorted(left.get_vocab().keys() & right.get_vocab().keys(), key=left.get_vocab().get)
    assert alignment.first is None
    assert own.shape == given.shape == (6, len(shared) + 1)
    for columns, logits, tokenizer in ((own, student, left), (given, teacher, right)):
        expected = bucketed(logits.detach(), tokenizer, shared, temperature=temperature)
        assert torch.allclose((columns / temperature).softmax(-1).double(), expected, atol=1e-6)
    check = student.detach().double().requires_grad_()
    q, p = (
        bucketed(logits, tokenizer, shared, temperature=temperature)
        for logits, tokenizer in ((check, left), (teacher, right))
    )
    (temperature**2 * (p * (p / q).log()).sum()).backward()
    forward_kl(own, given, temperature=temperature).sum().backward()
    assert torch.allclose(student.grad.double(), check.grad, atol=1e-5)
    assert (student.grad[:, num_ids(left) :] == 0).all()


def test_maps_are_compared_and_not_sizes() -> None:
    left, right = make_tokenizer(WORDS), make_tokenizer(WORDS, special=SPECIAL[::-1])
    assert num_ids(left) == num_ids(right)

    alignment = aligned(left, right)

    text = "the king<end>"
    ids = torch.tensor([left(text)["input_ids"]])
    assert alignment.first is None
    assert not alignment.has_tail
    assert not torch.equal(alignment.to_teacher(ids), ids)
    assert alignment.to_teacher(ids).tolist() == [right(text)["input_ids"]]
    assert torch.equal(alignment.column_of(ids), ids)  # columns are in the student's order


def test_text_with_tokens_that_the_teacher_lacks_is_refused_with_their_number() -> None:
    left = make_tokenizer(WORDS, special=(*SPECIAL, "<call>"))
    alignment = aligned(left, make_tokenizer(WORDS, special=SPECIAL))
    ids = torch.tensor([left("<call>on<call>")["input_ids"]])

    with pytest.raises(ConfigError, match=r"2 of 3 tokens .* unknown to models\.teacher.*id 5 of models\.student"):
        alignment.to_teacher(ids)

    attended = torch.tensor([[0, 1, 0]])
    assert alignment.to_teacher(ids, attended)[0, 1] == num_ids(left) - 2
    tail = len(alignment.student_ids)
    assert alignment.column_of(ids)[0].tolist() == [tail, ids[0, 1] - 1, tail]
    assert alignment.is_one_sided


def test_the_tail_is_impossible_where_a_teacher_has_no_other_token() -> None:
    left, right = make_tokenizer(WORDS, special=(*SPECIAL, "<call>")), make_tokenizer(WORDS)
    student, teacher = draw(num_ids(left), seed=5), draw(num_ids(right), seed=6)

    own, given = aligned(left, right).apply(student, teacher)

    assert torch.isneginf(given[:, -1]).all()
    q, p = student.double().softmax(-1), teacher.double().softmax(-1)
    shared = torch.cat([q[:, :5], q[:, 6:]], dim=1)  # "<call>" is id 5
    assert torch.allclose(forward_kl(own, given).double(), (p * (p / shared).log()).sum(-1), atol=1e-5)


def test_a_student_without_other_tokens_learns_the_teachers_distribution_over_its_own() -> None:
    left, right = make_tokenizer(WORDS), make_tokenizer(WORDS, special=(*SPECIAL, "<call>"))
    teacher = draw(num_ids(right), seed=6)

    own, given = aligned(left, right).apply(draw(num_ids(left), seed=5), teacher)

    assert own.shape == given.shape == (6, num_ids(left))
    assert torch.equal(given, torch.cat([teacher[:, :5], teacher[:, 6:]], dim=1))


def test_different_tokenizers_are_refused_with_numbers_an_example_and_what_to_do() -> None:
    left, right = make_tokenizer(WORDS), make_tokenizer(OTHERS)

    with pytest.raises(ConfigError) as refused:
        aligned(left, right)

    (problem,) = refused.value.problems
    size, other = num_ids(left), num_ids(right)
    assert f"models.student ({size} tokens) and models.teacher ({other} tokens)" in problem
    assert f"share {size - len(WORDS)} tokens, 91.8% of the smaller vocabulary" in problem
    assert "'b', 'r', 'o', 'w', 'n'" in problem  # the same words in the tokens of both
    assert "'br', 'o', 'w', 'n'" in problem
    assert "task=distill_sequence" in problem
    assert "task=distill_unaligned" in problem


def test_few_shared_tokens_are_too_few_even_where_the_text_is_cut_alike() -> None:
    left = make_tokenizer(WORDS, special=(*SPECIAL, *(f"<a{i}>" for i in range(30))))
    right = make_tokenizer(WORDS, special=(*SPECIAL, *(f"<b{i}>" for i in range(30))))

    with pytest.raises(ConfigError, match=r"share 61 tokens, 67\.0% of the smaller"):
        aligned(left, right)


def test_a_head_smaller_than_its_tokenizer_is_refused() -> None:
    tokenizer = make_tokenizer(WORDS)

    with pytest.raises(ConfigError, match=r"models\.teacher has 50 logits, but its tokenizer has 61 tokens"):
        align(side("student", tokenizer), side("teacher", tokenizer, num_logits=50))


def test_without_a_tokenizer_nothing_is_refused() -> None:
    assert find_alignment_problems({"student": None, "teacher": None}, student="student", teacher="teacher") == []
