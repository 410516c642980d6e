"""What frozen teachers predict for the positions that count: one of them or several, live or from a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tasks.logits.heads import HeadTap
from tasks.losses import TopTokens, mix_teachers
from tasks.teacher_cache import TeacherCache
from tasks.terms.objective import Rows, Signals
from tasks.text.language import counted_logits
from tasks.text.vocabulary import Alignment
from tasks.values import find_role_problems, is_number
from trainer import Batch, ConfigError, Metric, ModelHandle, did_you_mean

COMBINATIONS = ("distributions", "losses", "routes")
NEW_TEXT = "is_new_text"  # field of a batch: whether its answers were written in this run


@dataclass(kw_only=True)
class Answers:
    """What one teacher says of a micro-batch.

    Args:
        at: Some of the N positions to what it predicts there, logits (n, V) or its top tokens.
        states: Module path to its states, (B, T, D).
        label_log_probs: Gives those of the right next tokens, (N,), where `at` gives top tokens, which may lack them.
    """

    at: Callable[[Rows], Tensor | TopTokens]
    states: Mapping[str, Tensor] = field(default_factory=dict)
    label_log_probs: Callable[[], Tensor] | None = None


@dataclass(kw_only=True)
class Panel:
    """What all teachers say of a micro-batch.

    Args:
        weights: Of each teacher, with a sum of 1.
        is_mixed: Whether the student learns one distribution, the weighted mean of all, and not from each of them.
    """

    answers: Sequence[Answers]
    weights: Sequence[float]
    is_mixed: bool

    def at(self, rows: Rows, temperature: float) -> Signals:
        """Returns what the student learns from at some of the positions, each with its weight in the loss."""
        if self.is_mixed:
            return [(1.0, self.mixture(rows, temperature))]
        return [(weight, answer.at(rows)) for weight, answer in zip(self.weights, self.answers, strict=True)]

    def mixture(self, rows: Rows, temperature: float = 1.0) -> Tensor | TopTokens:
        """Returns the weighted mean of the teachers' distributions as logits; of a single teacher what it predicts."""
        if len(self.answers) == 1:
            return self.answers[0].at(rows)
        logits: list[Any] = [answer.at(rows) for answer in self.answers]
        return mix_teachers(logits, self.weights, temperature=temperature)

    @property
    def states(self) -> Mapping[str, Tensor]:
        """The inner states of the first teacher."""
        return self.answers[0].states

    def recorded(self) -> dict[str, Metric]:
        """Returns the metrics of a recorded teacher that its top tokens do not tell."""
        read = self.answers[0].label_log_probs
        if read is None:
            return {}
        log_probs = read()
        return {"reference/cross_entropy": (-log_probs.sum(), len(log_probs))}


class LiveTeacher:
    """A frozen model of the run.

    Args:
        tap: Where its head is read, so that no logits but those of a tile are ever there; None: all logits at once.
        vocabulary: The first so many logits; None: all.
        alignment: Its tokens that the student shares, where their ids differ; None: the ids are the same.
        visits: The device where its weights are only while they are used; None: where they are they stay.
    """

    def __init__(
        self,
        model: ModelHandle,
        *,
        tap: HeadTap | None,
        vocabulary: int | None,
        alignment: Alignment | None = None,
        visits: torch.device | None = None,
    ) -> None:
        self.model, self.tap, self.vocabulary, self.alignment, self.visits = model, tap, vocabulary, alignment, visits

    @contextmanager
    def read(self, batch: Batch, counted: Tensor, *, paths: Sequence[str] = ()) -> Iterator[Answers]:
        """Gives its answers; the weights of its head stay whole until they are let go of."""
        if self.alignment is not None:
            attended = batch.get("attention_mask")
            batch = {**batch, "input_ids": self.alignment.to_teacher(batch["input_ids"], attended)}
        with nullcontext() if self.visits is None else self.model.resident(self.visits):
            if self.tap is None:
                logits = counted_logits(self.model, batch, counted, vocabulary=self.vocabulary).detach()
                answers = Answers(at=lambda rows: logits[rows])
            else:
                hidden, head, states = self.tap.read(batch, counted, paths)
                answers = Answers(at=lambda rows: head.logits(hidden[rows]), states=states)
        yield answers


class CachedTeacher:
    """What a teacher said once, read from disk by the content of the examples.

    Args:
        others: The teacher itself, who is asked about text that no cache can have.
    """

    def __init__(self, cache: TeacherCache, *, others: LiveTeacher | None = None) -> None:
        self.cache, self.others = cache, others

    @contextmanager
    def read(self, batch: Batch, counted: Tensor, *, paths: Sequence[str] = ()) -> Iterator[Answers]:
        """Gives its answers, which are read from the disk while the student's forward runs; it has no inner states."""
        if batch.get(NEW_TEXT) and self.others is not None:
            with self.others.read(batch, counted, paths=paths) as answers:
                yield answers
            return
        found = self.cache.request(batch, counted)
        yield Answers(at=lambda rows: found.result()[0][rows], label_log_probs=lambda: found.result()[1])


Teacher = LiveTeacher | CachedTeacher


@dataclass(kw_only=True)
class Teachers:
    """All teachers of a student.

    Args:
        members: Name to teacher.
        weights: Name to its share, of a sum of 1.
        combine: "distributions": the student learns the weighted mean of their distributions; "losses": its loss is the
            weighted mean of its losses to each; "routes": each example has one teacher.
    """

    members: Mapping[str, Teacher]
    weights: Mapping[str, float]
    combine: str

    @contextmanager
    def read(
        self, batch: Batch, counted: Tensor, *, paths: Sequence[str] = (), owners: Tensor | None = None
    ) -> Iterator[Panel]:
        """Gives what all teachers say of the positions that count, and the states of the first at the paths.

        Args:
            owners: With routes, the number of each example's teacher, (B,).
        """
        teachers = list(self.members.values())
        with ExitStack() as stack:
            if owners is not None:
                at = self._routed(stack, teachers, batch, counted, owners)
                yield Panel(answers=[Answers(at=at)], weights=[1.0], is_mixed=True)
                return
            answers = [
                stack.enter_context(teacher.read(batch, counted, paths=paths if number == 0 else ()))
                for number, teacher in enumerate(teachers)
            ]
            is_mixed = len(answers) == 1 or self.combine == "distributions"
            yield Panel(answers=answers, weights=list(self.weights.values()), is_mixed=is_mixed)

    def _routed(
        self, stack: ExitStack, teachers: Sequence[Teacher], batch: Batch, counted: Tensor, owners: Tensor
    ) -> Callable[[Rows], Tensor | TopTokens]:
        """Asks each teacher about its own examples, and returns a reader of all positions."""
        examples = counted.nonzero()[:, 0]  # of each of the N positions
        position_owners = owners[examples]
        places = torch.zeros_like(position_owners)
        answers = []
        for number, teacher in enumerate(teachers):
            own = (owners == number).nonzero().squeeze(-1)
            # One example at least, of which no position counts: every rank must call every sharded model.
            asked = own if len(own) else own.new_zeros(1)
            asked_of = counted[asked] if len(own) else torch.zeros_like(counted[asked])
            answers.append(stack.enter_context(teacher.read(_examples(batch, asked), asked_of)))
            mine = position_owners == number
            places[mine] = torch.arange(int(mine.sum()), device=places.device)

        def at(rows: Rows) -> Tensor | TopTokens:
            of, where = position_owners[rows], places[rows]
            found: Tensor | None = None
            for number, answer in enumerate(answers):
                here = (of == number).nonzero().squeeze(-1)
                values = answer.at(where[here])
                assert isinstance(values, Tensor), "routes need live teachers"
                if found is None:
                    found = values.new_empty(len(of), values.shape[-1])
                found[here] = values
            assert found is not None
            return found

        return at


def _examples(batch: Batch, index: Tensor) -> Batch:
    count = len(batch["input_ids"])
    return {
        name: value[index] if isinstance(value, Tensor) and value.ndim and len(value) == count else value
        for name, value in batch.items()
    }


def parse_teachers(
    teacher: str | Mapping[str, float], *, combine: str, routes: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Returns each teacher's share, of a sum of 1, or raises ConfigError with all that is wrong.

    Args:
        routes: With combine="routes", the source of an example to its teacher.
    """
    problems = []
    if combine not in COMBINATIONS:
        hint = did_you_mean(str(combine), COMBINATIONS)
        problems.append(f"task.combine is {combine!r}; it must be one of {', '.join(COMBINATIONS)}{hint}")
    given: Mapping[str, float] = teacher if isinstance(teacher, Mapping) else {}
    if isinstance(teacher, str):
        problems += find_role_problems({"teacher": teacher})
        given = {teacher: 1.0}
    else:
        problems += _find_weight_problems(teacher)
    problems += _find_route_problems(routes, list(given), combine=combine)
    if not problems and combine == "routes" and len(set(given.values())) > 1:
        same = ", ".join(f"{name}: 1" for name in given)
        rule = f"with task.combine=routes weights mean nothing; give {{{same}}}"
        problems.append(f"task.teacher is {dict(given)}; {rule}")
    if problems:
        raise ConfigError(*problems)
    total = sum(map(float, given.values()))
    return {name: weight / total for name, weight in given.items()}


def _find_weight_problems(teacher: Any) -> list[str]:
    """Returns what is wrong with several teachers and their weights."""
    rule = "give a model's name, or {big: 0.7, small: 0.3}"
    if not isinstance(teacher, Mapping):
        return [f"task.teacher is {teacher!r}; {rule}"]
    if not teacher:
        return [f"task.teacher names no teacher; {rule}"]
    problems = []
    for name, weight in teacher.items():
        if not (isinstance(name, str) and name):
            problems.append(f"task.teacher names {name!r}, which is no model's name; {rule}")
        if not (is_number(weight) and weight > 0):
            problems.append(f"task.teacher.{name} is {weight!r}; it must be a number above 0, the teacher's weight")
    if not problems and not is_number(sum(map(float, teacher.values()))):
        problems.append(f"task.teacher is {dict(teacher)}; the sum of the weights must be a finite number")
    return problems


def _find_route_problems(routes: Any, teachers: Sequence[str], *, combine: str) -> list[str]:
    rule = "give the teacher of each source, {wiki: large, *: code}"
    if routes is not None and not isinstance(routes, Mapping):
        return [f"task.routes is {routes!r}; {rule}"]
    if combine == "routes" and not routes:
        return [f"task.routes is missing: {rule}"]
    problems = []
    if combine != "routes" and routes:
        problems.append(f"task.routes is given, but task.combine is {combine}; set task.combine=routes, or drop them")
    served = []
    for source, name in (routes or {}).items():
        if not isinstance(source, str):
            problems.append(f'task.routes has the source {source!r}; sources are text: write it as "{source}"')
        if name in teachers:
            served.append(name)
        else:
            problems.append(f"task.routes.{source} is {name!r}; it must be one of {', '.join(map(str, teachers))}")
    if combine == "routes" and not problems:
        problems += [
            f"task.teacher.{name} has no route in task.routes; give it a source, or drop it"
            for name in teachers
            if name not in served
        ]
    return problems
