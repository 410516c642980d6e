"""Checkpoints on disk: whole or not there whenever the process dies, never read where damaged, kept as planned."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.saving import checkpoints
from trainer.saving.checkpoints import (
    BEST,
    LAST,
    MANIFEST,
    METRICS,
    CheckpointError,
    CheckpointPlan,
    commit,
    describe_files,
    find_all,
    find_damage,
    name_of,
    newer_than,
    point,
    pointed_to,
    read_json,
    read_manifest,
    retain,
    score,
    scores,
    set_aside,
    stage,
    step_of,
    write_text,
)

FILES = {"trainer.json": "{}", "models/student/rank-00000-000.safetensors": "weights", "rank-00000.json": "[]"}


def save(folder: Path, step: int, *, content: str = "") -> Path:
    """Writes a checkpoint as the saver does."""
    staged = stage(folder, step)
    for name, text in FILES.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text(f"{text} {step} {content}")
    return commit(staged, step=step, files=describe_files(staged, list(FILES)), facts={"world_size": 1})


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in find_all(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / checkpoints.FOLDER).mkdir(parents=True)
    return tmp_path / "run" / checkpoints.FOLDER


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


# Names


@pytest.mark.parametrize(("step", "name"), [(0, "step-00000000"), (42, "step-00000042"), (10**9, "step-1000000000")])
def test_a_step_and_its_name_say_the_same(step: int, name: str):
    assert name_of(step) == name and step_of(Path(name)) == step


def test_only_what_was_committed_is_found_the_newest_first(folder: Path):
    for step in (9, 100_000_000, 10):
        save(folder, step)
    for name in (
        ".step-00000011.part", ".step-00000012.deleted", "step-00000013.superseded", "step-000000014", "step-15",
        "step-٠٠٠٠٠٠١٦", "notes",
    ):  # fmt: skip
        shutil.copytree(folder / name_of(9), folder / name)
    (folder / name_of(17)).mkdir()
    (folder / name_of(18)).write_text("a file")

    assert steps_in(folder) == [100_000_000, 10, 9]
    assert find_all(folder / "missing") == []


@pytest.mark.parametrize("pointer", [LAST, BEST])
def test_a_link_stands_only_for_a_checkpoint_beside_it(folder: Path, tmp_path: Path, pointer: str):
    path, other = save(folder, 1), save(tmp_path / "other", 2)
    (folder / "step-00000009").write_text("a file")
    (folder / "notes").mkdir()
    elsewhere = ["../..", ".", "", str(path), str(other), "../checkpoints/step-00000001", f"../../other/{other.name}"]
    for target in [*elsewhere, "step-00000003", "step-00000009", "notes", "./step-00000001", "step-00000001/", pointer]:
        (folder / pointer).unlink(missing_ok=True)
        if target:
            (folder / pointer).symlink_to(target)

        assert pointed_to(folder, pointer) is None, target

    (folder / pointer).unlink()
    (folder / pointer).write_text("step-00000001")
    assert pointed_to(folder, pointer) is None
    point(pointer, path)
    assert pointed_to(folder, pointer) == path


# The manifest


def test_a_checkpoint_as_it_was_saved_is_whole(folder: Path):
    path = save(folder, 3)

    assert find_damage(path) is None
    assert read_manifest(path)["world_size"] == 1
    assert pointed_to(folder, LAST) == path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (b"", "cannot be read"),
        (b'{"format": 1, "fil', "cannot be read"),
        (b"\x80\x04\x95pickle", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"files":' * 100_000, "cannot be read"),
        (b'{"format": 1' + b"0" * 5000 + b"}", "cannot be read"),
        (b"null", "format None"),
        (b"[1]", "format None"),
        (b'{"format": 2, "files": {"a": {"bytes": 1, "sha256": ""}}}', "format 2, expected 1"),
        (b'{"format": 1}', "names no files"),
        (b'{"format": 1, "files": {}}', "names no files"),
        (b'{"format": 1, "files": ["a"]}', "names no files"),
    ],
)
def test_what_is_no_manifest_is_refused(folder: Path, content: bytes | None, problem: str):
    path = save(folder, 1)
    (path / MANIFEST).unlink()
    if content is not None:
        (path / MANIFEST).write_bytes(content)

    with pytest.raises(CheckpointError, match=problem):
        read_manifest(path)
    assert problem in str(find_damage(path))


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "models/../../outside", "linked/rank-00000-000.safetensors", "link", ".", "", "a//b",
     "./a", "a\0b", "\ud800"],
)  # fmt: skip
def test_a_manifest_that_names_a_file_elsewhere_is_refused(folder: Path, tmp_path: Path, name: str):
    path, other = save(folder, 1), save(tmp_path / "other", 1)
    (folder / "outside").write_text("x")
    (path / "linked").symlink_to(other / "models/student")
    (path / "link").symlink_to(path / "trainer.json")
    edit_manifest(path, lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": "0"}}))

    damage = find_damage(path)

    assert damage is not None and "no file inside" in damage


@pytest.mark.parametrize(
    "facts",
    [
        None, {}, [], "x", {"bytes": 1}, {"sha256": "x"}, {"bytes": "1", "sha256": "x"}, {"bytes": 1.0, "sha256": "x"},
        {"bytes": None, "sha256": "x"}, {"bytes": 1, "sha256": 7},
    ],
)  # fmt: skip
def test_a_manifest_without_sizes_and_digests_is_refused(folder: Path, facts: Any):
    path = save(folder, 1)
    edit_manifest(path, lambda manifest: manifest["files"].update({"trainer.json": facts}))

    with pytest.raises(CheckpointError, match=r"the size and the digest of trainer\.json"):
        read_manifest(path)


@pytest.mark.parametrize("size", [-1, 0, 10**30])
def test_a_size_that_no_file_has_is_damage(folder: Path, size: int):
    path = save(folder, 1)
    edit_manifest(path, lambda manifest: manifest["files"]["trainer.json"].update(bytes=size))

    assert f"expected {size}" in str(find_damage(path))


# Damage


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(bytes(content))


def replace_by_link(file: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved.name)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = {
    "is missing": Path.unlink,
    "bytes, expected": truncate,
    "sha256 differs": alter,
    "no file inside": replace_by_link,
    " is missing": replace_by_folder,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("problem", DAMAGES)
def test_each_damage_of_each_file_is_found(folder: Path, name: str, problem: str):
    path = save(folder, 1)
    DAMAGES[problem](path / name)

    damage = find_damage(path)

    assert damage is not None and name in damage and problem in damage


def test_a_file_of_another_checkpoint_is_damage(folder: Path):
    path, other = save(folder, 1), save(folder, 2)
    for name in FILES:
        shutil.copy(other / name, path / name)

    assert "sha256 differs" in str(find_damage(path))


def test_a_checkpoint_that_was_renamed_to_another_step_is_damage(folder: Path):
    path = save(folder, 1)

    renamed = path.rename(folder / name_of(5))

    assert "is that of step 1" in str(find_damage(renamed))


@pytest.mark.parametrize(
    "name",
    ["models/student/rank-00001-000.safetensors", "rank-00000-001.safetensors", "rank-00001.json", "config.yaml",
     "models/teacher/rank-00000-000.safetensors"],
)  # fmt: skip
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_would_be_read_and_was_not_saved_is_damage(folder: Path, name: str, is_link: bool):
    path, other = save(folder, 1), save(folder, 2)
    (path / name).parent.mkdir(exist_ok=True)
    if is_link:
        (path / name).symlink_to(other / "trainer.json")
    else:
        (path / name).write_text("of another run")

    damage = find_damage(path, digests=False)

    assert damage is not None and f"{name} was not saved with it" in damage


def test_metrics_notes_and_hidden_files_beside_the_content_are_no_damage(folder: Path):
    path = save(folder, 1)
    score(path, {"val/loss": 1.0})
    for name in ("README.md", ".metrics.json.part", ".rank-00001-000.safetensors", "models/.DS_Store"):
        (path / name).write_text("x")

    assert find_damage(path) is None


def test_a_file_that_the_disk_does_not_give_is_damage_and_no_crash(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(folder, 1)

    def fail(file: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints, "digest_of", fail)

    assert "cannot be read" in str(find_damage(path))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_together_read_every_byte_and_each_file_once(
    folder: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
):
    path = save(folder, 1)
    digested: list[str] = []
    digest_of = checkpoints.digest_of
    monkeypatch.setattr(checkpoints, "digest_of", lambda file: (digested.append(file.name), digest_of(file))[1])

    found = [find_damage(path, rank=rank, world_size=world_size) for rank in range(world_size)]

    assert found == [None] * world_size
    assert sorted(digested) == sorted(Path(name).name for name in FILES)


@pytest.mark.parametrize("content", [b"\x80\x04", b"[" * 100_000, b"{"])
def test_a_json_file_that_is_none_is_a_checkpoint_error(folder: Path, content: bytes):
    path = save(folder, 1)
    (path / "trainer.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"trainer\.json cannot be read"):
        read_json(path, "trainer.json")


# Whole or not there


class Died(BaseException):
    """Stands for the end of the process."""


SYSTEM_CALLS = ("fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir")


def dies_at(number: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> bool:
    """Runs an action that ends before its n-th call that changes the disk; returns whether it came so far."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:  # a dead process makes no further call either
                raise Died
            return call(*args, **options)

        return run

    with monkeypatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            action()
        except Died:
            return True
    return False


def test_a_process_that_dies_at_any_call_leaves_whole_checkpoints_only(folder: Path, monkeypatch: pytest.MonkeyPatch):
    plan = CheckpointPlan(keep_last=2, monitor="val/loss")
    for step, loss in ((1, 0.5), (2, 1.0)):
        score(save(folder, step), {"val/loss": loss})
    retain(folder, plan)
    pristine = folder.with_name("pristine")
    shutil.copytree(folder, pristine, symlinks=True)

    def save_and_retain() -> None:
        score(save(folder, 3), {"val/loss": 0.1})
        retain(folder, plan)

    seen = set()
    number = 0
    while dies_at(number, monkeypatch, save_and_retain):
        found = steps_in(folder)
        seen.add(tuple(found))
        assert all(find_damage(path) is None for path in find_all(folder)), number
        assert found in ([2, 1], [3, 2, 1], [3, 2]), (number, found)
        assert pointed_to(folder, LAST) in ({2: folder / name_of(2), 3: folder / name_of(3)}[s] for s in found[:2])
        assert pointed_to(folder, BEST) in (folder / name_of(1), folder / name_of(3), None)

        save(folder, 4)
        assert find_damage(folder / name_of(4)) is None and pointed_to(folder, LAST) == folder / name_of(4)
        assert [path.name for path in folder.glob(".step-*")] == [], number
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder, symlinks=True)
        number += 1

    assert seen == {(2, 1), (3, 2, 1), (3, 2)} and number > 20


def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(".part")[2] or "staged")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("rename"), rename(*names)))

    save(folder, 1)

    before = events[: events.index("rename")]
    assert {f"/{name}" for name in FILES} | {"/models", "/models/student", "staged"} <= set(before)
    assert events[events.index("rename") + 1 :], "the rename itself is not on the disk"


def save_forever(folder: Path, first: int) -> None:
    for step in itertools.count(first):
        score(save(folder, step, content="x" * 100_000), {"val/loss": 1 / step})
        retain(folder, CheckpointPlan(keep_last=2, monitor="val/loss"))


def test_a_killed_process_leaves_whole_checkpoints_only(folder: Path):
    began = time.monotonic()
    save(folder, 1)
    longest, moments = 4 * (time.monotonic() - began) + 0.02, random.Random(0)

    for kills in range(200):
        if kills >= 20 and steps_in(folder)[0] > 3:
            break  # on a machine with other work it takes more
        process = multiprocessing.get_context("fork").Process(
            target=save_forever, args=(folder, steps_in(folder)[0] + 1)
        )
        process.start()
        time.sleep(moments.uniform(0.0, longest))
        process.kill()
        process.join()

        assert process.exitcode == -signal.SIGKILL
        found = find_all(folder)
        assert [find_damage(path) for path in found] == [None] * len(found)
        assert found and len(list(folder.glob(".step-*"))) <= 1

    assert steps_in(folder)[0] > 3, "no process came as far as a checkpoint"
    following = save(folder, steps_in(folder)[0] + 1)
    retain(folder, CheckpointPlan(keep_last=2))
    assert find_damage(following) is None and pointed_to(folder, LAST) == following
    assert len(steps_in(folder)) == 2
    assert list(folder.glob(".step-*")) == []


def test_staging_leaves_alone_what_is_not_its_own(folder: Path):
    for name in (".snapshot", ".ipynb_checkpoints", ".step-00000001.part", ".step-00000002.deleted"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")

    staged = stage(folder, 1)

    assert sorted(path.name for path in folder.iterdir()) == [".ipynb_checkpoints", ".snapshot", ".step-00000001.part"]
    assert list(staged.iterdir()) == []


def test_a_step_that_is_saved_again_sets_the_older_one_aside(folder: Path):
    save(folder, 2, content="first")
    save(folder, 2, content="second")
    path = save(folder, 2, content="third")

    assert steps_in(folder) == [2] and (path / "trainer.json").read_text() == "{} 2 third"
    assert (folder / "step-00000002.superseded/trainer.json").read_text() == "{} 2 first"
    assert (folder / "step-00000002.superseded1/trainer.json").read_text() == "{} 2 second"


def test_newer_checkpoints_are_set_aside_and_not_deleted(folder: Path):
    paths = [save(folder, step) for step in (1, 2, 3)]

    set_aside(newer_than(paths[0]), why="superseded")

    assert steps_in(folder) == [1] and pointed_to(folder, LAST) is None
    assert sorted(path.name for path in folder.glob("*.superseded")) == [
        "step-00000002.superseded",
        "step-00000003.superseded",
    ]


def test_a_small_file_is_written_in_one_piece(folder: Path, monkeypatch: pytest.MonkeyPatch):
    path = save(folder, 1)
    score(path, {"val/loss": 1.0})

    number = 0
    while dies_at(number, monkeypatch, lambda: score(path, {"val/loss": 2.0, "more": 3.0})):
        assert json.loads((path / METRICS).read_text()) == {"val/loss": 1.0}, number
        assert find_damage(path) is None
        number += 1

    assert number == 2  # the sync and the renaming
    assert json.loads((path / METRICS).read_text()) == {"val/loss": 2.0, "more": 3.0}
    write_text(path / METRICS, "")
    assert (path / METRICS).read_text() == ""


# Keeping


def kept(folder: Path, losses: dict[int, Any], **plan: Any) -> tuple[list[int], int | None]:
    """Returns the steps that stay of checkpoints that are saved one after the other, and that of the best."""
    for step, loss in losses.items():
        path = save(folder, step)
        score(path, {} if loss is None else {"val/loss": loss})
        retain(folder, CheckpointPlan(monitor="val/loss", **plan))
    best = pointed_to(folder, BEST)
    return sorted(steps_in(folder)), None if best is None else step_of(best)


@pytest.mark.parametrize(
    ("losses", "plan", "expected"),
    [
        ([3.0, 1.0, 2.0, 4.0], {}, ([2, 4], 2)),
        ([3.0, 1.0, 2.0, 4.0], {"mode": "max"}, ([4], 4)),
        ([5.0, 1.0, 2.0, 4.0], {"mode": "max"}, ([1, 4], 1)),
        ([3.0, 1.0, 2.0, 4.0], {"keep_last": 2}, ([2, 3, 4], 2)),
        ([3.0, 1.0, 2.0, 4.0], {"keep_best": 2}, ([2, 3, 4], 2)),
        ([3.0, 1.0, 2.0, 4.0], {"keep_best": 0}, ([4], None)),
        ([3.0, 1.0, 2.0, 4.0], {"keep_every": 3, "keep_best": 0}, ([3, 4], 3)),
        ([1.0, 1.0, 1.0, 1.0], {}, ([1, 4], 1)),
        ([1.0, 1.0, 1.0, 1.0], {"mode": "max"}, ([1, 4], 1)),
        ([math.nan, 2.0, math.nan, -math.inf], {}, ([2, 4], 2)),
        ([math.nan, 2.0, math.inf, math.nan], {"mode": "max"}, ([2, 4], 2)),
        ([None, 2.0, None, None], {}, ([2, 4], 2)),
        ([math.nan, None, None, math.nan], {}, ([4], None)),
        ([3, 1, 2, 4], {}, ([2, 4], 2)),
    ],
)
def test_the_newest_and_the_best_stay(folder: Path, losses: list[Any], plan: dict[str, Any], expected: Any):
    assert kept(folder, dict(enumerate(losses, start=1)), **plan) == expected


def test_without_a_monitor_only_the_newest_and_those_of_the_period_stay(folder: Path):
    for step in range(1, 11):
        save(folder, step)
        retain(folder, CheckpointPlan(keep_last=2, keep_every=4))

    assert steps_in(folder) == [10, 9, 8, 4] and pointed_to(folder, BEST) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "null", '{"val/loss": "1"}', '{"val/loss": null}', '{"other": 1}', '{"val/loss": 1e999}',
     '{"val/loss": NaN}', "[" * 100_000],
)  # fmt: skip
def test_metrics_that_are_no_numbers_are_no_score(folder: Path, content: str):
    path = save(folder, 1)
    (path / METRICS).write_text(content)

    assert scores(folder, "val/loss") == {}


def test_a_checkpoint_that_was_moved_and_linked_is_forgotten_but_not_deleted(folder: Path, tmp_path: Path):
    shutil.move(save(folder, 1), tmp_path / "large disk")
    (folder / name_of(1)).symlink_to(tmp_path / "large disk")
    save(folder, 2)

    retain(folder, CheckpointPlan())

    assert steps_in(folder) == [2] and find_damage(tmp_path / "large disk") is None
    assert [path.name for path in folder.glob(".*")] == []


def test_a_half_deleted_checkpoint_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for step in (1, 2):
        save(folder, step)

    def half(path: Path) -> None:
        (path / "trainer.json").unlink()
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(Died):
            retain(folder, CheckpointPlan())

    assert steps_in(folder) == [2]
    stage(folder, 3)
    assert not (folder / ".step-00000001.deleted").exists()
