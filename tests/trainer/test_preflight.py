"""What is told of a run before its first update: problems of all ranks, differences, and whose weights are reached."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer import distributed, preflight
from trainer.config import ConfigError
from trainer.preflight import (
    Finding,
    GradientCheck,
    find_rank_differences,
    merge,
    reached_weights,
    refuse_together,
    run_checks,
)


def handle(name: str, module: nn.Module) -> Any:
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    return SimpleNamespace(name=name, module=module, trained_weights=weights)


def test_all_checks_are_heard_before_the_run_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checks = {
        "first": lambda: Finding(problems=["one is wrong"]),
        "second": lambda: Finding(fact="all is well", warnings=["mind this"]),
        "third": lambda: Finding(problems=["so is another"]),
    }

    with pytest.raises(ConfigError) as refused:
        run_checks(checks)

    assert [problem.partition(" (")[0] for problem in refused.value.problems] == [
        "preflight: one is wrong",
        "preflight: so is another",
    ]
    assert "task.preflight.third=false" in refused.value.problems[1]
    assert caplog.messages == ["preflight: second: all is well", "preflight: second: mind this"]


def test_a_sentence_of_some_ranks_names_them() -> None:
    assert merge([["a"], ["a", "b"], ["a", "b"]]) == ["a", "rank 1, 2: b"]


def test_what_some_ranks_refuse_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "gather", lambda value: [["a"], value])

    with pytest.raises(ConfigError) as refused:
        refuse_together(["a", "b"])

    assert refused.value.problems == ["a", "rank 1: b"]


def test_what_no_rank_refuses_goes_on() -> None:
    refuse_together([])


def test_what_ranks_have_differently_is_named_and_no_value_of_the_configuration_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def facts(lr: float, length: int) -> Mapping[str, str]:
        config = preflight._flat({"models": {"student": {"lr": lr, "names": ["a"]}}, "seed": 0})
        return {"examples of data.train": str(length), **{f"config.yaml, {key}": value for key, value in config}}

    ranks = [facts(0.125, 10), facts(0.125, 10), facts(0.25, 11)]

    def gather(value: Any) -> list[Any]:
        return ranks if isinstance(value, dict) else [str(sorted(theirs.items())) for theirs in ranks]

    assert find_rank_differences(ranks[0]) == []  # one rank agrees with itself
    monkeypatch.setattr(distributed, "gather", gather)

    length, rate = find_rank_differences(ranks[0])

    assert "examples of data.train: 10 on rank 0, 1; 11 on rank 2" in length
    assert "config.yaml, models.student.lr: " in rate and "0.125" not in rate and "0.25" not in rate


def test_the_leaves_of_a_graph_are_found_through_checkpoints_and_views() -> None:
    torch.manual_seed(0)
    used, unused, tail = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
    inputs = torch.randn(2, 3)

    hidden: Any = checkpoint(used, inputs, use_reentrant=False)
    reached = {id(weight) for weight in reached_weights(tail(hidden.view(2, 3)[:1]).sum())}

    assert reached == {id(weight) for weight in (*used.parameters(), *tail.parameters())}
    assert not reached & {id(weight) for weight in unused.parameters()}


def test_a_weight_without_a_gradient_is_told_and_a_model_without_any_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    student = nn.ModuleDict({"body": nn.Linear(2, 2), "pooler": nn.Linear(2, 2)})
    teacher = nn.Linear(2, 2).requires_grad_(False)
    check = GradientCheck([handle("student", student)], [handle("teacher", teacher)])
    loss = (student["body"](torch.ones(1, 2)) - teacher(torch.ones(1, 2))).sum()

    check.before_backward("student", loss)
    check.before_update("student")
    check.before_update("student")  # of a second update nothing is said

    fact, warning = caplog.messages
    assert fact == "preflight: gradients: 2 of 4 trained weights of models.student get a gradient, none of teacher"
    assert "2 of 4 trained weights of models.student get no gradient: pooler.weight, pooler.bias; freeze" in warning
    alone = GradientCheck([handle("student", student)], [])
    with pytest.raises(ConfigError, match=r"models\.student gets no gradient: its loss depends on none of its 4"):
        alone.before_backward("student", nn.Parameter(torch.ones(())) * 2)


def test_the_models_of_a_joint_loss_are_judged_one_by_one() -> None:
    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    check = GradientCheck([handle("left", left), handle("right", right)], [])

    check.before_backward("joint", left(torch.ones(1, 2)).sum())

    check.before_update("left")
    with pytest.raises(ConfigError, match=r"models\.right gets no gradient"):
        check.before_update("right")


def test_a_frozen_model_in_a_loss_is_refused() -> None:
    student, teacher = nn.Linear(2, 2), nn.Linear(2, 2)  # whose weights were never frozen
    check = GradientCheck([handle("student", student)], [handle("teacher", teacher)])

    check.before_backward("student", (student(torch.ones(1, 2)) - teacher(torch.ones(1, 2))).sum())

    with pytest.raises(ConfigError, match=r"models\.teacher is frozen, but a loss depends on its weight weight"):
        check.before_update("student")
