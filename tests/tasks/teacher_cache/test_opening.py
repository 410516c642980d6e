"""Training from a cache: the same as beside the teacher, and refused where it would not be."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.distill import DistillTask
from tasks.teacher_cache import find_cache_problems, parse_options
from tasks.teacher_cache.key import find_token_problems
from tasks.teacher_cache.manifest import Manifest, read_manifest, write_manifest
from tasks.teacher_cache.shards import find_shards
from tests.tasks.teacher_cache.cache_runs import KL, SMALL_SHARDS, make_data, record, train
from trainer import ConfigError

# A live teacher cut as the cache is; and the cache, which no function but the known ones may read.
CUT = {"kl": {"function": "tests.tasks.teacher_cache.cache_runs.truncated_kl", "temperature": 2.0}}
STORED = {"kl": {"function": "forward_kl", "temperature": 2.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opening") / "cache"
    record(folder, temperatures=[1.0, 2.0], **SMALL_SHARDS)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same cache, to be spoilt."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_key(folder: Path, **parts: Any) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    key = dataclasses.replace(manifest.key, **parts)
    write_manifest(folder, Manifest(key=key, complete=True, shards=manifest.shards))


def largest_change(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_training_from_the_cache_is_training_beside_the_teacher(folder: Path) -> None:
    live = train(None, teacher="teacher", terms=CUT)[1]
    trainer, cached = train(folder, terms=STORED)
    start = train(None, teacher="teacher", terms=CUT, steps=1)[1]

    for left, right in zip(live["steps"], cached["steps"], strict=True):
        assert left["train/student/kl"] == pytest.approx(right["train/student/kl"], rel=1e-3)
    moved = largest_change(start["weights"]["student"], live["weights"]["student"])
    assert largest_change(live["weights"]["student"], cached["weights"]["student"]) < 2e-3 * moved + 1e-6
    assert list(trainer.models) == ["student"]  # no teacher in memory
    assert trainer.task.reference_name == "LlamaForCausalLM"


def test_reference_scores_are_exact_and_divergences_lower_bounds(folder: Path) -> None:
    beside, alone = train(None, teacher="teacher", steps=1)[0], train(folder, steps=1)[0]

    for name in ("val/cross_entropy", "val/perplexity"):
        assert alone.reference[name] == pytest.approx(beside.reference[name], rel=1e-5)
    for name in ("val/cross_entropy", "val/top1_agreement"):
        assert alone.before[name] == pytest.approx(beside.before[name], rel=1e-5)
    for name in ("val/forward_kl", "val/reverse_kl"):
        assert 0.2 * beside.before[name] < alone.before[name] < beside.before[name]


def test_teacher_at_hand_is_compared(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tasks"):
        train(folder, teacher="teacher", steps=1)
    assert "the cache is what models.teacher says, within 0.0" in caplog.text

    with pytest.raises(ConfigError, match=r"weights: the cache has .*, this run has") as refused:
        train(folder, teacher="other", steps=1)
    assert len(refused.value.problems) == 1


def test_teacher_that_says_something_else_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its weights are those of the recording; what it makes of them, with another kernel or a mask, is not.
    import tasks.teacher_cache.opening as opening

    genuine = opening.live_entries

    def shifted(*args: Any) -> Any:
        entries = genuine(*args)
        entries.log_probs[0, 0] -= 0.25
        return entries

    monkeypatch.setattr(opening, "live_entries", shifted)

    with pytest.raises(ConfigError, match=r"up to 0\.2.. nats from those of models.teacher on a sample"):
        train(copy, teacher="teacher", steps=1)


@pytest.mark.parametrize("part", ["tokenizer", "template"])
def test_part_that_the_data_decide_is_compared(copy: Path, part: str) -> None:
    change_key(copy, **{part: "f" * 64})

    with pytest.raises(ConfigError, match=f"{part}: the cache has {'f' * 16}..., this run has none"):
        train(copy, steps=1)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"teacher": "org/large"}, "teacher: the cache has LlamaForCausalLM, this run has org/large"),
        ({"dtype": "bfloat16"}, "dtype: the cache has float32, this run has bfloat16"),
        ({"top_k": 7}, "top_k: the cache has 5, this run has 7"),
        ({"temperatures": [4.0]}, "temperatures: the cache has 1, 2, this run has 4"),
        ({"mask": "all"}, "mask: the cache has completion, this run has all"),
        ({"vocabulary": 60}, "vocabulary: the cache has 61, this run has 60"),
    ],
)
def test_part_that_is_asked_for_is_compared_before_any_model_is_built(
    folder: Path, asked: dict[str, Any], text: str
) -> None:
    task = DistillTask(terms=KL, cache={"path": str(folder), **asked})

    (problem,) = task.check_models({"student": True}, stage="fit")

    assert text in problem


def test_terms_that_no_cache_serves_are_refused_together_at_the_check(folder: Path) -> None:
    terms = {
        "many": {"function": "forward_kl", "top_k": 6},
        "prompts": {"function": "reverse_kl", "mask": "prompt"},
        "labels": {"function": "cross_entropy", "mask": "all"},
        "scheduled": {"function": "forward_kl", "temperature": {"start": 1.0, "end": 2.0, "steps": 4}},
        "own": CUT["kl"],
        "states": {"function": "hidden_mse", "layers": {"model.norm": "model.norm"}},
    }

    problems = DistillTask(terms=terms, cache={"path": str(folder)}).check_models({"student": True}, stage="fit")

    parts = [
        "many.top_k=6",
        "prompts.mask=prompt",
        "labels.mask=all",
        "scheduled.temperature",
        "own.function",
        "states",
    ]
    assert [part for part, text in zip(parts, problems, strict=True) if not text.startswith(f"task.terms.{part}")] == []


def test_routes_need_live_teachers(folder: Path) -> None:
    task = DistillTask(terms=KL, combine="routes", routes={"*": "teacher"}, cache={"path": str(folder)})

    (problem,) = task.check_models({"student": True}, stage="fit")

    assert "task.combine=routes needs live teachers" in problem


def test_other_data_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.train: the cache has 12 examples .*, this run has 11 examples"):
        train(folder, data=make_data(train=11), steps=1)


def test_vocabulary_without_all_tokens_of_the_data_is_refused(copy: Path) -> None:
    change_key(copy, vocabulary=10)
    with pytest.raises(ConfigError, match=r"vocabulary=10: the examples have tokens up to id \d\d; record with at"):
        train(copy, steps=1)

    trainer: Any = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"last": 60}))
    (problem,) = find_token_problems(trainer, vocabulary=60, largest=0)
    assert "task.cache.vocabulary=60: the tokenizer of the data has 61 ids; record with at least 61" in problem
    assert find_token_problems(trainer, vocabulary=61, largest=60) == []


def test_damaged_shard_is_named_before_step_1(copy: Path) -> None:
    shard = find_shards(copy)[0]
    shard.write_bytes(shard.read_bytes()[:-3] + b"???")

    with pytest.raises(ConfigError, match=f"{shard.name} does not hold what was written"):
        train(copy, steps=1)


def test_temperature_without_a_normaliser_is_refused_at_the_check(folder: Path) -> None:
    terms = {"kl": {"function": "forward_kl", "temperature": 3.0}}

    (problem,) = DistillTask(terms=terms, cache={"path": str(folder)}).check_models({"student": True}, stage="fit")

    assert "task.terms.kl.temperature=3: the cache has the normalisers of 1, 2 only" in problem


def test_absent_cache_is_one_problem(tmp_path: Path) -> None:
    (problem,) = find_cache_problems(parse_options({"path": str(tmp_path / "nothing")}), {})

    assert "there is no teacher cache; record it with mode=cache_teacher" in problem


def test_no_teacher_and_no_cache_is_refused() -> None:
    (problem,) = DistillTask(terms=KL).check_models({"student": True}, stage="fit")

    assert "task.teacher=teacher: models has no teacher" in problem
