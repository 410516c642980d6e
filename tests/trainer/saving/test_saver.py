"""A checkpoint that cannot be written costs the run nothing; one written in the background holds its own step."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer import Callback, ConfigError, TaskModule
from trainer.saving import content, saver
from trainer.saving.checkpoints import (
    BEST,
    FOLDER,
    LAST,
    CheckpointPlan,
    find_all,
    find_damage,
    pointed_to,
    scores,
    step_of,
)
from trainer.saving.content import Content
from trainer.saving.saver import Saver

WEIGHTS = "models/a/rank-00000-000.safetensors"


class Run(SimpleNamespace):
    """What a saver asks of a trainer, on the only rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"global_step": 0, "rank": 0, "world_size": 1, "is_main": True, "callbacks": {}, "task": TaskModule(),
               "metrics": {}, "heard": [], "weights": torch.zeros(50_000), **options}
        )  # fmt: skip

    def emit(self, hook: str, **payload: Any) -> None:
        self.heard.append((hook, payload))

    def metrics_of(self, step: int) -> dict[str, float]:
        return self.metrics if step == self.global_step else {}

    def step(self) -> None:
        """Changes the weights in place, as an update does."""
        self.global_step += 1
        self.weights += 1
        self.metrics = {}


def take(run: Any) -> Content:
    starts = {"weight/w": 0}
    return Content(
        texts={"trainer.json": f"{run.global_step}\n"},
        tensors={"models/a/rank-00000": ({"weight/w": run.weights}, starts)},
    )


@pytest.fixture(autouse=True)
def _cheap_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "take", take)


def weights_in(path: Path) -> Tensor:
    return load_file(path / WEIGHTS)["weight/w"]


def steps_in(folder: Path) -> list[int]:
    found = find_all(folder / FOLDER)
    assert [find_damage(path) for path in found] == [None] * len(found)
    return [step_of(path) for path in found]


def save_steps(saver: Saver, run: Run, count: int) -> None:
    for _ in range(count):
        run.step()
        saver.save(run)


# Saving


def test_a_checkpoint_holds_the_step_and_is_announced(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(), tmp_path)

    save_steps(saver, run, 2)

    path = tmp_path / FOLDER / "step-00000002"
    assert saver.last == path and saver.problem is None and steps_in(tmp_path) == [2]
    assert torch.equal(weights_in(path), torch.full((50_000,), 2.0))
    assert run.heard[2:] == [("on_save_start", {"step": 2}), ("on_save_end", {"path": path})]


def test_a_step_is_saved_once(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(), tmp_path)
    save_steps(saver, run, 1)

    saver.save(run, wait=True)

    assert len(run.heard) == 2 and len(list((tmp_path / FOLDER).glob("step-*"))) == 1


def test_what_a_run_goes_on_from_is_not_saved_again(tmp_path: Path):
    save_steps(Saver(CheckpointPlan(), tmp_path), Run(), 1)
    run, saver = Run(global_step=1), Saver(CheckpointPlan(), tmp_path)

    saver.go_on_from(tmp_path / FOLDER / "step-00000001")
    saver.save(run)

    assert run.heard == [] and saver.last == tmp_path / FOLDER / "step-00000001"


# In the background


def files_of(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_the_background_writes_the_same_bytes(tmp_path: Path):
    contents = []
    for background in (False, True):
        folder = tmp_path / str(background)
        run, saver = Run(weights=torch.arange(50_000.0)), Saver(CheckpointPlan(background=background), folder)
        save_steps(saver, run, 1)
        saver.finish(run)
        contents.append(files_of(folder / FOLDER / "step-00000001"))

    assert contents[0] == contents[1] and set(contents[0]) == {"trainer.json", WEIGHTS}


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yields what lets writing begin."""
    gate, write_slices = threading.Event(), content.write_slices

    def wait(*arguments: Any) -> list[str]:
        assert gate.wait(timeout=30)
        return write_slices(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(content, "write_slices", wait)
        try:
            yield gate
        finally:
            gate.set()


def test_steps_while_it_is_written_do_not_change_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, saver = Run(), Saver(CheckpointPlan(background=True), tmp_path)

    with held_back(monkeypatch) as gate:
        save_steps(saver, run, 1)
        assert saver.is_writing and saver.last is None
        assert run.heard[-1] == ("on_save_end", {"path": None})
        run.step()
        saver.poll(run, anyone_writes=True)
        assert steps_in(tmp_path) == []
        gate.set()
        saver.finish(run)

    assert steps_in(tmp_path) == [1] and not saver.is_writing
    assert torch.equal(weights_in(tmp_path / FOLDER / "step-00000001"), torch.ones(50_000))


def test_what_was_written_becomes_a_checkpoint_once_no_rank_writes(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(background=True), tmp_path)
    save_steps(saver, run, 1)
    while saver.is_writing:
        pass

    saver.poll(run, anyone_writes=False)

    assert steps_in(tmp_path) == [1]


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(background=True, keep_last=5), tmp_path)

    save_steps(saver, run, 4)
    saver.finish(run)

    assert steps_in(tmp_path) == [4, 3, 2, 1]
    assert [float(weights_in(path)[0]) for path in find_all(tmp_path / FOLDER)] == [4, 3, 2, 1]


def test_a_checkpoint_that_must_be_there_is_waited_for(tmp_path: Path):
    run, saver = Run(global_step=1), Saver(CheckpointPlan(background=True), tmp_path)

    saver.save(run, wait=True)

    assert steps_in(tmp_path) == [1] and not saver.is_writing


# Disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"only root mounts a disk: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def check_failed(saver: Saver, run: Run, why: str) -> None:
    """A failed save says why, announces nothing, and leaves what was there."""
    assert saver.problem is not None and why in saver.problem
    assert saver.problem.startswith(f"the checkpoint of step {run.global_step} could not be written: ")
    assert run.heard[-1] == ("on_save_end", {"path": None})
    assert steps_in(saver.folder.parent) == [1] and pointed_to(saver.folder, LAST) == find_all(saver.folder)[0]


def test_a_disk_without_room_is_noticed_before_it_is_full(disk: Path):
    run, saver = Run(), Saver(CheckpointPlan(), disk)
    save_steps(saver, run, 1)
    (disk / "filler").write_bytes(b"x" * 700_000)

    save_steps(saver, run, 1)

    check_failed(saver, run, "GB left")
    (disk / "filler").unlink()
    save_steps(saver, run, 1)
    assert saver.problem is None and steps_in(disk) == [3]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("room", [0, 4096, 100_000, 196_608, 204_800])  # a checkpoint takes 200 kB and two small files
def test_a_disk_that_fills_up_costs_that_checkpoint_only(
    disk: Path, monkeypatch: pytest.MonkeyPatch, background: bool, room: int
):
    run, saver = Run(), Saver(CheckpointPlan(background=background), disk)
    save_steps(saver, run, 1)
    saver.finish(run)
    (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - room))
    with monkeypatch.context() as patch:  # a quota, or another program that writes at the same time
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
        save_steps(saver, run, 1)
        saver.finish(run)

    check_failed(saver, run, "o space left on device")
    assert [path.name for path in saver.folder.glob(".step-*")] == []
    (disk / "filler").unlink()
    save_steps(saver, run, 1)
    saver.finish(run)
    assert saver.problem is None and steps_in(disk) == [3]


def test_a_folder_that_cannot_be_written_to_costs_its_checkpoints_only(disk: Path):
    run, saver = Run(), Saver(CheckpointPlan(), disk)
    save_steps(saver, run, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    save_steps(saver, run, 1)

    check_failed(saver, run, "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    save_steps(saver, run, 1)
    assert saver.problem is None and steps_in(disk) == [3]


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow_costs_that_checkpoint_only(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(), tmp_path)
    save_steps(saver, run, 1)

    with limited_file_size(100_000):
        save_steps(saver, run, 1)

    check_failed(saver, run, "ile too large")
    save_steps(saver, run, 1)
    assert saver.problem is None and steps_in(tmp_path) == [3]


def test_a_file_in_the_place_of_the_folder_costs_the_checkpoints_only(tmp_path: Path):
    (tmp_path / FOLDER).write_text("a file")
    run, saver = Run(), Saver(CheckpointPlan(), tmp_path)

    save_steps(saver, run, 1)

    assert saver.problem is not None and "exists" in saver.problem
    os.unlink(tmp_path / FOLDER)
    save_steps(saver, run, 1)
    assert saver.problem is None and steps_in(tmp_path) == [2]


def test_state_that_cannot_be_taken_costs_that_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, saver_ = Run(), Saver(CheckpointPlan(), tmp_path)
    save_steps(saver_, run, 1)

    def fail(run: Any) -> Content:
        raise ValueError("no state today")

    with monkeypatch.context() as patch:
        patch.setattr(saver, "take", fail)
        save_steps(saver_, run, 1)

    check_failed(saver_, run, "no state today")


# When, and which


def validate(saver: Saver, run: Run, loss: float) -> bool:
    """Makes a step and validates it; returns whether a checkpoint was due, which then is written."""
    run.step()
    run.metrics = {"val/loss": loss}
    saver.note(run, run.metrics)
    is_due = saver.is_due(run)
    if is_due:
        saver.save(run)
    return is_due


@pytest.mark.parametrize(
    ("plan", "losses", "due"),
    [
        ({}, [3.0, 2.0, 2.0, 4.0, 1.0], [True, True, False, False, True]),
        ({"mode": "max"}, [3.0, 2.0, 4.0, 4.0], [True, False, True, False]),
        ({"keep_best": 2}, [3.0, 2.0, 4.0, 2.5], [True, True, False, True]),
        ({"keep_best": 0}, [3.0, 2.0], [False, False]),
        ({}, [float("nan"), float("inf"), 1.0, float("-inf")], [False, False, True, False]),
    ],
)
def test_a_validation_among_the_best_is_saved(
    plan: dict[str, Any], losses: list[float], due: list[bool], tmp_path: Path
):
    run, saver = Run(), Saver(CheckpointPlan(monitor="val/loss", **plan), tmp_path)

    assert [validate(saver, run, loss) for loss in losses] == due


def test_the_best_checkpoint_is_pointed_to_and_stays(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(every=1, monitor="val/loss"), tmp_path)

    for loss in (3.0, 1.0, 2.0, float("nan")):
        assert validate(saver, run, loss)

    assert steps_in(tmp_path) == [4, 2] and scores(saver.folder, "val/loss") == {saver.folder / "step-00000002": 1.0}
    assert pointed_to(saver.folder, BEST) == saver.folder / "step-00000002"


def test_a_validation_after_its_step_was_saved_is_noted(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(monitor="val/loss"), tmp_path)
    save_steps(saver, run, 1)

    saver.note(run, {"val/loss": 0.5})
    run.step()
    saver.note(run, {"val/loss": 0.1})  # of a step that is not saved

    assert scores(saver.folder, "val/loss") == {saver.folder / "step-00000001": 0.5}


def test_checkpoints_come_every_so_many_steps(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(every=3), tmp_path)

    assert [(run.step(), saver.is_due(run))[1] for _ in range(6)] == [False, False, True] * 2


def test_a_monitor_without_a_validation_is_refused(tmp_path: Path):
    run, saver = Run(), Saver(CheckpointPlan(monitor="val/loss"), tmp_path)
    run.validation_loader = None

    with pytest.raises(ConfigError, match=r"checkpoint\.monitor=val/loss: no validation gives it"):
        saver.check_state(run)


def test_a_monitor_that_no_validation_measures_is_refused(tmp_path: Path):
    saver = Saver(CheckpointPlan(monitor="val/los"), tmp_path)

    saver.check_monitor({"val/los": 1.0})
    with pytest.raises(ConfigError, match=r"monitor=val/los is no metric of the validation; did you mean val/loss\?"):
        saver.check_monitor({"val/loss": 1.0})


def test_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path):
    class Keeper(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": [object()]}

    with pytest.raises(TypeError, match=r"callbacks\.keeper\.state_dict\(\)\.inner\.0 is of type object"):
        Saver(CheckpointPlan(), tmp_path).check_state(Run(callbacks={"keeper": Keeper()}))
