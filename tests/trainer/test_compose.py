"""Composing: what is refused, in which words, and what is let through."""

from pathlib import Path

import pytest

from trainer.compose import Composition, Request, compose_run, conf_dir
from trainer.saved import check_folder, claim_folder, propose_folder, resolved, save_config
from trainer.words import nearest


def compose_with(*overrides: str, config_dir: Path | None = None) -> Composition:
    return compose_run(Request(overrides=overrides, config_path=conf_dir(), config_dir=config_dir))


def test_default_configuration_composes():
    composition = compose_with()

    assert composition.problems == []
    assert composition.cfg.task._target_ == "tasks.distill.DistillTask"
    assert "hydra" not in composition.cfg


def test_all_problems_of_the_command_line_come_at_once_with_the_nearest_name():
    problems = compose_with(
        "task=distil",
        "trainer.max_stps=3",
        "trainer.val_every=often",
        "plugin@models.student.plugin=zero9",
        "plugin@models.studnet.plugin=zero1",
        "pluging@models.student.plugin=zero1",
        "logger=[jsonl,wnadb]",
        "models.studnet.build.name=org/small",
        "lr=3",
        "data.train=a=b.txt",
        "data.tokenizer=a,b",
        "faster",
        "+trainer.speed=9",
    ).problems

    expected = {
        "task=distil": "did you mean distill?",
        "trainer.max_stps=3": "did you mean trainer.max_steps?",
        "trainer.val_every=often": "could not be converted to Integer",
        "plugin@models.student.plugin=zero9": "one of file, replicate, zero0, zero1",
        "plugin@models.studnet.plugin=zero1": "did you mean plugin@models.student.plugin?",
        "pluging@models.student.plugin=zero1": "did you mean plugin?",
        "logger=[jsonl,wnadb]": "did you mean wandb?",
        "models.studnet.build.name=org/small": "did you mean models.student.build.name?",
        "lr=3": "did you mean models.student.optimizer.lr?",
        "data.train=a=b.txt": """quotes: data.train='"a=b.txt"'""",
        "data.tokenizer=a,b": "need -m",
        "faster": "not of the form key=value",
        "trainer.speed": "there is no such key",
    }
    assert len(problems) == len(expected)
    for override, text in expected.items():
        assert any(problem.startswith(f"{override}:") and text in problem for problem in problems), (override, problems)


def test_a_key_of_a_model_that_is_not_there_says_how_one_is_added():
    (problem,) = compose_with("models.judge.trainable=false").problems

    assert "the models are student, teacher, and another one is added by +model@models.judge.build=" in problem


def test_a_choice_for_no_model_names_those_that_there_are():
    (problem,) = compose_with("plugin=zero2").problems

    assert "plugin@models.student.plugin or plugin@models.teacher.plugin" in problem or (
        "plugin@models.teacher.plugin or plugin@models.student.plugin" in problem
    )


def test_a_mapping_sets_several_keys_at_once():
    composition = compose_with("task={_target_: mine.Task, width: 3}", "callbacks.mine={_target_: mine.Callback}")

    assert composition.problems == []
    assert (composition.cfg.task._target_, composition.cfg.task.width) == ("mine.Task", 3)
    assert composition.cfg.callbacks.mine == {"_target_": "mine.Callback"}


def test_keys_that_an_object_may_take_need_no_plus():
    composition = compose_with(
        "models.student.optimizer.fused=true",
        "models.student.plugin.zero_optimization.overlap_comm=true",
        "task.temperature=2",
        "callbacks.samples.order=3",
        "data.collate._target_=my.Collate",
        "data.collate.width=3",
    )

    assert composition.problems == []
    assert composition.cfg.models.student.optimizer.fused is True
    assert composition.cfg.models.student.plugin.zero_optimization.overlap_comm is True
    assert composition.cfg.data.collate == {"_target_": "my.Collate", "width": 3}


def test_null_is_none_for_every_group():
    composition = compose_with(
        "logger=null", "callbacks=null", "optimizer@models.student.optimizer=null", "experiment=null"
    )

    assert composition.problems == []
    assert composition.cfg.logger == {}
    assert composition.cfg.callbacks == {}, "not even those that the task lists"
    assert composition.cfg.models.student.optimizer is None


def test_a_key_below_null_says_what_to_choose_first():
    (problem,) = compose_with("models.teacher.optimizer.lr=1").problems

    assert "models.teacher.optimizer is null" in problem
    assert "optimizer@models.teacher.optimizer=" in problem


def test_experiment_and_debug_lie_over_the_task():
    cfg = compose_with("experiment=distill_mixed", "debug=fast").cfg

    assert cfg.task.terms.cross_entropy.weight == 0.5
    assert cfg.trainer.max_steps == 2


@pytest.fixture
def user_conf(tmp_path: Path) -> Path:
    """Returns a conf folder with one good task and one with mistakes."""
    (tmp_path / "task").mkdir()
    (tmp_path / "experiment").mkdir()
    head = "# @package _global_\ndefaults: [/data: text, /model@models.m.build: causal_lm, /plugin@models.m.plugin: "
    (tmp_path / "task" / "mine.yaml").write_text(head + "zero1, _self_]\ntask: {_target_: mine.Task}\n")
    wrong = "zero1, _self_]\ntask: {_target_: mine.Task}\nmodels: {m: {trainabel: true, max_grad_norm: big}}\n"
    (tmp_path / "task" / "wrong.yaml").write_text(head + wrong)
    (tmp_path / "task" / "lost.yaml").write_text(head + "zeroo1, _self_]\n")
    (tmp_path / "task" / "broken.yaml").write_text("a: [1\nb: 2\n")
    (tmp_path / "experiment" / "wrong.yaml").write_text("# @package _global_\ntrainer: {max_step: 3}\n")
    return tmp_path


def test_a_users_folder_brings_tasks(user_conf: Path):
    composition = compose_with("task=mine", "data.train=x.txt", config_dir=user_conf)

    assert composition.problems == []
    assert composition.cfg.models.m.plugin.zero_optimization.stage == 1
    assert str(propose_folder(composition.hydra)).startswith("outputs/mine/")


def test_a_users_file_with_the_name_of_ours_is_not_silently_left_out(user_conf: Path):
    (user_conf / "task" / "distill.yaml").write_text("# @package _global_\ntask: {_target_: mine.Task}\n")

    (problem,) = compose_with(config_dir=user_conf).problems

    assert "task/distill is one of the trainer's own" in problem


def test_every_wrong_entry_of_every_file_is_named_with_its_path(user_conf: Path):
    problems = compose_with("task=wrong", "experiment=wrong", "trainer.max_stps=1", config_dir=user_conf).problems

    assert len(problems) == 4, problems
    expected = {
        "task/wrong.yaml: models.m.trainabel": "did you mean models.m.trainable?",
        "task/wrong.yaml: models.m.max_grad_norm": "could not be converted to Float",
        "experiment/wrong.yaml: trainer.max_step:": "did you mean trainer.max_steps?",
        "trainer.max_stps=1": "did you mean trainer.max_steps?",
    }
    for start, text in expected.items():
        assert any(start in problem and text in problem for problem in problems), (start, problems)


@pytest.mark.parametrize(("task", "text"), [("lost", "did you mean zero1?"), ("broken", "line 2")])
def test_a_file_that_cannot_be_read_is_named(user_conf: Path, task: str, text: str):
    (problem,) = compose_with(f"task={task}", config_dir=user_conf).problems

    assert f"task/{task}.yaml: " in problem
    assert text in problem


def test_missing_folders_and_files_are_refused(tmp_path: Path):
    (problem,) = compose_run(Request(config_path=tmp_path / "gone")).problems
    assert "--config-path" in problem
    (problem,) = compose_run(Request(config_path=conf_dir(), config_dir=tmp_path / "gone")).problems
    assert "--config-dir" in problem
    (problem,) = compose_run(Request(config_path=conf_dir(), config_name="confog")).problems
    assert "did you mean config?" in problem


def test_a_saved_configuration_composes_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PROJECT", "secret")
    monkeypatch.chdir(tmp_path)
    first = compose_with(
        "logger.wandb.project=${oc.env:PROJECT}", "logger.wandb.group=${logger.wandb.project}", "seed=7"
    )
    (tmp_path / "run").mkdir()

    path = save_config(first.cfg, tmp_path / "run")
    again = compose_run(Request(config_path=tmp_path / "run"))

    text = path.read_text()
    assert text.startswith("# python -m trainer --config-path=run --config-name=config\n")
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert again.problems == []
    assert resolved(again.cfg) == resolved(first.cfg)
    assert again.cfg.logger.wandb.group == "secret"
    assert propose_folder(again.hydra).parent == Path("outputs/distill")
    assert (
        compose_run(Request(config_path=tmp_path / "run", overrides=("trainer.max_steps=3",))).cfg.trainer.max_steps
        == 3
    )


def test_group_choices_on_a_saved_configuration_are_refused_with_a_hint(tmp_path: Path):
    save_config(compose_with().cfg, tmp_path)

    problems = compose_run(
        Request(config_path=tmp_path, overrides=("plugin@models.student.plugin=zero1", "logger=null"))
    ).problems

    assert all("saved configuration has no groups" in problem for problem in problems)
    assert len(problems) == 2
    assert "~logger.wandb" in problems[1]


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_reason(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").touch()

    assert check_folder(tmp_path / "new" / "run") == []
    assert "is a file; name a folder" in check_folder(tmp_path / "file" / "run")[0]
    assert "holds the files of an earlier run" in check_folder(tmp_path / "taken")[0]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # a read-only mount: root ignores modes
    assert "cannot be written to" in check_folder(tmp_path / "run")[0]


def test_a_taken_folder_is_not_used_again(tmp_path: Path):
    name = "2026-01-02_03-04-05-000006"

    first = claim_folder(tmp_path / "task" / name)
    (first / "run.log").touch()
    second = claim_folder(tmp_path / "task" / name)

    assert first.name == name
    assert second.parent == first.parent
    assert second.name != name
    assert claim_folder(second) == second, "an empty one is taken as it is"


@pytest.mark.parametrize(
    ("word", "near"), [("trainer.max_stps", "trainer.max_steps"), ("max_steps", "trainer.max_steps"), ("qqq", None)]
)
def test_nearest_looks_at_the_whole_key_and_at_its_end(word: str, near: str | None):
    assert nearest(word, ["trainer.max_steps", "trainer.val_every", "seed"]) == near


@pytest.mark.parametrize("value", ["${nope.x}", "${trainer.max_steps.x}"])
def test_a_reference_that_leads_nowhere_is_a_problem_of_its_key_and_stops_further_checks(value: str) -> None:
    composition = compose_with("task=dual_encoder", f"data.train.source={value}")

    assert composition.cfg is None
    assert [problem.partition(":")[0] for problem in composition.problems] == [
        f"data.train.source={value}",
        "data.validation.source=${..train.source}",
    ]


def test_a_model_takes_data_of_its_own_with_keys_that_its_node_does_not_list() -> None:
    composition = compose_with(
        "data@models.student.data=definitions",
        "models.student.data.train.source=pairs.jsonl",
        "models.student.data.batch_size=3",
        "models.student.data.train.other=1",
    )

    assert composition.problems == []
    data = composition.cfg.models.student.data
    assert (data.train.source, data.validation.source, data.batch_size) == ("pairs.jsonl", "pairs.jsonl", 3)
    assert data.train.other == 1
    assert composition.cfg.models.teacher.data is None


@pytest.mark.parametrize(
    ("words", "num_globs"),
    [
        ((), 3),
        (("models.actor.build.name=org/other",), 0),
        (("model@models.actor.build=tiny_llama",), 0),
        (("models.actor.freeze=[]",), 0),
        (("models.actor.lora.r=8",), 0),
        (("models.actor.build.name=org/other", "models.actor.freeze=[a.*]"), 1),
    ],
)
def test_layers_that_a_preset_freezes_are_those_of_its_own_model(words: tuple[str, ...], num_globs: int) -> None:
    composition = compose_run(Request(overrides=("task=grpo", *words), config_path=conf_dir()))

    assert composition.problems == [] and composition.cfg is not None
    assert len(composition.cfg.models.actor.freeze) == num_globs


def test_a_missing_value_that_others_refer_to_is_told_once() -> None:
    composition = compose_run(Request(overrides=("experiment=ppo_reward_model",), config_path=conf_dir()))

    assert composition.problems == ["models.reward.build.name is missing; give it: models.reward.build.name=..."]


def test_a_model_without_a_build_has_that_of_the_model_that_it_starts_from() -> None:
    cfg = compose_with("task=dpo", "model@models.policy.build=small_llama", "data.tokenizer=embedded:bpe-4k").cfg

    assert cfg.models.reference.build == cfg.models.policy.build
    assert cfg.models.reference.build.config.hidden_size == cfg.models.policy.build.config.hidden_size > 0
    chosen = compose_with("task=dpo", "model@models.reference.build=small_llama").cfg
    assert chosen.models.reference.build != chosen.models.policy.build
