"""The models that a task names: that they are there, and trained or frozen as they must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Roles = Sequence[tuple[str, str]]  # key below `task` and the name of the model that it gives


def find_member_problems(
    trainable: Mapping[str, bool], *, stage: str, trained: Roles = (), frozen: Roles = (), instead: str = ""
) -> list[str]:
    """Returns which models of a task are not there, and which are trained or frozen and must not be.

    Args:
        trainable, stage: As in `TaskModule.check_models`.
        instead: What may be given in the place of a frozen model that is not there.
    """
    problems = [
        f"task.{role}={name}: models has no {name}, only {', '.join(trainable)}{more}"
        for roles, more in ((trained, ""), (frozen, instead))
        for role, name in roles
        if name not in trainable
    ]
    problems += [
        f"models.{name}.trainable=false, but task.{role} trains it; set it to true"
        for role, name in trained
        if stage == "fit" and trainable.get(name) is False
    ]
    problems += [
        f"models.{name}.trainable=true, but task.{role} is frozen; set it to false"
        for role, name in frozen
        if trainable.get(name)
    ]
    return problems
