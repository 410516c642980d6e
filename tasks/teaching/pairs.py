"""A trained student and a frozen teacher: what every task of the two asks of a run's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.roles import find_member_problems
from tasks.text.sequences import Interpreter
from tasks.values import find_role_problems
from trainer import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def find_naming_problems(*, student: Any, teacher: Any) -> list[str]:
    """Returns which of both is no name, or that one model is to be both."""
    problems = find_role_problems({"student": student, "teacher": teacher})
    if not problems and student == teacher:
        problems.append(f"task.student and task.teacher are both {student!r}; name two models")
    return problems


def find_pair_problems(trainable: Mapping[str, bool], *, student: str, teacher: str, stage: str) -> list[str]:
    """Returns what is wrong with a run's models; arguments as in `TaskModule.check_models`."""
    return find_member_problems(trainable, trained=[("student", student)], frozen=[("teacher", teacher)], stage=stage)


def known_tokenizers(
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None], *, student: str, teacher: str
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """Returns the tokenizers of both, or raises ConfigError where there is none to read text with."""
    left, right = tokenizers.get(student), tokenizers.get(teacher)
    if left is None or right is None:
        raise ConfigError("the task reads text, but no model brings a tokenizer; give data.tokenizer=<folder>")
    return left, right


def find_interpreter_problems(
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None], *, student: str, teacher: str
) -> list[str]:
    """Returns why text cannot be told between the two models; arguments as in `TaskModule.check_tokenizers`."""
    try:
        Interpreter(*known_tokenizers(tokenizers, student=student, teacher=teacher))
    except ConfigError as error:
        return error.problems
    return []
