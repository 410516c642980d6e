"""Recordings against the teacher itself, whole, interrupted and on several ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing

from tasks.disjoint import DisjointTask
from tasks.distill import DistillTask
from tasks.teacher_cache import TeacherCache
from tasks.teacher_cache.manifest import MANIFEST
from tasks.teacher_cache.recording import summarise
from tasks.teacher_cache.shards import find_shards
from tests.ranks import run_ranks
from tests.tasks.task_runs import VOCABULARY
from tests.tasks.teacher_cache.cache_runs import (
    KL,
    SMALL_SHARDS,
    TOP_K,
    content_of,
    distance,
    llama,
    make_data,
    make_key,
    record,
    run_killed,
    run_two,
)
from trainer import IGNORED, ConfigError
from trainer.data.text import TextDataset
from trainer.task import find_task_problems


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one rank recorded from beginning to end."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks recorded, and what they found in training."""
    folder = tmp_path_factory.mktemp("two")
    return folder / "two", run_ranks(run_two, folder, folder=folder, world_size=2)


def test_entries_are_the_teachers_own(whole: Path) -> None:
    teacher, dataset = llama("teacher").double().eval(), make_data().train
    assert isinstance(dataset, TextDataset)
    stored = content_of(whole)

    for example in dataset.examples:
        tokens, labels = (torch.from_numpy(array.astype(np.int64)) for array in (example.input_ids, example.labels))
        counted = labels[1:] != IGNORED
        with torch.no_grad():
            expected = teacher(tokens[None]).logits[0, :-1][counted].log_softmax(-1)  # (n, V) float64
        matches = [
            entries
            for entries in stored.values()
            if len(entries) == len(expected)
            and np.allclose(entries.label_log_probs, expected.gather(-1, labels[1:][counted][:, None])[:, 0], atol=1e-4)
        ]
        assert matches or not counted.any()
        for entries in matches[:1]:
            values, ids = expected.topk(TOP_K)
            assert np.array_equal(entries.ids, ids)
            assert np.allclose(entries.log_probs, values, rtol=2**-10)
            tail = expected.scatter(-1, ids, -torch.inf).logsumexp(-1)
            assert np.allclose(entries.log_tails[:, 0], tail, atol=1e-5)


def test_normalisers_and_tails_are_those_of_the_whole_vocabulary() -> None:
    logits = torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4
    key = make_key(temperatures=(0.5, 1.0, 2.0))

    entries = summarise(logits, torch.arange(7), key)

    log_p = logits.double().log_softmax(-1)
    for column, temperature in enumerate((0.5, 2.0)):
        expected = (log_p / temperature).logsumexp(-1)
        assert np.allclose(entries.log_normalisers[:, column], expected, atol=1e-5)
    for column, temperature in enumerate(key.temperatures):
        p = (log_p / temperature).softmax(-1).sort(-1, descending=True).values
        assert np.allclose(entries.log_tails[:, column], p[:, TOP_K:].sum(-1).log(), atol=1e-5)


def test_ranks_share_the_work_and_record_the_same(whole: Path, two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert len(find_shards(two[0])) > 2
    assert distance(content_of(two[0]), content_of(whole)) < 1e-5
    keys = [json.loads((folder / MANIFEST).read_text())["key"] for folder in (whole, two[0])]
    assert keys[0] == keys[1]  # the digest of the weights too, of a replica and of shards


def test_two_ranks_train_from_it_and_refuse_missing_rows_together(two: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = two

    assert ranks[0]["steps"] == ranks[1]["steps"]
    for found in ranks:
        assert found["models"] == ["student"]
        assert "of 10 examples of data.train are not in it" in found["missing"]["error"]


def test_killed_recording_goes_on_after_the_last_whole_shard(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "killed"
    with pytest.raises(multiprocessing.ProcessExitedException):
        run_ranks(run_killed, folder, folder=tmp_path, world_size=1)
    before = find_shards(folder)
    assert len(before) == 2
    assert len(list(folder.glob(".*.part"))) == 1
    with pytest.raises(ConfigError, match="was not finished"):
        TeacherCache.open(folder)

    with caplog.at_level("INFO", logger="tasks"):
        record(folder, **SMALL_SHARDS)

    assert "rows are there already" in caplog.text
    assert set(before) < set(find_shards(folder))
    assert list(folder.glob(".*.part")) == []
    assert distance(content_of(folder), content_of(whole)) == 0


def test_finished_recording_is_not_done_again(whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {file: file.stat().st_mtime_ns for file in find_shards(whole)}

    with caplog.at_level("INFO", logger="tasks"):
        record(whole)

    assert "recording 0 batches" in caplog.text
    assert {file: file.stat().st_mtime_ns for file in find_shards(whole)} == before


def test_damaged_shard_is_recorded_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    record(folder, **SMALL_SHARDS)
    shard = find_shards(folder)[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (damage,) = TeacherCache.open(folder).find_damage()
    assert shard.name in damage

    record(folder, **SMALL_SHARDS)

    assert TeacherCache.open(folder).find_damage() == []
    assert distance(content_of(folder), content_of(whole)) == 0


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"name": "other"}, "weights: the cache has"),
        ({"top_k": 4}, "top_k: the cache has 5, this run has 4"),
        ({"temperatures": [1.0, 2.0]}, "temperatures: the cache has 1, this run has 1, 2"),
        ({"mask": "all"}, "mask: the cache has completion, this run has all"),
        ({"vocabulary": 60}, "vocabulary: the cache has 61, this run has 60"),
        ({"data": "fewer"}, "data.train: the cache has 12 examples"),
    ],
)
def test_recording_of_something_else_is_refused(whole: Path, change: dict[str, Any], part: str) -> None:
    if change.get("data") == "fewer":
        change = {"data": make_data(train=11)}

    with pytest.raises(ConfigError) as refused:
        record(whole, **change)

    assert [problem for problem in refused.value.problems if part in problem]


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")

    with pytest.raises(ConfigError, match="holds other files"):
        record(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_tasks_without_a_teacher_refuse_the_mode() -> None:
    (problem,) = find_task_problems(DisjointTask(), trainable={"small": True}, own_data=[], stage="cache_teacher")

    assert "mode=cache_teacher: DisjointTask has no such mode, only fit, validate, export" in problem


def test_recording_needs_a_path_and_a_teacher_but_no_student() -> None:
    task = DistillTask(terms=KL)

    (problem,) = find_task_problems(task, trainable={"teacher": False}, own_data=[], stage="cache_teacher")

    assert problem.startswith("task.cache.path is missing")
    assert task.models_for("cache_teacher", ["student", "teacher"]) == ["teacher"]
    assert task.models_for("fit", ["student", "teacher"]) == ["student", "teacher"]


def test_what_a_cache_must_be_of_has_no_part_in_recording_it() -> None:
    task = DistillTask(terms=KL, cache={"path": "cache", "dtype": "bfloat16", "teacher": "org/large"})

    problems = task.check_models({"teacher": False}, stage="cache_teacher")

    assert ["models.teacher.dtype" in problems[0], "models.teacher.build.name" in problems[1]] == [True, True]
    assert problems[0].startswith("task.cache.dtype=bfloat16") and problems[1].startswith(
        "task.cache.teacher=org/large"
    )


def test_vocabulary_without_a_token_of_the_examples_is_refused(tmp_path: Path) -> None:
    examples = make_data().train
    assert isinstance(examples, TextDataset)
    held_out = make_data().validation
    assert isinstance(held_out, TextDataset)
    largest = max(int(example.labels[1:].max()) for example in [*examples.examples, *held_out.examples])

    with pytest.raises(ConfigError) as refused:
        record(tmp_path, vocabulary=largest)

    (problem,) = refused.value.problems
    assert f"task.cache.vocabulary={largest}: the examples have tokens up to id {largest}; " in problem
    assert f"record with at least {largest + 1}," in problem
    assert find_shards(tmp_path) == []
    record(tmp_path, vocabulary=largest + 1)
