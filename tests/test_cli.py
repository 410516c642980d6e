"""The command line as a user meets it: real processes, exit statuses, and what is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]

TASK = """\
# @package _global_
# Fits a line.
defaults:
  - /model@models.line.build: null
  - /plugin@models.line.plugin: zero1
  - /optimizer@models.line.optimizer: sgd
  - /scheduler@models.line.scheduler: null
  - _self_
task: {_target_: lines.FitLine, failing_rank: null}
models: {line: {build: {_target_: lines.line, width: 3}, dtype: float32}}
data: {train: {_target_: lines.points}, batch_size: 2}
trainer: {max_steps: 2}
export: {enabled: false}
"""
CODE = """\
import os
import torch
from trainer import TaskModule

def line(width, dtype):
    return torch.nn.Linear(width, 1, dtype=dtype)

def points():
    return [{"x": torch.ones(3), "y": torch.ones(1)} for _ in range(8)]

class FitLine(TaskModule):
    def __init__(self, failing_rank):
        self.failing_rank = failing_rank

    def training_step(self, batch, batch_idx):
        if int(os.environ["RANK"]) == self.failing_rank:
            raise RuntimeError("no line through these points")
        return (self.models["line"](batch["x"]) - batch["y"]).square().mean()

    def validation_step(self, batch, batch_idx):
        return {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a user's folder with a task of their own, and a package that has the name of one of ours."""
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "line.yaml").write_text(TASK)
    (tmp_path / "lines.py").write_text(CODE)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("raise ImportError('not the one you look for')\n")
    return tmp_path


def trainer(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_refusal_exits_2_with_every_problem_and_no_traceback(tmp_path: Path):
    done = trainer(
        "trainer.max_stps=3", "plugin@models.student.plugin=zero33", "data.train=gone.jsonl", "mode=fitt", cwd=tmp_path
    )

    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(errors) == 4, done.stderr
    assert "did you mean trainer.max_steps?" in done.stderr
    assert "did you mean zero3?" in done.stderr
    assert "data.train=gone.jsonl: no such file" in done.stderr
    assert "mode=fitt" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == [], "nothing is made for a run that does not start"


def test_the_configuration_can_be_looked_at(folder: Path):
    shown = trainer(
        "--config-dir", "conf", "task=line", "--cfg", "job", "models.line.optimizer.nesterov=true", cwd=folder
    )
    wrong = trainer("--cfg", "job", "--config-dir=conf", "task=lin", cwd=folder)
    tree = trainer("--info", "defaults-tree", cwd=folder)

    cfg = yaml.safe_load(shown.stdout)
    assert (shown.returncode, cfg["task"]["_target_"]) == (0, "lines.FitLine")
    assert cfg["models"]["line"]["optimizer"]["nesterov"] is True
    assert (wrong.returncode, "did you mean line?" in wrong.stderr) == (2, True)
    assert (tree.returncode, "task: distill" in tree.stdout) == (0, True)


def test_an_unknown_option_is_refused_and_the_version_is_ours(tmp_path: Path):
    wrong = trainer("--confg-dir=x", cwd=tmp_path)
    version = trainer("--version", cwd=tmp_path)

    assert wrong.returncode == 2
    assert wrong.stderr == "error: --confg-dir=x: there is no such option; did you mean --config-dir?\n"
    assert version.stdout.startswith("trainer 0.")


def test_a_failing_rank_of_a_users_task_ends_the_run(folder: Path):
    argv = ("--config-dir=conf", "task=line", "task.failing_rank=1", "launch.num_processes=2", "hydra.run.dir=run")

    done = trainer(*argv, "logger=jsonl", "callbacks=null", cwd=folder)

    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count("RuntimeError: no line through these points") == 1
    assert "rank 1 failed:" in done.stderr
    assert done.stderr.count("tasks is not the trainer's package `tasks` and is not used") == 1
    assert yaml.safe_load((folder / "run" / "summary.json").read_text())["status"] == "failed"

    again = trainer("--config-path=run", "--config-name=config", "--cfg", "job", cwd=folder)
    saved = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert again.returncode == 0, again.stderr
    assert yaml.safe_load(again.stdout) == {key: saved[key] for key in saved if key not in ("defaults", "hydra")}


def test_a_thread_that_torch_still_runs_in_does_not_spoil_the_end(folder: Path):
    """It lets go of the interpreter and asks for it again, which aborts a process that is being torn down."""
    file = folder / "lines.py"
    work = "lambda: [torch.ones(9).sum() for _ in iter(int, 1)]"
    file.write_text(f"{CODE}\nimport threading\nthreading.Thread(target={work}, daemon=True).start()\n")

    done = trainer("--config-dir=conf", "task=line", "launch.num_processes=2", cwd=folder)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "end", "status", "said"),
    [
        ("--cfg job", ">/dev/full", 1, "error: the output could not be written: No space left on device"),
        ("--cfg job", ">&-", 0, ""),
        ("--help", "| head -1 >/dev/null; exit ${PIPESTATUS[0]}", 0, ""),
        ("data.batch_siz=5", "2>/dev/full", 2, ""),
    ],
)
def test_an_output_that_cannot_be_written_has_the_right_status(
    argv: str, end: str, status: int, said: str, folder: Path
):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    command = ["bash", "-c", f"{sys.executable} -m trainer --config-dir=conf task=line {argv} {end}"]

    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == status, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("end", ["| true; exit ${PIPESTATUS[0]}", ">/dev/full"])
def test_a_run_whose_result_nobody_reads_is_complete(end: str, folder: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = f"{sys.executable} -m trainer --config-dir=conf task=line export.enabled=true hydra.run.dir=run {end}"

    done = subprocess.run(["bash", "-c", run], cwd=folder, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    assert "the closing table could not be printed" in done.stderr and "Traceback" not in done.stderr
    assert yaml.safe_load((folder / "run" / "summary.json").read_text())["status"] == "completed"
    assert (folder / "run" / "export" / "line" / "README.md").exists()


def test_a_run_that_is_refused_before_its_first_step_leaves_its_name_free(folder: Path):
    argv = ("--config-dir=conf", "task=line", "hydra.run.dir=run", "callbacks=[default,early_stopping]")

    done = trainer(*argv, cwd=folder)

    assert done.returncode == 2 and "trainer.val_every=null: callbacks.early_stopping" in done.stderr, done.stderr
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_sweep_runs_each_job_in_a_process_of_its_own(folder: Path):
    sweep = ("-m", "--config-dir=conf", "task=line", "task.failing_rank=0,null")

    done = trainer(*sweep, "logger=jsonl", "callbacks=null", cwd=folder)

    (runs,) = (folder / "outputs" / "line").iterdir()
    lines = [line for line in done.stderr.splitlines() if line.startswith("job ")]
    assert done.returncode == 1, done.stderr
    assert lines[-2].endswith(f"ended with status 1, outputs/line/{runs.name}/0")
    assert lines[-1].endswith(f"completed, outputs/line/{runs.name}/1")
    for number, status in enumerate(("failed", "completed")):
        assert yaml.safe_load((runs / str(number) / "summary.json").read_text())["status"] == status
