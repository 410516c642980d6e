"""Several teachers: what the student learns from them, and which example goes to which."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tasks.losses import forward_kl
from tasks.teaching.teachers import Answers, Teachers, parse_teachers
from tasks.terms.objective import LogitsObjective
from tasks.terms.term import parse_terms
from trainer import ConfigError

VOCABULARY = 11


class Known:
    """A teacher whose logits of a token are a row of a table; notes the examples that it is asked about."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
        self.asked: list[list[int]] = []

    @contextmanager
    def read(self, batch, counted, *, paths=()):
        self.asked.append(batch["input_ids"][:, 0].tolist())
        logits = self.table[batch["input_ids"][:, :-1][counted]]
        yield Answers(at=lambda rows: logits[rows])


def make_batch() -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 1, 2]])
    counted = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    return {"input_ids": tokens, "labels": tokens}, counted


def learn(teachers: Teachers, student: Tensor, batch, counted, *, owners=None, temperature: float = 2.0) -> Tensor:
    """The forward KL that a student's logits have, summed, through the objective of the task."""
    terms = parse_terms({"forward_kl": {"temperature": temperature}})
    with teachers.read(batch, counted, owners=owners) as panel:
        objective = LogitsObjective(
            terms=terms,
            scales={"forward_kl": torch.tensor(1.0)},
            temperatures={"forward_kl": temperature},
            rows={},
            labels=batch["labels"][:, 1:][counted],
            teacher=panel.at,
        )
        parts = [slice(0, 3), slice(3, len(student))]  # tiles
        return sum(objective(student[rows], rows)[0] for rows in parts)


@pytest.fixture
def student() -> Tensor:
    return torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(9))


def test_distributions_are_mixed_at_the_temperature_of_the_term(student):
    batch, counted = make_batch()
    first, second = Known(0), Known(1)
    teachers = Teachers(members={"a": first, "b": second}, weights={"a": 0.7, "b": 0.3}, combine="distributions")

    ours = learn(teachers, student, batch, counted)

    seen = batch["input_ids"][:, :-1][counted]
    p = 0.7 * (first.table[seen].double() / 2).softmax(-1) + 0.3 * (second.table[seen].double() / 2).softmax(-1)
    q = (student.double() / 2).softmax(-1)
    torch.testing.assert_close(ours.double(), 4 * (p * (p / q).log()).sum(), rtol=1e-5, atol=1e-6)


def test_losses_are_weighed_one_by_one(student):
    batch, counted = make_batch()
    first, second = Known(0), Known(1)
    teachers = Teachers(members={"a": first, "b": second}, weights={"a": 0.7, "b": 0.3}, combine="losses")

    ours = learn(teachers, student, batch, counted)

    seen = batch["input_ids"][:, :-1][counted]
    values = [forward_kl(student, known.table[seen], temperature=2.0).sum() for known in (first, second)]
    torch.testing.assert_close(ours, 0.7 * values[0] + 0.3 * values[1])


def test_each_example_learns_from_the_teacher_of_its_route(student):
    batch, counted = make_batch()
    first, second = Known(0), Known(1)
    owners = torch.tensor([1, 0, 1])
    teachers = Teachers(members={"a": first, "b": second}, weights={"a": 0.5, "b": 0.5}, combine="routes")

    ours = learn(teachers, student, batch, counted, owners=owners)

    seen, of = batch["input_ids"][:, :-1][counted], owners[counted.nonzero()[:, 0]]
    expected = torch.where((of == 0).unsqueeze(1), first.table[seen], second.table[seen])
    torch.testing.assert_close(ours, forward_kl(student, expected, temperature=2.0).sum())
    assert first.asked == [[5]] and second.asked == [[1, 9]]  # nobody reads another's examples


def test_a_teacher_without_an_example_is_asked_all_the_same(student):
    batch, counted = make_batch()
    first, second = Known(0), Known(1)
    teachers = Teachers(members={"a": first, "b": second}, weights={"a": 0.5, "b": 0.5}, combine="routes")

    learn(teachers, student, batch, counted, owners=torch.zeros(3, dtype=torch.long))

    # A sharded one would leave the ranks that do have examples for it waiting.
    assert first.asked == [[1, 5, 9]] and second.asked == [[1]]


def test_weights_are_shares_of_one():
    assert parse_teachers("teacher", combine="distributions") == {"teacher": 1.0}
    assert parse_teachers({"a": 3, "b": 1}, combine="losses") == {"a": 0.75, "b": 0.25}
    routes = {"wiki": "a", "*": "b"}
    assert parse_teachers({"a": 2, "b": 2}, combine="routes", routes=routes) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("teacher", "options", "words"),
    [
        ({"a": 0.0}, {}, "task.teacher.a is 0.0; it must be a number above 0"),
        ({"a": "much"}, {}, "task.teacher.a is 'much'"),
        ({}, {}, "task.teacher names no teacher"),
        ("a", {"combine": "distribution"}, "did you mean distributions?"),
        ({"a": 1, "b": 1}, {"combine": "routes"}, "task.routes is missing"),
        (
            {"a": 1, "b": 1},
            {"combine": "routes", "routes": {"wiki": "c"}},
            "task.routes.wiki is 'c'; it must be one of a, b",
        ),
        (None, {}, "task.teacher is None; give a model's name, or {big: 0.7, small: 0.3}"),
        (["a"], {}, "task.teacher is ['a']; give a model's name"),
        ("", {}, "task.teacher is ''; it must be the name of a model"),
        ({1: 0.5}, {}, "task.teacher names 1, which is no model's name"),
        ({"a": 10**400}, {}, "000; it must be a number above 0"),
        ({"a": 1e308, "b": 1e308}, {}, "the sum of the weights must be a finite number"),
        ("a", {"combine": 3}, "task.combine is 3; it must be one of"),
        ("a", {"combine": None}, "task.combine is None; it must be one of"),
        ("a", {"combine": ["losses"]}, "task.combine is ['losses']; it must be one of"),
        ("a", {"combine": "routes", "routes": "a"}, "task.routes is 'a'; give the teacher of each source"),
        ("a", {"routes": ["a"]}, "task.routes is ['a']; give the teacher of each source"),
        ("a", {"combine": "routes", "routes": {1: "a"}}, "task.routes has the source 1; sources are text"),
        ("a", {"combine": "routes", "routes": {"x": ["a"]}}, "task.routes.x is ['a']; it must be one of a"),
        (
            {"a": 0.7, "b": 0.3},
            {"combine": "routes", "routes": {"x": "a", "*": "b"}},
            "with task.combine=routes weights mean nothing; give {a: 1, b: 1}",
        ),
        (
            {"a": 1, "b": 1},
            {"combine": "routes", "routes": {"*": "a"}},
            "task.teacher.b has no route in task.routes; give it a source, or drop it",
        ),
        ({"a": 1, "b": 1}, {"routes": {"wiki": "a"}}, "task.routes is given, but task.combine is distributions"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(teacher, options, words):
    with pytest.raises(ConfigError) as caught:
        parse_teachers(teacher, **{"combine": "distributions", **options})

    assert words in str(caught.value)
