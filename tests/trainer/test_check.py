"""Checks of a whole configuration before anything is started."""

from pathlib import Path

import pytest

from trainer import check, trial
from trainer.compose import Request, compose_run, conf_dir
from trainer.config import find_name_problems
from trainer.targets import target_problems


def problems_of(*overrides: str) -> list[str]:
    """Returns what is wrong with the distill task on local names, so that no asset is looked for."""
    names = ("models.student.build.config.model_type=llama", "models.teacher.build.config.model_type=llama")
    groups = [f"model@models.{name}.build=causal_lm_from_config" for name in ("student", "teacher")]
    return problems_of_task(*groups, *names, *overrides)


def problems_of_task(*overrides: str) -> list[str]:
    composition = compose_run(Request(overrides=overrides, config_path=conf_dir()))
    assert composition.problems == []
    return check.problems(composition.cfg, composition.overrides)


def test_a_good_configuration_has_no_problem():
    assert problems_of() == []


def test_problems_of_all_kinds_come_at_once(tmp_path: Path):
    found = problems_of(
        "task._target_=tasks.distil.DistillTask",
        "callbacks.samples.promts=3",
        "callbacks.samples.max_new_tokens=many",
        "models.student.optimizer.lrr=2",
        "models.student.scheduler.total_stepss=3",
        "optimizer@models.teacher.optimizer=sgd",
        "trainer.max_steps=0",
        "trainer.gradient_accumulation_steps=4",
        "models.student.gradient_accumulation_steps=3",
        "models.student.dtype=bf16",
        f"data.train={tmp_path}/gone.jsonl",
        "data.validation_fraction=2",
        "data.collate=3",
        "mode=fitt",
        "models.student.plugin.zero_optimization.stag=2",
        "logger.wandb.project=???",
        "checkpoint.every=0",
        "checkpoint.keep_last=0",
        "checkpoint.keep_best=-1",
        "checkpoint.keep_every=0",
        "checkpoint.mode=mx",
    )

    expected = {
        "task._target_=tasks.distil.DistillTask": "did you mean distill?",
        "callbacks.samples.promts": "did you mean prompts?",
        "callbacks.samples.max_new_tokens=many": "must be a number",
        "models.student.optimizer.lrr": "did you mean lr?",
        "models.student.scheduler.total_stepss": "did you mean total_steps?",
        "models.teacher.optimizer is given": "choose optimizer@models.teacher.optimizer=null",
        "trainer.max_steps=0": "must be at least 1",
        "models.student.gradient_accumulation_steps=3": "must divide trainer.gradient_accumulation_steps=4",
        "models.student.dtype=bf16": "one of auto, float32, bfloat16, float16",
        f"data.train={tmp_path}/gone.jsonl": "no such file",
        "data.validation_fraction=2.0": "between 0 and 1",
        "data.collate=3": "must be a node with _target_",
        "mode=fitt": "did you mean fit?",
        "models.student.plugin.zero_optimization.stag": "stage",
        "logger.wandb.project is missing": "logger.wandb.project=...",
        "checkpoint.every=0": "must be at least 1",
        "checkpoint.keep_last=0": "must be at least 1",
        "checkpoint.keep_best=-1": "must be at least 0",
        "checkpoint.keep_every=0": "must be at least 1",
        "checkpoint.mode=mx": "must be one of min, max",
    }
    for start, text in expected.items():
        assert any(problem.startswith(start) and text in problem for problem in found), (start, found)
    assert len(found) == len(expected), found


def test_a_trainable_model_needs_an_optimizer():
    (problem,) = problems_of("optimizer@models.student.optimizer=null", "scheduler@models.student.scheduler=null")

    assert problem.startswith(
        "models.student.optimizer is missing, but models.student is trainable; "
        "add `- /optimizer@models.student.optimizer: adamw` to the task's defaults"
    )


def test_fitting_needs_an_end_and_a_model_to_train():
    off = (
        "models.student.trainable=false",
        "optimizer@models.student.optimizer=null",
        "scheduler@models.student.scheduler=null",
        "plugin@models.student.plugin=replicate",
    )
    found = problems_of(*off, "trainer.max_steps=null")

    assert len(found) == 2, found
    assert "trainer.max_steps and trainer.max_epochs are both missing" in found[0]
    assert "no model is trainable" in found[1]
    assert problems_of(*off, "trainer.max_steps=null", "mode=validate") == []


def test_a_users_module_that_fails_to_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_task.py").write_text("x = 1\n\n1 / 0\n")
    (tmp_path / "short_task.py").write_text("class Task:\n    def __init__(self, width): ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    broken = problems_of("task._target_=broken_task.Task")
    short = problems_of("task._target_=short_task.Tsak")
    needs = problems_of("task._target_=short_task.Task", "task.with=3")

    assert any("raised ZeroDivisionError" in problem and "broken_task.py:3" in problem for problem in broken)
    assert any("did you mean Task?" in problem for problem in short)
    assert "task.width is missing: short_task.Task needs it" in needs
    assert any(problem.startswith("task.with: short_task.Task has no such parameter") for problem in needs)


def test_a_users_module_that_ends_the_process_or_is_no_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ending_task.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "spoilt_task.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "ends_later.py").write_text("class Task:\n    def __init__(self):\n        raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)

    (ending,) = problems_of("task={_target_: ending_task.Task}")
    (spoilt,) = problems_of("task={_target_: spoilt_task.Task}")

    assert f"importing ending_task raised SystemExit: 0 ({tmp_path}/ending_task.py:3)" in ending
    assert f"raised SyntaxError: invalid syntax ({tmp_path}/spoilt_task.py:2)" in spoilt
    later = target_problems({"task": {"_target_": "ends_later.Task"}})
    assert later == [] and "raised SystemExit: 3" in trial._make("task", {"_target_": "ends_later.Task"})[1][0]


def test_words_of_hydra_are_held_to_what_they_may_be() -> None:
    found = problems_of(
        "+task._recursive_=abc",
        "+models.student.build._partial_=true",
        "+models.teacher.build._args_=[1]",
        "+models.student.optimizer._convert_=foo",
    )

    assert sorted(problem.partition(":")[0] for problem in found) == [
        "models.student.build._partial_=true",
        "models.student.optimizer._convert_=foo",
        "models.teacher.build._args_=[1]",
        "task._recursive_=abc",
    ]


def test_texts_and_switches_of_a_build_are_held_to_their_types() -> None:
    def words_of(*overrides: str) -> list[str]:
        return [problem.removeprefix("models.student.build.") for problem in problems_of(*overrides)]

    assert words_of("models.student.build.attn_implementation=5") == ["attn_implementation=5: must be a text"]
    assert words_of("models.student.build.attn_implementation=[sdpa]") == [
        "attn_implementation=['sdpa']: must be a text"
    ]
    assert words_of("models.student.build.attn_implementation=null") == []
    assert words_of("models.student.build.gradient_checkpointing=5.5") == [
        "gradient_checkpointing=5.5: must be true or false"
    ]
    (config,) = words_of("models.student.build.config=5")
    assert config == "config=5: must be a folder or hub name, or a mapping with model_type"
    listed = words_of("model@models.student.build=causal_lm", "models.student.build.name=[a]")
    assert [text for text in listed if text.startswith("name")] == ["name=['a']: must be a text"]


def test_a_vocabulary_smaller_than_the_tokenizers_is_found_where_both_are_at_hand() -> None:
    sft = ("task=sft", "model@models.student.build=tiny_llama", "data.tokenizer=embedded:bpe-4k")

    (problem,) = problems_of_task(*sft, "models.student.build.config.vocab_size=100")

    assert problem.startswith("models.student knows 100 token ids, but its data's tokenizer gives ids up to 4095")
    assert problems_of_task(*sft) == []


OWN = """
from __future__ import annotations
from typing import NotRequired, Required, TypedDict, Unpack

class Keys(TypedDict):
    width: int
    depth: NotRequired[int]

class Other(TypedDict, total=False):
    width: Required[int]
    depth: int

def make(name: str, bias: bool = False, size: int | str = 1, **keys: Unpack[Keys]): ...

def make_other(**keys: Unpack[Other]): ...

class M:
    @classmethod
    def make(cls, width: int): ...

    def __call__(self, *, bias: bool): ...

called = M()
"""


def test_a_users_builder_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_builder.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def of(target: str, /, **keys: object) -> list[str]:
        node = {"_target_": f"own_builder.{target}", **keys}
        return [
            problem.removeprefix("models.m.build.") for problem in target_problems({"models": {"m": {"build": node}}})
        ]

    assert of("make", name="a", width=1) == of("make", name="a", width=1, depth=2, size="big") == []
    assert of("make", name=5, bias=5, width="w", size=[]) == [
        "name=5: must be a text",
        "bias=5: must be true or false",
        "width=w: must be a number",
        "size=[]: must be a number or a text",
    ]
    for name in ("make_other", "M.make"):
        assert of(name, width=3) == [] and of(name) == [f"width is missing: own_builder.{name} needs it"]
    assert of("called", bias=True) == [] and of("called", bias=2) == ["bias=2: must be true or false"]


def test_what_the_trainer_gives_itself_may_not_be_given():
    (problem,) = problems_of("models.student.optimizer.params=3")

    assert problem == "models.student.optimizer.params: the trainer gives this one itself; drop it"


def test_what_constructors_refuse_is_known_before_anything_is_started():
    found = problems_of(
        "task.terms.forward_kl.weight=-1",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=0",
        "logger.wandb.mode=sometimes",
        "models.student.optimizer.lr=0.1",
        "models.student.optimizer.betas=[2.0,3.0]",
    )

    assert "task.terms.forward_kl.weight is -1; it must be at least 0" in found
    assert "callbacks.early_stopping.patience=0 must be at least 1" in found
    assert any(problem.startswith("logger.wandb.mode=sometimes") for problem in found)
    assert any(
        problem.startswith("models.student.optimizer: torch.optim.AdamW raised ValueError: Invalid beta parameter")
        for problem in found
    )
    assert len(found) == 4, found


@pytest.mark.parametrize("rate", ["-1", "nan", "inf"])
def test_a_learning_rate_is_finite_and_not_negative(rate: str):
    (problem,) = problems_of(f"models.student.optimizer.lr={rate}")

    assert problem == f"models.student.optimizer.lr={rate}: must be a finite number of at least 0"


def test_settings_of_an_optimizer_are_finite_and_switches_are_true_or_false():
    (problem,) = problems_of("models.student.optimizer.weight_decay=inf")
    assert problem == "models.student.optimizer.weight_decay=inf: must be a finite number"

    (problem,) = problems_of("models.student.build.gradient_checkpointing=0.5")
    assert problem == "models.student.build.gradient_checkpointing=0.5: must be true or false"


def test_a_schedule_that_cannot_be_is_refused_before_models_are_built():
    (problem,) = problems_of("models.student.scheduler.warmup_steps=-3")

    assert problem.startswith("models.student.scheduler: trainer.schedules.cosine raised ValueError: warmup_steps must")


def test_objects_of_another_kind_and_hooks_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "odd_parts.py").write_text(
        "from trainer import Callback, TaskModule\n"
        "class Typo(Callback):\n    def on_fit_strat(self, trainer, task): ...\n"
        "class Bug(TaskModule):\n    def __init__(self, routes=None): 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    found = problems_of(
        "callbacks.odd._target_=collections.OrderedDict",
        "callbacks.typo._target_=odd_parts.Typo",
        "logger.odd._target_=collections.OrderedDict",
        "task._target_=odd_parts.Bug",
        *(f"~task.{key}" for key in ("student", "teacher", "combine", "keep_teachers", "fused", "terms")),
        *(f"~task.{key}" for key in ("cache", "length_edges", "preflight")),
    )

    assert "callbacks.odd._target_=collections.OrderedDict: makes no trainer.Callback; derive from it" in found
    assert any("Typo.on_fit_strat is no hook" in problem and "on_fit_start" in problem for problem in found)
    assert any(problem.startswith("logger.odd._target_=collections.OrderedDict: makes no") for problem in found)
    assert any(p.startswith("task: odd_parts.Bug raised ZeroDivisionError") and "odd_parts.py:5" in p for p in found)
    assert len(found) == 4, found


def test_a_role_that_no_model_has_is_refused_before_models_are_built():
    (problem,) = problems_of("task.student=studnet")

    assert problem == "task.student=studnet: models has no studnet, only student, teacher"


def test_plans_of_updates_are_held_against_the_run_and_the_role() -> None:
    found = problems_of_task(
        "task=disjoint",
        "models.small.update_every=0",
        "models.large.start_step=41",
        "trainer.max_steps=40",
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "models.small.update_every=0",
        "models.large.start_step=41",
    ]
    (frozen,) = problems_of("models.teacher.freeze_after=3")
    assert "models.teacher is frozen" in frozen and "freeze_after mean nothing" in frozen


def test_a_models_own_data_are_held_to_the_rules_of_the_shared_ones(tmp_path: Path) -> None:
    own = ["task=disjoint", "data@models.large.data=text"]
    found = problems_of_task(
        *own, f"models.large.data.train={tmp_path}/gone.txt", "models.large.data.batch_size=0",
        "models.large.data.validation_fraction=2",
    )  # fmt: skip

    expected = ("models.large.data.batch_size=0", "models.large.data.validation_fraction=2", "models.large.data.train=")
    assert len(found) == 3
    assert all(any(problem.startswith(start) for problem in found) for start in expected)


def test_own_data_are_refused_where_the_models_must_read_the_same_examples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    for model, ask in (
        ("student", problems_of),
        ("small", lambda *keys: problems_of_task("task=mutual", *keys)),
        ("query", lambda *keys: problems_of_task("task=dual_encoder", *keys)),
    ):
        (problem,) = ask(f"data@models.{model}.data=text", f"models.{model}.data.train={tmp_path}/a.txt")
        assert problem.startswith(f"models.{model}.data: ") and "read the same examples" in problem


def test_packed_rows_are_refused_where_a_row_must_hold_one_example(tmp_path: Path) -> None:
    for task in ("distill_sequence", "distill_unaligned", "gkd"):
        (problem,) = problems_of_task(f"task={task}", "data.packing=true")
        assert problem.startswith("data.packing=true: ") and problem.endswith("set data.packing=false"), task
        assert problems_of_task(f"task={task}") == []
    assert problems_of_task("task=sft", "data.packing=true") == []


def test_weights_to_freeze_are_held_against_the_models_names() -> None:
    found = problems_of_task(
        "task=mutual", "models.small.freeze=['model.layers.2.*', 'model.layers.1.*']", "models.large.freeze=['*']"
    )

    assert [problem.partition(":")[0].partition("=")[0] for problem in found] == [
        "models.small.freeze",
        "models.large.freeze",
    ]
    assert "'model.layers.2.*' matches no parameter" in found[0] and "freezes every parameter" in found[1]
    assert problems_of_task("task=mutual", "models.small.freeze=[lm_head.weight]") == []


def test_weights_to_freeze_mean_nothing_on_a_model_that_is_frozen_as_a_whole() -> None:
    (whole,) = problems_of("models.teacher.freeze=[nonsense]")
    assert whole.startswith(
        "models.teacher.freeze=['nonsense']: models.teacher is frozen as a whole (trainable: false)"
    )
    for task in ("grpo", "reward"):  # a preset's own follow `trainable`
        role = {"grpo": "actor"}.get(task, task)
        request = Request(overrides=(f"task={task}", f"models.{role}.trainable=false"), config_path=conf_dir())
        assert list(compose_run(request).cfg.models[role].freeze) == []
    (nested,) = problems_of("models.student.freeze=[['model.*']]")
    assert nested.startswith("models.student.freeze=[['model.*']]: must be a list of texts")


def test_models_of_one_loss_are_refused_with_paces_of_their_own() -> None:
    for ask, one, other in (
        (["task=dual_encoder"], "query", "document"),
        (["experiment=distill_states"], "student", "projection"),
    ):
        (problem,) = problems_of_task(
            *ask, "trainer.gradient_accumulation_steps=4", f"models.{other}.gradient_accumulation_steps=2"
        )
        assert problem.startswith(
            f"models.{one}.gradient_accumulation_steps=4 and models.{other}.gradient_accumulation_steps=2: one loss"
        )


def test_names_of_models_that_mean_something_else_are_refused() -> None:
    found = find_name_problems(dict.fromkeys(["student", "joint", "reference", "b/c", "small-2"], True))
    assert find_name_problems({"policy": True, "reference": False}) == []
    assert [problem.partition(":")[0] for problem in found] == ["models.joint", "models.reference", "models.b/c"]


def test_a_tokenizer_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    found = problems_of_task(
        "task=disjoint", "data.tokenizer=embedded:bpe-4kk", "data@models.large.data=chat",
        f"models.large.data.tokenizer={tmp_path}/gone",
    )  # fmt: skip
    assert len(found) == 2
    assert found[0].startswith("data.tokenizer=embedded:bpe-4kk: ") and "bpe-4k" in found[0]
    assert found[1].startswith("models.large.data.tokenizer=") and "no such folder" in found[1]
