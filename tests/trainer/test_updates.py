import pytest

from trainer.updates import UpdatePlan, find_idle_step


def steps(plan: UpdatePlan, last: int = 12) -> list[int]:
    return [step for step in range(1, last + 1) if plan.counts_in(step)]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (UpdatePlan(), list(range(1, 13))),
        (UpdatePlan(update_every=5), [5, 10]),
        (UpdatePlan(start_step=4), list(range(4, 13))),
        (UpdatePlan(update_every=5, start_step=1), [1, 6, 11]),
        (UpdatePlan(update_every=2, start_step=2), [2, 4, 6, 8, 10, 12]),
        (UpdatePlan(freeze_after=3), [1, 2, 3]),
        (UpdatePlan(update_every=3, start_step=4, freeze_after=9), [4, 7]),
    ],
    ids=str,
)
def test_losses_count_in_the_planned_steps_only(plan: UpdatePlan, expected: list[int]) -> None:
    assert steps(plan) == expected
    # a schedule's length is the number of updates, whatever the length of the run
    assert [plan.num_windows(last) for last in range(13)] == [len(steps(plan, last)) for last in range(13)]


def test_a_model_has_ended_after_its_last_step() -> None:
    plan = UpdatePlan(freeze_after=3)
    assert [plan.has_ended(step) for step in (3, 4)] == [False, True]
    assert not UpdatePlan().has_ended(10**6)


@pytest.mark.parametrize(
    ("plan", "num_steps", "problem"),
    [
        (UpdatePlan(update_every=0), 10, "models.m.update_every=0: must be at least 1"),
        (UpdatePlan(start_step=-1), 10, "models.m.start_step=-1: must be at least 1"),
        (UpdatePlan(freeze_after=0), 10, "models.m.freeze_after=0: must be at least 1"),
        (UpdatePlan(start_step=5, freeze_after=4), 10, "models.m.freeze_after=4: its first update is in step 5"),
        (UpdatePlan(update_every=5, freeze_after=4), None, "(models.m.update_every=5), so it is never updated"),
        (UpdatePlan(start_step=11), 10, "models.m.start_step=11: its first update is in step 11, but the run"),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_never_updates_is_refused(plan: UpdatePlan, num_steps: int | None, problem: str) -> None:
    (found,) = plan.find_problems("m", num_steps)
    assert problem in found


def test_a_plan_that_updates_is_accepted() -> None:
    assert UpdatePlan(start_step=10, freeze_after=10).find_problems("m", 10) == []
    assert UpdatePlan(start_step=10).find_problems("m", None) == []


def test_the_first_step_without_any_update_is_found() -> None:
    odd, even = UpdatePlan(update_every=2, start_step=1), UpdatePlan(update_every=2)

    assert find_idle_step([odd, even], 100) is None
    assert find_idle_step([UpdatePlan(), even], 10**9) is None
    assert find_idle_step([even], 100) == 1
    assert find_idle_step([UpdatePlan(freeze_after=7), UpdatePlan(start_step=9)], 100) == 8


def test_plans_are_shown_in_words() -> None:
    assert str(UpdatePlan()) == "every step"
    assert str(UpdatePlan(update_every=5)) == "every 5 steps"
    assert str(UpdatePlan(update_every=2, start_step=1, freeze_after=9)) == "every 2 steps, from step 1, until step 9"
