"""Hooks: the table of docs/hooks.md held against the signatures and against a recorded run on two ranks."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from trainer import Callback, CheckpointPlan, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.callbacks.callback import HOOKS, HookCaller, check_hook_names

DOCS = Path(__file__).parents[3] / "docs" / "hooks.md"
# of a run of one epoch: 2 windows of 2 micro-batches, model a steps once in each, model b after every micro-batch
TIMES = {
    "once a run": 1,
    "once an epoch": 1,
    "once a window": 2,
    "once a micro-batch": 4,
    "once a loss": 8,
    "once an update": 2 + 4,
    "once a checkpoint": 1,
    "once a validation": 2,
    "once a validation batch": 2 * 2,
    "at a failure": 0,
}


def documented() -> list[dict[str, str]]:
    """Returns the rows of the table."""
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    names = ("hook", "when", "callback", "task", "called", "ranks")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def arguments(cell: str) -> list[str]:
    return re.findall(r"\w+", cell)


TABLE = {arguments(row["hook"])[0]: row for row in documented()}


# The table and the code


def test_table_lists_every_hook_once() -> None:
    assert len(documented()) == len(TABLE)
    assert set(TABLE) == set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_table_gives_the_arguments_of_callback_and_task(hook: str) -> None:
    parameters = list(inspect.signature(getattr(Callback, hook)).parameters)

    assert arguments(TABLE[hook]["callback"]) == parameters[1:]
    assert arguments(TABLE[hook]["task"]) == parameters[3:]


def test_the_loop_shows_every_hook() -> None:
    loop = DOCS.read_text(encoding="utf-8").split("## The loop")[1].split("```")[1]

    # "setup" and "teardown" are lines of their own; every hook stands where it is called, which is one place
    assert Counter(word for word in re.findall(r"\w+", loop) if word in HOOKS) == dict.fromkeys(HOOKS, 1)


def test_every_hook_says_when_it_runs() -> None:
    assert [hook for hook in HOOKS if not (inspect.getdoc(getattr(Callback, hook)) or "").endswith(".")] == []


# A recorded run


def recording(base: type, heard: list[tuple[Any, ...]], who: str) -> Any:
    """Returns an instance of a class that overrides every hook and notes what it hears."""

    def note(hook: str) -> Any:
        def method(self: Any, *given: Any, **payload: Any) -> None:
            heard.append((hook, who, list(payload), describe(payload), len(given)))

        return method

    return type(f"Recording{base.__name__}", (base,), {hook: note(hook) for hook in HOOKS})()


def describe(payload: dict[str, Any]) -> dict[str, Any]:
    plain = (int, str)
    return {name: value if isinstance(value, plain) else type(value).__name__ for name, value in payload.items()}


class TwoLosses(TaskModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses={name: model(batch["x"]).pow(2).mean() for name, model in self.models.items()})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        return {"size": self.models["a"](batch["x"]).pow(2).mean()}


class FailingTask(TwoLosses):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        raise ArithmeticError("no loss today")


def fit(task: TaskModule, callbacks: dict[str, Callback], *, folder: Path | None = None) -> MultiModelTrainer:
    from tests.trainer.test_trainer import reset_accelerate

    reset_accelerate()
    trainer = MultiModelTrainer(
        {name: {"zero_optimization": {"stage": stage}} for name, stage in (("a", 1), ("b", 2))},
        max_epochs=1,
        log_every=1,
        gradient_accumulation_steps=2,
        callbacks=callbacks,
        folder=folder,
        checkpoint=CheckpointPlan() if folder else None,
    )
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    net = functools.partial(nn.Linear, 3, 1)
    models = {
        "a": ModelSpec(build=net, optimizer=sgd, dtype=torch.float32),
        "b": ModelSpec(build=net, optimizer=sgd, dtype=torch.float32, gradient_accumulation_steps=1),
    }
    items = [{"x": torch.randn(3)} for _ in range(16)]  # 2 ranks x 2 windows x 2 micro-batches x 2 examples
    trainer.fit(task, models=models, data=TrainingData(train=items, validation=items[:8], batch_size=2))
    return trainer


def record(folder: Path) -> dict[str, Any]:
    """Returns what a task and two callbacks heard in this rank, and what the second of them hears of a failure."""
    heard: list[tuple[Any, ...]] = []
    late, early = (recording(Callback, heard, who) for who in ("late", "early"))
    late.order = 1
    fit(recording(TwoLosses, heard, "task"), {"late": late, "early": early}, folder=folder)

    failed: list[tuple[Any, ...]] = []
    try:
        fit(FailingTask(), {"witness": recording(Callback, failed, "witness")})
    except ArithmeticError as error:
        failed.append(("raised", str(error)))
    modes = Modes()
    fit(TwoLosses(), {"modes": modes})
    return {"heard": heard, "failed": failed, "modes": modes.seen}


class Modes(Callback):
    """Records whether the models are in training mode."""

    def __init__(self) -> None:
        self.seen: dict[str, set[bool]] = {}

    def note(self, hook: str, trainer: MultiModelTrainer) -> None:
        self.seen.setdefault(hook, set()).update(model.module.training for model in trainer.models.values())

    def on_validation_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self.note("on_validation_start", trainer)

    def on_validation_batch_end(self, trainer: MultiModelTrainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        self.note("on_validation_batch_end", trainer)

    def on_train_batch_start(self, trainer: MultiModelTrainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", trainer)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(record, folder, folder=folder, world_size=2)


def hooks_of(events: list[tuple[Any, ...]], who: str) -> list[str]:
    return [event[0] for event in events if event[1] == who]


def test_every_rank_hears_the_same(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["heard"] == ranks[1]["heard"]


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_called_as_often_as_the_table_says(ranks: list[dict[str, Any]], hook: str) -> None:
    assert TABLE[hook]["ranks"] == ("that raised" if hook == "on_exception" else "all")
    for rank in ranks:
        for who in ("task", "late", "early"):
            assert Counter(hooks_of(rank["heard"], who))[hook] == TIMES[TABLE[hook]["called"]], who


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "on_exception"])
def test_hook_is_given_what_the_table_says(ranks: list[dict[str, Any]], hook: str) -> None:
    events = [event for event in ranks[0]["heard"] if event[0] == hook]

    for _, who, names, _, positional in events:
        assert names == arguments(TABLE[hook]["task"])
        assert positional == (0 if who == "task" else 2)  # trainer and task


def test_table_is_in_the_order_of_first_calls(ranks: list[dict[str, Any]]) -> None:
    first_calls = list(dict.fromkeys(hooks_of(ranks[0]["heard"], "early")))

    assert first_calls == [hook for hook in TABLE if hook != "on_exception"]


def test_order_of_a_whole_run(ranks: list[dict[str, Any]]) -> None:
    validation = ["on_validation_start", *["on_validation_batch_end"] * 2, "on_validation_end"]
    backward = ["on_before_backward a", "on_after_backward a", "on_before_backward b", "on_after_backward b"]
    step_b = ["on_before_optimizer_step b", "on_after_optimizer_step b"]
    step_both = [f"on_{when}_optimizer_step {name}" for when in ("before", "after") for name in ("a", "b")]
    window = ["on_train_step_start"]
    for updates in (step_b, step_both):
        window += ["on_train_batch_start", *backward, *updates, "on_train_batch_end"]
    window += ["on_train_step_end"]
    expected = [
        "setup", "on_fit_start", *validation, "on_train_start", "on_train_epoch_start", *window, *window,
        "on_train_epoch_end", "on_save_start", "on_save_end", "on_train_end", *validation, "on_fit_end", "teardown",
    ]  # fmt: skip

    heard = [event for event in ranks[0]["heard"] if event[1] == "early"]
    assert [f"{hook} {values['name']}" if "name" in values else hook for hook, _, _, values, _ in heard] == expected


def test_task_hears_first_and_callbacks_by_their_order(ranks: list[dict[str, Any]]) -> None:
    heard = [event[1] for event in ranks[0]["heard"]]

    assert heard == ["task", "early", "late"] * (len(heard) // 3)


def test_values_count_as_the_table_says(ranks: list[dict[str, Any]]) -> None:
    values = [(hook, values) for hook, who, _, values, _ in ranks[0]["heard"] if who == "early"]

    assert [value["step"] for hook, value in values if hook == "on_train_step_start"] == [1, 2]
    assert [value["batch_idx"] for hook, value in values if hook == "on_train_batch_start"] == [0, 1, 0, 1]
    assert [value["epoch"] for hook, value in values if hook.startswith("on_train_epoch")] == [0, 0]
    assert {value["stage"] for hook, value in values if hook in ("setup", "teardown")} == {"fit"}
    assert {value["output"] for hook, value in values if hook == "on_train_batch_end"} == {"StepOutput"}


def test_failure_is_heard_before_the_teardown(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        *_, exception, teardown, raised = rank["failed"]
        assert (exception[0], exception[3]) == ("on_exception", {"exception": "ArithmeticError"})
        assert teardown[0] == "teardown"
        assert raised == ("raised", "no loss today")


def test_models_are_in_evaluation_mode_within_a_validation_only(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["modes"] == {
        "on_validation_start": {False},
        "on_validation_batch_end": {False},
        "on_train_batch_start": {True},
    }


# Refusals and errors, without a run


class Plain(TaskModule):
    pass


def caller(task: TaskModule | None = None, **callbacks: Callback) -> HookCaller:
    trainer: Any = SimpleNamespace(global_step=7)
    return HookCaller(trainer, task or Plain(), callbacks)


def test_unknown_hook_of_a_callback_is_refused_with_the_nearest_name() -> None:
    class Typo(Callback):
        def on_train_step_ends(self) -> None: ...

    with pytest.raises(TypeError, match=r"Typo\.on_train_step_ends is no hook .*did you mean on_train_step_end\?"):
        check_hook_names(Typo, base=Callback)


def test_unknown_hook_of_a_task_or_of_its_base_is_refused() -> None:
    class Base(TaskModule):
        def on_fit_begin(self) -> None: ...

    class Derived(Base):
        pass

    with pytest.raises(TypeError, match=r"Derived\.on_fit_begin is no hook .*did you mean on_fit_"):
        check_hook_names(Derived, base=TaskModule)


def test_name_unlike_any_hook_is_refused_with_all_of_them() -> None:
    class Odd(Callback):
        def on_zzz(self) -> None: ...

    with pytest.raises(TypeError, match=r"Odd\.on_zzz is no hook .*hooks are: setup, on_fit_start"):
        check_hook_names(Odd, base=Callback)


def test_callback_that_raises_is_named() -> None:
    class Broken(Callback):
        def on_train_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
            raise KeyError("lost")

    with pytest.raises(KeyError) as error:
        caller(quiet=Callback(), broken=Broken()).emit("on_train_start")

    assert error.value.__notes__ == ["raised by callback 'broken' (Broken) in on_train_start at step 7"]


def test_task_that_raises_in_a_hook_is_named() -> None:
    class Broken(TaskModule):
        def on_train_start(self) -> None:
            raise KeyError("lost")

    with pytest.raises(KeyError) as error:
        caller(Broken()).emit("on_train_start")

    assert error.value.__notes__ == ["raised by task in on_train_start at step 7"]


def test_lower_order_hears_first_and_ties_keep_the_configured_order() -> None:
    heard: list[str] = []

    class Named(Callback):
        def __init__(self, name: str, order: int) -> None:
            self.name, self.order = name, order

        def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
            heard.append(self.name)

    caller(last=Named("last", 100), b=Named("b", 0), a=Named("a", 0), first=Named("first", -1)).emit("on_fit_start")

    assert heard == ["first", "b", "a", "last"]


def test_hook_that_nobody_overrides_has_no_listener() -> None:
    assert caller(plain=Callback()).listeners["on_before_backward"] == []


def test_an_object_that_is_no_callback_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dict is no Callback; derive it from trainer\.Callback"):
        check_hook_names(dict, base=Callback)
