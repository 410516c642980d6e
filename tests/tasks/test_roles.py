"""Models that a task names and that are not there, or not trained or frozen as they must be."""

from tasks.roles import find_member_problems

ROLES = {"trained": [("student", "small")], "frozen": [("teacher", "large"), ("teacher", "other")]}


def test_models_as_they_must_be_are_no_problem() -> None:
    models = {"small": True, "large": False, "other": False}

    assert find_member_problems(models, stage="fit", **ROLES) == []
    assert find_member_problems(models | {"small": False}, stage="validate", **ROLES) == []


def test_all_problems_are_told_at_once() -> None:
    assert find_member_problems({"small": False, "large": True}, stage="fit", instead="; or none", **ROLES) == [
        "task.teacher=other: models has no other, only small, large; or none",
        "models.small.trainable=false, but task.student trains it; set it to true",
        "models.large.trainable=true, but task.teacher is frozen; set it to false",
    ]
    assert find_member_problems({"large": False}, stage="validate", trained=ROLES["trained"]) == [
        "task.student=small: models has no small, only large"
    ]
