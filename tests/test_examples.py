"""The examples of the documents, run exactly as they stand there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]


def run(arguments: list[str], *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, as a user does who has installed the trainer."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def documented_commands() -> tuple[str, list[str]]:
    """Returns the folder and the arguments of the command in docs/tasks.md."""
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    block = re.search(r"```sh\ncd (examples/\S+)\npython (-m trainer .+)\n```", text)
    assert block is not None
    return block[1], shlex.split(block[2])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder and the output of the command in docs/tasks.md, in a copy of the example."""
    place, arguments = documented_commands()
    project = tmp_path_factory.mktemp("user") / "project"
    shutil.copytree(ROOT / place, project, ignore=shutil.ignore_patterns("outputs", "__pycache__"))

    result = run(arguments, folder=project)

    assert result.returncode == 0, result.stderr[-4000:]
    (folder,) = (project / "outputs" / "match_features").iterdir()
    return folder, result.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_own_task_learns(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))

    assert (summary["task"], summary["status"], summary["global_step"]) == ("match_features", "completed", 100)
    assert summary["after"]["val/error"] < 0.1 * summary["before"]["val/error"]


def test_own_task_logs_under_the_documented_names(finished: tuple[Path, str]) -> None:
    training = [record for record in records(finished[0]) if "train/loss" in record]
    validation = [record for record in records(finished[0]) if "val/error" in record]

    assert [record["step"] for record in training] == [1, 20, 40, 60, 80, 100]
    assert {"train/student/loss", "train/student/lr", "train/student/grad_norm"} <= set(training[0])
    assert {"perf/step_time", "perf/examples_per_s", "perf/memory_gb"} <= set(training[0])
    assert [record["step"] for record in validation] == [0, 100]


def test_own_task_exports_a_student_that_loads(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output = finished
    export = folder / "export" / "student"
    monkeypatch.syspath_prepend(str(ROOT / documented_commands()[0]))

    student = instantiate(yaml.safe_load((export / "build.yaml").read_text(encoding="utf-8")))
    student.load_state_dict(load_file(export / "model.safetensors"))

    assert student(torch.zeros(3, 16)).shape == (3, 8)
    assert "# student" in (export / "README.md").read_text(encoding="utf-8")
    assert {"config.yaml", "plan.txt", "run.log"} <= {path.name for path in folder.iterdir()}
    assert "student before" in output


def test_python_of_the_readme_runs_without_hydra(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "own.py").write_text(code, encoding="utf-8")

    result = run(["own.py"], folder=tmp_path)

    assert result.returncode == 0, result.stderr[-4000:]
    before, after = (float(number) for number in re.findall(r"'val/error': ([\d.e-]+)", result.stdout))
    assert after < 0.5 * before


SEVERAL = {
    "disjoint": ("small", "large"),
    "mutual": ("small", "large"),
    "dual_encoder": ("query", "document"),
}
SCORES = {
    "disjoint": {f"val/{name}/{score}" for name in ("small", "large") for score in ("cross_entropy", "perplexity")},
    "mutual": {
        f"val/{name}/{score}" for name in ("small", "large") for score in ("cross_entropy", "perplexity", "peer_kl")
    },
    "dual_encoder": {
        f"val/{score}" for score in ("contrastive_loss", "top1_accuracy", "top5_accuracy", "mean_reciprocal_rank")
    },
}


@pytest.mark.parametrize("task", SEVERAL)
def test_a_task_of_several_models_runs_by_its_name_alone(task: str, tmp_path: Path) -> None:
    """Two steps of its defaults: metrics of each model by its name, an export each, and scores before and after."""
    short = ["trainer.max_steps=2", "trainer.log_every=1", "data.batch_size=4", "trainer.limit_val_batches=2"]

    result = run(["-m", "trainer", f"task={task}", *short, "logger=jsonl", "hydra.run.dir=run"], folder=tmp_path)

    assert result.returncode == 0, result.stderr[-4000:]
    folder, names = tmp_path / "run", SEVERAL[task]
    training = [record for record in records(folder) if "train/loss" in record]
    assert [record["step"] for record in training] == [1, 2]
    losses = {"train/joint/loss"} if task == "dual_encoder" else {f"train/{name}/loss" for name in names}
    others = {f"train/{name}/{metric}" for name in names for metric in ("lr", "grad_norm", "updates")}
    assert losses | others <= set(training[1])
    assert [training[1][f"train/{name}/updates"] for name in names] == [2, 2]
    assert {path.name for path in (folder / "export").iterdir()} == set(names)
    assert all((folder / "export" / name / "model.safetensors").exists() for name in names)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["task"], summary["status"], summary["global_step"]) == (task, "completed", 2)
    assert summary["before"].keys() == summary["after"].keys() == SCORES[task]
    assert summary["before"] != summary["after"]
