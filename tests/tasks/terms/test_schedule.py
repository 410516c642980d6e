"""Numbers that change over the run."""

import math

import pytest

from tasks.terms.schedule import Schedule, parse_schedule


def test_a_number_stays_as_it_is():
    schedule, problems = parse_schedule("task.terms.kl.weight", 0.5)

    assert problems == [] and schedule is not None and schedule.is_constant
    assert [schedule.at(step) for step in (1, 2, 1000)] == [0.5, 0.5, 0.5]


def test_a_linear_schedule_meets_both_ends_and_stays():
    schedule = Schedule(start=1.0, end=0.2, steps=5)

    values = [schedule.at(step) for step in (0, 1, 2, 3, 4, 5, 6, 100)]

    assert values == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_schedule_is_flat_at_both_ends():
    schedule = Schedule(start=0.0, end=1.0, steps=101, shape="cosine")

    assert schedule.at(1) == 0 and schedule.at(101) == 1 and schedule.at(51) == pytest.approx(0.5)
    assert schedule.at(11) == pytest.approx((1 - math.cos(0.1 * math.pi)) / 2)


def test_a_schedule_of_one_step_is_at_its_end():
    assert Schedule(start=1.0, end=0.5, steps=1).at(1) == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("high", "k is 'high'; it must be a finite number, or {start"),
        (True, "k is True; it must be a finite number"),
        (math.nan, "k is nan; it must be a finite number"),
        (10**400, "000; it must be a finite number"),
        (None, "k is None; it must be a finite number"),
        ({"start": 1.0, "end": 0.0}, "k.steps is missing"),
        ({"start": 1.0, "end": 0.0, "step": 5}, "k.step is no key of a schedule; did you mean steps?"),
        ({"start": 1.0, "end": "low", "steps": 5}, "k.end is 'low'; it must be a finite number"),
        ({"start": 10**400, "end": 0.0, "steps": 5}, "000; it must be a finite number"),
        ({"start": 1.0, "end": 0.0, "steps": 5, "shape": ["linear"]}, "k.shape is ['linear']; it must be one of"),
        ({"start": 1.0, "end": 0.0, "steps": 0}, "k.steps is 0; it must be a whole number of at least 1"),
        ({"start": 1.0, "end": 0.0, "steps": 2.5}, "k.steps is 2.5"),
        ({"start": 1.0, "end": 0.0, "steps": 5, "shape": "cosin"}, "did you mean cosine?"),
    ],
)
def test_what_is_no_schedule_is_refused_by_its_key(given, words):
    schedule, problems = parse_schedule("k", given)

    assert schedule is None and any(words in problem for problem in problems)
