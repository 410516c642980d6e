"""Which checkpoint a run goes on from: what the words and paths of `resume=` stand for, and what is refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import CODE, TASK, trainer
from tests.trainer.saved_runs import compose_with, damage, make_run
from trainer import resume
from trainer.compose import Request, compose_run
from trainer.config import ConfigError
from trainer.saved import check_folder, claim_folder, config_text, is_attempt, lock_folder, propose_folder, save_config
from trainer.saving.checkpoints import Resumption, name_of

ROOT = Path(__file__).parents[2]


def steps_of(found: resume.Found) -> list[int]:
    assert found.problems == []
    assert found.resumption is not None
    return [int(path.name.removeprefix("step-")) for path in found.resumption.candidates]


# Which checkpoint -----------------------------------------------------------------------------------------------------


def test_words_stand_for_checkpoints_of_the_folder_that_is_given(run: Path) -> None:
    for word, expected in (("auto", [6, 4, 2]), ("last", [6, 4, 2]), ("best", [4, 6, 2])):
        found = resume.find(word, run)
        assert steps_of(found) == expected, word
        assert (found.resumption.run_folder, found.resumption.goes_on, found.warnings) == (run, True, [])


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("run", [6, 4, 2]),
        ("run/", [6, 4, 2]),
        ("run/checkpoints", [6, 4, 2]),
        ("run/checkpoints/step-00000004", [4]),
        ("run/checkpoints/last", [6]),
        ("run/checkpoints/best", [4]),
        ("linked", [6, 4, 2]),
        ("one", [2]),
    ],
)
def test_a_path_is_a_run_its_checkpoints_or_one_of_them(run: Path, path: str, steps: list[int]) -> None:
    Path("linked").symlink_to("run")
    Path("one").symlink_to("run/checkpoints/step-00000002")

    here, elsewhere = resume.find(path, None), resume.find(path, Path("new"))
    back = resume.find(path, run.absolute())

    assert steps_of(here) == steps_of(elsewhere) == steps
    assert (here.resumption.run_folder.resolve(), here.resumption.goes_on) == (run.resolve(), True)
    assert (elsewhere.resumption.run_folder, elsewhere.resumption.goes_on) == (Path("new"), False)
    assert back.resumption.goes_on, "the folder that is given is that of the run"


def test_without_a_folder_of_its_own_a_run_cannot_find_itself() -> None:
    auto, last, best = (resume.find(word, None) for word in ("auto", "last", "best"))

    assert (auto.resumption, auto.problems) == (None, [])
    assert "there is never a checkpoint" in auto.warnings[0]
    assert all("needs hydra.run.dir=<run folder>" in found.problems[0] for found in (last, best))


def test_what_is_not_there_is_refused_with_what_is(run: Path) -> None:
    Path("empty").mkdir()
    Path("file").touch()
    (run / "checkpoints" / "best").unlink()
    Path("run/checkpoints/gone").symlink_to("step-00000099")
    Path("away").mkdir()
    shutil.copytree(run / "checkpoints" / name_of(2), Path("away") / name_of(2))

    there = "step-00000006, step-00000004, step-00000002"
    expected = {
        ("last", "empty"): "resume=last: empty holds no checkpoint",
        ("best", "run"): f"run has no best checkpoint, only {there}; one is kept where checkpoint.monitor is given",
        ("rum", None): "resume=rum: there is no such folder; did you mean run?; give a run folder",
        ("run/checkpoints/step-00000005", None): "did you mean run/checkpoints/step-0000000",
        ("file", None): "resume=file: is a file; give a run folder",
        ("empty", None): "resume=empty: holds no checkpoint; give a run folder",
        (".", None): "resume=.: holds no checkpoint; runs with checkpoints in .: run; give a run folder",
        ("run/checkpoints/gone", None): f"is a link that leads nowhere; run/checkpoints has {there}; give a run folder",
        ("away/step-00000002", None): "lies in no run's folder; give hydra.run.dir=<a new folder>",
    }
    for (value, folder), text in expected.items():
        (problem,) = resume.find(value, None if folder is None else Path(folder)).problems
        assert text in problem, (value, problem)
    assert resume.find("away", Path("new")).resumption.goes_on is False


def test_a_damaged_checkpoint_is_skipped_and_said_so(run: Path) -> None:
    damage(run, 6)

    for word in ("auto", "last", "run", "run/checkpoints"):
        found = resume.find(word, run if word in ("auto", "last") else None)
        (warning,) = found.warnings
        assert steps_of(found) == [4, 2]
        assert "trainer.json has 12 bytes, expected 11" in warning
        assert warning.endswith("; goes on from run/checkpoints/step-00000004 instead")
    damage(run, 4)
    assert steps_of(resume.find("best", run)) == [2], "falls back to the newest whole one"


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_refused(run: Path) -> None:
    damage(run, 6)

    for path in ("run/checkpoints/step-00000006", "run/checkpoints/last"):
        (problem,) = resume.find(path, None).problems
        assert problem.startswith(f"resume={path}: ") and "trainer.json has 12 bytes, expected 11" in problem
        assert "give another one (step-00000004, step-00000002), or the run folder" in problem


def test_a_run_whose_checkpoints_are_all_damaged_is_never_started_over(run: Path) -> None:
    damage(run, 6)
    (run / "checkpoints" / name_of(4) / "config.yaml").unlink()
    (run / "checkpoints" / name_of(2) / "manifest.json").unlink()

    for word in ("auto", "last", "run", "run/checkpoints"):
        found = resume.find(word, run if word in ("auto", "last") else None)
        (problem,) = found.problems
        assert found.resumption is None
        for text in ("no checkpoint in run/checkpoints is whole", "config.yaml is missing", "move that folder away"):
            assert text in problem, problem
        assert "manifest.json cannot be read" in problem


def test_half_written_and_set_aside_checkpoints_are_none(run: Path) -> None:
    (run / "checkpoints" / name_of(6)).rename(run / "checkpoints" / "step-00000006.superseded")
    shutil.copytree(run / "checkpoints" / name_of(4), run / "checkpoints" / ".step-00000008.part")

    assert steps_of(resume.find("auto", run)) == [4, 2]


# Folders --------------------------------------------------------------------------------------------------------------


def test_an_attempt_that_died_before_its_first_checkpoint_is_started_again(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").touch()

    composition = compose_with("task=distill", "resume=auto", "hydra.run.dir=run")

    assert composition.problems == []
    assert composition.resumption == Resumption(candidates=[], run_folder=run, goes_on=True)
    assert resume.owns_files(run, composition.resumption)
    assert check_folder(run, is_own=True) == []
    assert claim_folder(run, is_own=True) == run
    assert claim_folder(run) == Path("run_1"), "another run takes another name"


def test_what_is_no_attempt_of_ours_stays_as_it_is(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    foreign = Path("foreign")
    foreign.mkdir()
    (foreign / "config.yaml").write_text("a: 1\n")
    early = Path("early")
    early.mkdir()
    (early / "run.log").touch()

    assert [is_attempt(folder) for folder in (run, early, foreign, Path("gone"))] == [True, True, False, False]
    (run / "summary.json").write_text('{"status": "failed"}')
    assert is_attempt(run)
    (run / "summary.json").write_text('{"status": "completed"}')
    assert not is_attempt(run)
    for folder in (run, foreign):
        assert compose_with("resume=auto", f"hydra.run.dir={folder}").resumption is None
        assert "holds the files of an earlier run" in check_folder(folder)[0]


def test_a_new_run_from_a_checkpoint_may_be_started_again_in_its_folder(run: Path) -> None:
    new = make_run(Path("new"), steps=())

    composition = compose_with("resume=run", "hydra.run.dir=new")

    assert composition.problems == []
    assert propose_folder(composition.hydra) == new
    assert composition.resumption.goes_on is False
    assert resume.owns_files(new, composition.resumption)
    assert not resume.owns_files(new, None)


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from trainer.saved import *; lock = lock_folder(Path({str(tmp_path)!r}))"
    lock = lock_folder(tmp_path)

    second = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    with pytest.raises(ConfigError, match="another run writes to it"):
        lock_folder(tmp_path)
    lock.release()

    assert "ConfigError" in second.stderr
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_each_part_of_a_run_saves_its_configuration(run: Path) -> None:
    composition = compose_with("resume=run", "trainer.max_steps=20")

    assert [save_config(composition.cfg, run).name for _ in range(2)] == ["config.1.yaml", "config.2.yaml"]

    text = (run / "config.1.yaml").read_text()
    assert text.startswith("# python -m trainer --config-path=run --config-name=config.1\n")
    assert "--config-path=elsewhere --config-name=config\n" in config_text(composition.cfg, place=Path("elsewhere"))
    again = compose_run(Request(config_path=run.absolute(), config_name="config.1"))
    assert again.problems == []
    assert again.cfg.trainer.max_steps == 20
    assert again.cfg.resume is None, "it stands for the run from its beginning"
    assert not list(run.glob(".*.part"))


# The whole command line -----------------------------------------------------------------------------------------------


def test_refusals_of_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf"
    (conf / "task").mkdir(parents=True)
    (conf / "task" / "line.yaml").write_text(TASK)
    (tmp_path / "lines.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), "task=line", "task.failing_rank=5", config_dir=conf, world_size=2)
    make_run(Path("taken"), "task=line", config_dir=conf)
    before = sorted(path.name for path in run.rglob("*"))

    kept_keys = trainer("resume=run", "seed=3", "trainer.max_steps=3", "trainer.max_stps=1", cwd=tmp_path)
    taken = trainer("resume=run", "hydra.run.dir=taken", "launch.num_processes=2", "data.batch_size=1", cwd=tmp_path)
    shown = trainer("resume=run", "trainer.max_steps=9", "--cfg", "job", cwd=tmp_path)

    assert kept_keys.returncode == 2, kept_keys.stderr
    assert kept_keys.stderr.count("error: ") == 4, kept_keys.stderr
    assert "Traceback" not in kept_keys.stderr
    for text in ("seed=3", "data.batch_size=2 and", "trainer.max_steps=3: the checkpoint is", "trainer.max_stps=1"):
        assert f"error: {text}" in kept_keys.stderr
    assert taken.returncode == 2, taken.stderr
    assert "make a global batch of 2, but the run that is resumed has 4" in taken.stderr
    assert "error: hydra.run.dir=taken: holds the files of an earlier run" in taken.stderr
    assert shown.returncode == 0, shown.stderr
    assert "max_steps: 9" in shown.stdout and "lines.FitLine" in shown.stdout
    assert sorted(path.name for path in run.rglob("*")) == before, "nothing is made for a run that does not start"


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_value_is_refused(value: str, run: Path) -> None:
    assert "resume is empty" in resume.find(value, run).problems[0]
