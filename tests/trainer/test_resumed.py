"""The configuration of a resumed run: the checkpoint's own, and over it what the command line says."""

from pathlib import Path

import pytest

from tests.trainer.saved_runs import compose_with, make_run, write_manifest
from trainer import kept
from trainer.compose import Composition
from trainer.saved import propose_folder, resolved
from trainer.saving.checkpoints import name_of


def changes(composition: Composition) -> list[str]:
    assert composition.problems == []
    whole = composition.resumption.candidates[0]
    return kept.problems(composition.saved, composition.cfg, checkpoint=whole, step=4, saved_ranks=1, ranks=1)


def test_the_checkpoints_configuration_is_the_start_and_the_command_line_lies_over_it(run: Path) -> None:
    expected = resolved(compose_with("models.student.optimizer.lr=0.0003").cfg)

    plain = compose_with("resume=run")
    assert plain.problems == []
    assert {**resolved(plain.cfg), "resume": None} == expected
    assert (plain.cfg.resume, propose_folder(plain.hydra)) == ("run", run)
    composition = compose_with(
        "resume=auto",
        "hydra.run.dir=run",
        "trainer.max_steps=40",
        "~callbacks.progress",
        "callbacks.samples.order=3",
        "models.student.plugin.zero_optimization.overlap_comm=true",
        "callbacks.mine={_target_: mine.Callback}",
    )

    cfg = composition.cfg
    assert changes(composition) == []
    assert (cfg.models.student.optimizer.lr, cfg.trainer.max_steps) == (0.0003, 40)
    assert "progress" not in cfg.callbacks
    assert (cfg.callbacks.samples.order, cfg.callbacks.mine._target_) == (3, "mine.Callback")
    assert cfg.models.student.plugin.zero_optimization.overlap_comm is True
    assert composition.hydra.hydra.job.name == "distill"


def test_choices_from_groups_replace_their_nodes(run: Path) -> None:
    fresh = compose_with("plugin@models.teacher.plugin=zero3_inference").cfg

    composition = compose_with(
        "task=distill",
        "resume=run",
        "plugin@models.teacher.plugin=zero3_inference",
        "logger=[jsonl]",
        "callbacks=[default,early_stopping]",
        "launch=default",
        "optimizer@models.student.optimizer=cpu_adamw",
        "models.student.optimizer.lr=0.0003",
    )

    cfg = composition.cfg
    assert changes(composition) == []
    assert list(cfg.logger) == ["jsonl"]
    assert {"progress", "early_stopping", "samples"} <= set(cfg.callbacks)
    assert cfg.models.teacher.plugin == fresh.models.teacher.plugin
    assert cfg.models.student.plugin.zero_optimization.stage == 2
    assert cfg.models.student.optimizer._target_.endswith("DeepSpeedCPUAdam")
    assert "optimizer@models.student.optimizer=cpu_adamw" in composition.overrides


def test_null_is_none_for_every_group_of_a_resumed_run(run: Path) -> None:
    composition = compose_with("resume=run", "logger=null", "callbacks=null", "scheduler@models.student.scheduler=null")

    (problem,) = changes(composition)
    assert (composition.cfg.logger, composition.cfg.callbacks) == ({}, {})
    assert composition.cfg.models.student.scheduler is None
    assert problem.startswith("models.student.scheduler=null: the run that is resumed has trainer.schedules.cosine;")


def test_choices_for_the_whole_tree_count_with_what_they_change(run: Path) -> None:
    make_run(Path("mixed"), "experiment=distill_mixed", "trainer.log_every=7")

    fast = compose_with("resume=run", "debug=fast", "trainer.max_steps=50")
    same = compose_with("resume=mixed", "experiment=distill_mixed")
    other = compose_with("resume=run", "experiment=distill_mixed")

    assert changes(fast) == changes(same) == []
    assert (fast.cfg.trainer.val_every, fast.cfg.trainer.max_steps) == (1, 50)
    assert fast.cfg.models.student.optimizer.lr == 0.0003
    assert same.cfg.trainer.log_every == 7
    assert [problem.partition(":")[0] for problem in changes(other)] == [
        "task.terms.forward_kl.weight=0.5",
        "task.terms.cross_entropy.weight=0.5",
    ]


def test_another_task_is_refused(run: Path) -> None:
    (problem,) = compose_with("resume=run", "task=mutual").problems

    assert problem == "task=mutual: the run that is resumed trains distill; drop it, or start a new run"


@pytest.fixture
def user_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of a user's own, beside the working folder's files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    head = (
        "# @package _global_\ndefaults: [/data: text, /model@models.m.build: module, /plugin@models.m.plugin: zero1, "
    )
    rest = "_self_]\ntask: {_target_: mine.Task, width: 3}\ndata: {train: '${oc.env:DATA}'}\n"
    (tmp_path / "conf" / "task" / "mine.yaml").write_text(head + "/optimizer@models.m.optimizer: adamw, " + rest)
    return tmp_path / "conf"


def test_a_users_own_task_is_known_from_the_checkpoint(user_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "first.txt")
    run = make_run(Path("own"), "task=mine", "models.m.build._target_=mine.model", config_dir=user_conf)
    assert "first.txt" not in (run / "config.yaml").read_text()
    monkeypatch.setenv("DATA", "moved.txt")

    plain = compose_with("resume=own", "models.m.optimizer.lr=0.0001", "task=mine")
    with_groups = compose_with("resume=own", "plugin@models.m.plugin=zero2", config_dir=user_conf)
    (lost,) = compose_with("resume=own", "plugin@models.m.plugin=zero2").problems

    assert plain.cfg.data.train == "moved.txt", "a value from the environment stays a reference"
    assert changes(plain) == []
    assert with_groups.cfg.models.m.plugin.zero_optimization.stage == 2
    assert with_groups.cfg.models.m.build._target_ == "mine.model"
    assert "there is no mine, the task of the run that is resumed, in group task" in lost and "--config-dir" in lost


def test_keys_of_choices_that_only_the_saved_run_made_can_be_set(run: Path) -> None:
    make_run(Path("stopping"), "callbacks=[default,early_stopping]", "logger=[tensorboard]")

    composition = compose_with("resume=stopping", "callbacks.early_stopping.patience=9", "~logger.tensorboard")

    assert composition.problems == []
    assert composition.cfg.callbacks.early_stopping.patience == 9
    assert composition.cfg.logger == {}


def test_all_misspelt_words_come_at_once(run: Path) -> None:
    problems = compose_with(
        "resume=run",
        "trainer.max_stps=3",
        "plugin@models.studnet.plugin=zero1",
        "plugin@models.teacher.plugin=zero33",
        "models.student.optimizr.lr=3",
        "faster",
        "+trainer.speed=9",
    ).problems

    expected = ("max_steps?", "plugin@models.student.plugin?", "zero3?", "models.student.optimizer.lr?", "key=value")
    assert len(problems) == 6, problems
    for text in (*expected, "trainer.speed: there is no such key"):
        assert any(text in problem for problem in problems), (text, problems)


def test_a_missing_checkpoint_comes_with_the_other_problems(run: Path) -> None:
    with_task = compose_with("task=distill", "resume=rum", "trainer.max_stps=3").problems
    without = compose_with("resume=rum", "models.line.dtype=float32", "faster").problems

    assert len(with_task) == 2, with_task
    assert [problem.partition(":")[0] for problem in without] == ["faster", "resume=rum"], "its task is not known"


def test_a_saved_configuration_may_be_the_root(run: Path) -> None:
    root = run.absolute()

    goes_on = compose_with("resume=run", "trainer.max_steps=30", config_path=root)
    (problem,) = compose_with("resume=run", "plugin@models.student.plugin=zero1", config_path=root).problems
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("log_every: 4", "log_every: 5"))
    edited = compose_with("resume=run", "trainer.max_steps=30", config_path=root)

    assert (goes_on.problems, goes_on.warnings, goes_on.cfg.trainer.max_steps) == ([], [], 30)
    assert goes_on.resumption.run_folder == run
    assert "saved configuration has no groups" in problem
    assert (edited.problems, edited.cfg.trainer.log_every) == ([], 4)
    assert edited.warnings == [
        "run/config.yaml: trainer.log_every: not used; a resumed run starts from the configuration in its checkpoint"
    ]


def test_folders_and_paths_may_be_references(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "run")

    auto = compose_with("resume=auto", "hydra.run.dir='${oc.env:WHERE}'")
    path = compose_with("resume='${oc.env:WHERE}'", "hydra.run.dir='elsewhere/a,b=c'")
    off = compose_with("resume=null", "hydra.run.dir=run")

    assert (auto.problems, auto.resumption.goes_on) == ([], True)
    assert (path.problems, path.resumption.run_folder) == ([], Path("elsewhere/a,b=c"))
    assert propose_folder(path.hydra) == Path("elsewhere/a,b=c")
    assert off.resumption is None


def test_the_last_word_counts(run: Path) -> None:
    composition = compose_with("resume=rum", "hydra.run.dir=new", "resume=auto", "hydra.run.dir=run")

    assert composition.problems == []
    assert composition.resumption.candidates[0].name == name_of(6)


def test_a_file_that_is_no_configuration_is_named(run: Path) -> None:
    path = run / "checkpoints" / name_of(6)
    (path / "config.yaml").write_text("a: 1\n")
    write_manifest(path, step=6, world_size=1)

    (problem,) = compose_with("resume=run").problems

    assert problem.startswith("run/checkpoints/step-00000006/config.yaml: is no configuration of a run (KeyError")


def test_a_look_at_a_run_leaves_its_folder_alone(run: Path) -> None:
    validate = compose_with("resume=run/checkpoints/best", "mode=validate")
    export = compose_with("resume=run", "mode=export", "hydra.run.dir=run")

    assert validate.problems == export.problems == []
    assert [path.name for path in validate.resumption.candidates] == [name_of(4)]
    assert validate.resumption.goes_on is False
    assert validate.resumption.run_folder == propose_folder(validate.hydra)
    assert propose_folder(validate.hydra).parent == Path("outputs/distill")
    assert (export.resumption.run_folder, export.resumption.goes_on) == (run, True), "it was asked for"


def test_the_same_command_goes_on_though_what_it_deletes_and_adds_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("~callbacks.progress", "+callbacks.mine={_target_: trainer.callbacks.ModelSummary, max_depth: 3}")
    make_run(tmp_path / "run", *command)

    again = compose_with(*command, "hydra.run.dir=run", "resume=auto")

    assert again.problems == []
    assert again.warnings == ["~callbacks.progress: it is not there in the run"]
    assert "progress" not in again.cfg.callbacks and again.cfg.callbacks.mine.max_depth == 3
