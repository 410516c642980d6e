"""Multirun: which jobs there are, where they write, and what a failed one does to the rest."""

import json
import sys
from pathlib import Path

import pytest

from trainer import arguments, launch, sweep


class Jobs:
    """Stands for subprocess.Popen: takes note of the command and ends with the status that is due."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> "Jobs":
        self.commands.append(command)
        return self

    def wait(self) -> int:
        return self.statuses[len(self.commands) - 1]


def run(*argv: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["trainer"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sweep.subprocess, "Popen", jobs)
    monkeypatch.setattr(sweep.check, "problems", lambda cfg, overrides: [])  # tested in its own file
    args, problems = arguments.parse(["-m", *argv])
    assert problems == []
    return sweep.run_sweep(args)


def test_every_combination_is_a_process_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    jobs = Jobs(1, 0, -9, 0)
    argv = ("seed=1,2", "models.student.optimizer.fused=true,false", "callbacks=null", "logger=[]", "debug=fast")

    status = run(*argv, jobs=jobs, monkeypatch=monkeypatch, folder=tmp_path)

    (runs,) = (tmp_path / "outputs" / "distill").iterdir()
    assert status == 128 + 9, "the worst of all jobs"
    assert len(jobs.commands) == 4, "a failed job does not end the sweep"
    for number, command in enumerate(jobs.commands):
        assert command[1:3] == ["-m", "trainer"]
        assert f"seed={1 + number // 2}" in command
        assert f"++models.student.optimizer.fused={['True', 'False'][number % 2]}" in command
        assert f"hydra.run.dir=outputs/distill/{runs.name}/{number}" in command
    lines = capsys.readouterr().err.splitlines()[-4:]
    assert [line.split(": ")[-1] for line in lines] == [
        f"ended with status 1, outputs/distill/{runs.name}/0",
        f"completed, outputs/distill/{runs.name}/1",
        f"ended with status 137, outputs/distill/{runs.name}/2",
        f"completed, outputs/distill/{runs.name}/3",
    ]


def test_the_scores_of_all_jobs_are_one_table_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Scoring(Jobs):
        """Leaves a summary, as a run does; a failed one too."""

        def __call__(self, command: list[str]) -> "Jobs":
            folder = Path(next(word for word in command if word.startswith("hydra.run.dir=")).partition("=")[2])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(json.dumps({"after": {"val/kl": float(len(self.commands))}}))
            return super().__call__(command)

    argv = ("seed=1,2", "trainer.max_steps=3,4", "callbacks=null", "logger=[]", "debug=fast")

    status = run(*argv, jobs=Scoring(0, 1, 0, 0), monkeypatch=monkeypatch, folder=tmp_path)

    assert status == 1
    (runs,) = (tmp_path / "outputs" / "distill").iterdir()
    found = json.loads((runs / "sweep.json").read_text())["settings"]
    assert [(each["overrides"], each["after"]["val/kl"]["values"]) for each in found] == [
        (["trainer.max_steps=3"], [0.0, 2.0]),
        (["trainer.max_steps=4"], [3.0]),
    ]
    assert found[1]["missing"] == [1]
    assert "trainer.max_steps=3 seed=1,2 (n=2)" in capsys.readouterr().out


def test_one_wrong_job_refuses_all_before_the_first_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    jobs = Jobs()

    status = run("seed=1,2", "trainer.max_steps=1,many", jobs=jobs, monkeypatch=monkeypatch, folder=tmp_path)

    assert status == launch.REFUSED
    assert jobs.commands == []
    assert capsys.readouterr().err.count("trainer.max_steps=many") == 1, "once, and not for each job"
    assert not (tmp_path / "outputs").exists()
