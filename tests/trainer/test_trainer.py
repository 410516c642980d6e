"""The trainer's update against plain PyTorch: one process, the whole global batch at once, float64 where it can be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from trainer import Callback, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.tally import Tally
from trainer.window import Window, check_output

STEPS, LR = 3, 0.1
LENGTHS = [5, 1, 7, 3, 2, 6, 1, 4, 8, 2, 3, 5, 1, 6, 2, 4]  # tokens that count in each of 16 examples


class TokenTask(TaskModule):
    """Regresses a teacher on the items that count, which is a different number in every example."""

    def count_items(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["mask"].sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        errors = self.errors(batch)
        return StepOutput(losses={"student": errors.sum() / batch["mask"].sum().clamp(min=1)})

    def errors(self, batch: dict[str, Tensor]) -> Tensor:
        student, teacher = self.models["student"](batch["x"]), self.models["teacher"](batch["x"])
        return (student - teacher).pow(2).mean(-1) * batch["mask"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"error": (self.errors(batch).sum(), batch["mask"].sum())}


class SumTask(TokenTask):
    """The same with the sum over the items instead of their mean."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(sums={"student": self.errors(batch).sum()})


class ShareTask(TokenTask):
    """The same with the loss weighed by the task itself, as one does whose gradient is made in the forward."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(shares={"student": self.errors(batch).sum() * self.trainer.loss_weight("student")})


class PlainMeanTask(TokenTask):
    """What everybody writes who counts examples: wrong as soon as the lengths differ."""

    def count_items(self, batch: dict[str, Tensor]) -> int:
        return 1


def make_student() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_teacher() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    mask = [torch.arange(8) < length for length in LENGTHS]
    return [{"x": torch.randn(8, 4, generator=generator), "mask": row.float()} for row in mask]


def reference_weights(*, max_grad_norm: float | None = None, weight_decay: float = 0.0) -> dict[str, Tensor]:
    """Plain PyTorch in float64: 16 examples a step, the sum over all items divided by their number."""
    student, teacher = make_student().double(), make_teacher().double()
    optimizer = torch.optim.SGD(student.parameters(), lr=LR, weight_decay=weight_decay)
    data = make_data()
    x = torch.stack([item["x"] for item in data]).double()
    mask = torch.stack([item["mask"] for item in data]).double()
    for _ in range(STEPS):
        errors = (student(x) - teacher(x).detach()).pow(2).mean(-1) * mask
        (errors.sum() / mask.sum()).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(student.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in student.named_parameters()}


def fit(
    task: TaskModule,
    *,
    stage: int,
    batch_size: int,
    accumulation: int,
    teacher: dict[str, Any] | None = None,
    max_grad_norm: float | None = None,
    callbacks: dict[str, Callback] | None = None,
) -> MultiModelTrainer:
    from trainer.handle import gathered_state_dict

    reset_accelerate()
    trainer = MultiModelTrainer(
        {"student": {"zero_optimization": {"stage": stage}}, "teacher": teacher or {"replicate": True}},
        max_steps=STEPS,
        log_every=1,
        gradient_accumulation_steps=accumulation,
        callbacks=callbacks,
    )
    models = {
        "student": ModelSpec(
            build=make_student,
            optimizer=functools.partial(torch.optim.SGD, lr=LR),
            dtype=torch.float32,
            max_grad_norm=max_grad_norm,
        ),
        "teacher": ModelSpec(build=make_teacher, trainable=False, dtype=torch.float32),
    }
    data = TrainingData(train=make_data(), validation=make_data(), batch_size=batch_size)
    trainer.fit(task, models=models, data=data)
    trainer.weights = gathered_state_dict(trainer.models["student"].module)  # type: ignore[attr-defined]
    return trainer


def reset_accelerate() -> None:
    """Forgets the Accelerator of the run before: this process makes several."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in right)


def engine_of(trainer: MultiModelTrainer) -> str:
    return type(trainer.models["student"].engine.optimizer).__name__


# Several checks for each spawn: a spawn costs seconds.


def run_matrix(world_size: int) -> dict[str, Any]:
    """Returns the largest differences from the reference on rank 0, by case, and what the run really was."""
    found: dict[str, Any] = {}
    plain, clipped = reference_weights(), reference_weights(max_grad_norm=0.05)
    layouts = {1: [(16, 1), (4, 4), (1, 16)], 2: [(8, 1), (2, 4), (1, 8)], 3: [(2, 3), (6, 1)]}[world_size]
    for stage in (0, 1, 2, 3):
        for batch_size, accumulation in layouts:
            trainer = fit(TokenTask(), stage=stage, batch_size=batch_size, accumulation=accumulation)
            found[f"zero{stage} {batch_size}x{accumulation}"] = _difference(trainer, plain)
        found[f"stage {stage}"] = (engine_of(trainer), trainer.models["student"].engine.zero_optimization_stage())
        batch_size, accumulation = layouts[1]
        trainer = fit(SumTask(), stage=stage, batch_size=batch_size, accumulation=accumulation)
        found[f"zero{stage} sums"] = _difference(trainer, plain)
        trainer = fit(ShareTask(), stage=stage, batch_size=batch_size, accumulation=accumulation)
        found[f"zero{stage} shares"] = _difference(trainer, plain)
        trainer = fit(TokenTask(), stage=stage, batch_size=batch_size, accumulation=accumulation, max_grad_norm=0.05)
        found[f"zero{stage} clipped"] = _difference(trainer, clipped)
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    trainer = fit(TokenTask(), stage=2, batch_size=layouts[0][0], accumulation=layouts[0][1], teacher=sharded)
    found["sharded teacher"] = _difference(trainer, plain)
    found["teacher bytes"] = trainer.models["teacher"].local_bytes()
    trainer = fit(PlainMeanTask(), stage=2, batch_size=layouts[1][0], accumulation=layouts[1][1])
    found["plain means"] = _difference(trainer, plain)
    return found


def _difference(trainer: MultiModelTrainer, reference: dict[str, Tensor]) -> float:
    return difference(trainer.weights, reference) if trainer.is_main else 0.0  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"{size} ranks")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, list[dict[str, Any]]]:
    world_size = request.param
    return world_size, run_ranks(run_matrix, world_size, folder=tmp_path_factory.mktemp("ranks"), world_size=world_size)


def test_update_is_the_mean_over_the_global_batch_however_it_is_cut(matrix: tuple[int, list[dict[str, Any]]]) -> None:
    # float32 against float64 after 3 SGD steps of size 0.1 on weights of size 1: rounding is a few 1e-7.
    cases = {name: value for name, value in matrix[1][0].items() if name.startswith("zero")}
    assert len(cases) >= 16
    assert {name: value for name, value in cases.items() if not value < 1e-6} == {}


def test_matrix_ran_on_the_engines_it_claims(matrix: tuple[int, list[dict[str, Any]]]) -> None:
    found = matrix[1][0]
    assert found["stage 0"] == ("SGD", 0)
    assert found["stage 1"] == ("DeepSpeedZeroOptimizer", 1)
    assert found["stage 2"] == ("DeepSpeedZeroOptimizer", 2)
    assert found["stage 3"] == ("DeepSpeedZeroOptimizer_Stage3", 3)


def test_matrix_would_see_the_wrong_normalisation(matrix: tuple[int, list[dict[str, Any]]]) -> None:
    assert matrix[1][0]["plain means"] > 1e-3


def test_sharded_teacher_teaches_the_same_and_takes_its_share_of_memory(
    matrix: tuple[int, list[dict[str, Any]]],
) -> None:
    world_size, found = matrix
    whole = sum(parameter.numel() for parameter in make_teacher().parameters()) * 4

    assert found[0]["sharded teacher"] < 1e-6
    # Each of the 4 tensors is padded to a multiple of the ranks.
    assert all(whole / world_size <= rank["teacher bytes"] <= whole / world_size + 4 * 4 for rank in found)


@pytest.mark.parametrize(
    ("count", "rule"),
    [
        (-3, "count_items is -3; it must be a finite number of at least 0"),
        (float("nan"), "count_items is nan; it must be"),
        (None, "count_items is None; it must be"),
        ("4", "count_items is '4'; it must be"),
        ({"student": -1}, "count_items' 'student' is -1; it must be"),
        ({}, "at least one, for every micro-batch"),
        (torch.ones(3), r"count_items has shape \(3,\); return one number"),
    ],
)
def test_what_is_no_count_of_items_is_refused(count: Any, rule: str) -> None:
    class Odd(TaskModule):
        def count_items(self, batch: dict[str, Tensor]) -> Any:
            return count

    with pytest.raises(ValueError, match=rule):
        Window(Odd(), [{}], [False], device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        (StepOutput(losses={"student": 1.0}), "the loss 'student' is of type float; it must be a tensor"),
        (StepOutput(losses={"student": torch.ones(2, 1, requires_grad=True)}), r"has shape \(2, 1\); return its mean"),
        (
            StepOutput(
                losses={"student": torch.ones((), requires_grad=True)},
                sums={"student": torch.ones((), requires_grad=True)},
            ),
            "'student' twice, of losses, sums and shares",
        ),
    ],
)
def test_a_loss_that_cannot_be_backpropagated_is_named(output: StepOutput, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_output(output, ["student"])


@pytest.mark.parametrize("value", [None, "x", {"b": 1.0}, torch.ones(3), (1, 2, 3), (1.0, torch.ones(2))])
def test_a_metric_that_has_no_mean_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the metric 'a' is .*; it must be one number, or a pair \(sum, count\)"):
        Tally(torch.device("cpu")).add_metric("a", value, 1)


def test_a_prepared_batch_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="prepare_batch returned NoneType; return the batch"):
        Window(TaskModule(), [None], [False], device=torch.device("cpu"))
