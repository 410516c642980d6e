"""The two commands as a user gives them, on tiny random models, and what is refused with status 2."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.test_examples import run
from trainer import check
from trainer.compose import Request, compose_run, conf_dir

TINY = [
    *("-m", "trainer", "model@models.student.build=tiny_llama", "data.tokenizer=embedded:bpe-4k", "logger=jsonl"),
    *(
        "callbacks=null",
        "task.preflight.teacher_is_trained=false",
        "data.train=train.jsonl",
        "data.batch_size=4",
        "trainer.max_steps=2",
        "trainer.log_every=1",
    ),
]
LIVE, CACHED = "model@models.teacher.build=tiny_llama", "task/teacher=cached"
CACHE = "task.cache.path=cache"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([*TINY, *arguments], folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a cache of it, which was recorded with a plugin of the teacher's own."""
    folder = tmp_path_factory.mktemp("command")
    rows = [{"prompt": f"how many are {number}?", "completion": f"there are {number}"} for number in range(24)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    result = python(
        folder,
        *("mode=cache_teacher", CACHE, LIVE, "task.cache.top_k=16", "plugin@models.teacher.plugin=zero3_inference"),
        "hydra.run.dir=recorded",
    )

    assert result.returncode == 0, result.stderr[-4000:]
    assert "building student" not in result.stderr
    assert "bytes per token" in result.stderr
    return folder


def test_recording_leaves_its_size_and_no_metrics_of_a_training(folder: Path) -> None:
    (record,) = (json.loads(line) for line in (folder / "recorded" / "metrics.jsonl").read_text().splitlines())
    summary = json.loads((folder / "recorded" / "summary.json").read_text())

    assert record["step"] == 0
    assert record["cache/tokens"] > 100
    assert record["cache/raw_bytes_per_token"] == 16 * 4 + 8
    assert (summary["status"], summary["global_step"], summary["after"]) == ("completed", 0, {})
    assert not (folder / "recorded" / "export").exists()


def test_training_from_the_cache_and_its_saved_configuration_once_more(folder: Path) -> None:
    trained = python(folder, CACHED, CACHE, "hydra.run.dir=trained")
    again = run(
        ["-m", "trainer", "--config-path=trained", "--config-name=config", "hydra.run.dir=again"], folder=folder
    )

    assert (trained.returncode, again.returncode) == (0, 0), trained.stderr[-4000:] + again.stderr[-4000:]
    assert "building teacher" not in trained.stderr
    logs = [
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("trained", "again")
    ]
    assert [record["train/student/forward_kl"] for record in logs[0] if "train/loss" in record] == [
        record["train/student/forward_kl"] for record in logs[1] if "train/loss" in record
    ]
    assert "- Teacher: `LlamaForCausalLM`" in (folder / "trained" / "export" / "student" / "README.md").read_text()


def test_another_split_is_refused(folder: Path) -> None:
    result = python(folder, CACHED, CACHE, "data.split_seed=1")

    assert result.returncode == 2
    assert "data.train: the cache has" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mode=cache_teacher", LIVE], "task.cache.path is missing: mode=cache_teacher writes there"),
        ([CACHED], "task.cache.path is missing; give it: task.cache.path=..."),
        ([CACHED, "task.cache.path=none"], "there is no teacher cache; record it with mode=cache_teacher"),
        (["task=disjoint", "mode=cache_teacher"], "mode=cache_teacher: DisjointTask has no such mode"),
        (["task=disjoint", CACHED], "the task that is chosen has nothing of group task/teacher; drop it"),
        (["task/teachr=cached"], "there is no group task/teachr; did you mean task/teacher?"),
        (["mode=cache_teacher", CACHE, "resume=auto"], "goes on by itself; drop resume"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_started(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    composition = compose_run(Request(overrides=tuple(arguments), config_path=conf_dir()))
    found = check.problems(composition.cfg, composition.overrides) if composition.cfg is not None else []

    assert [problem for problem in composition.problems + found if text in problem]
