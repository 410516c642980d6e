"""Look-ups by content: whatever the batch, the teacher's own numbers in the right order."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.losses import forward_kl, generalised_jsd, reverse_kl
from tasks.teacher_cache import Reading, TeacherCache
from tasks.teacher_cache.manifest import Manifest, write_manifest
from tasks.teacher_cache.reader import layout_of
from tasks.teacher_cache.recording import summarise
from tasks.teacher_cache.rows import describe_rows
from tasks.teacher_cache.shards import write_shard
from tasks.text.language import MASKS, next_tokens
from tests.tasks.task_runs import VOCABULARY
from tests.tasks.teacher_cache.cache_runs import (
    SMALL_SHARDS,
    TOP_K,
    llama,
    make_data,
    make_key,
    record,
    write_empty_cache,
)
from tests.tasks.teacher_cache.test_shards import make_entries
from trainer import Batch, ConfigError
from trainer.data import PaddingCollator


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of all positions in several shards, with two temperatures."""
    folder = tmp_path_factory.mktemp("reader") / "cache"
    record(folder, mask="all", temperatures=[2.0], **SMALL_SHARDS)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of all tokens of the vocabulary."""
    folder = tmp_path_factory.mktemp("reader") / "cache"
    record(folder, top_k=1000, temperatures=[2.0])
    return folder


def make_batch(*indices: int, side: str = "right") -> Batch:
    dataset = make_data().train
    assert dataset is not None
    return PaddingCollator(0, padding_side=side)([dataset[index] for index in indices])  # type: ignore[arg-type]


@torch.no_grad()
def live_log_probs(batch: Batch, counted: Tensor) -> Tensor:
    """Returns the teacher's log-probabilities, (N, V) float64."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits: Tensor = llama("teacher").eval()(**given).logits[:, :-1][counted]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("mask", ["completion", "all"])
@pytest.mark.parametrize("indices", [(0, 1, 2), (7,), (11, 3, 8, 0, 5), (4,)])
def test_lookup_is_what_the_teacher_says(folder: Path, indices: tuple[int, ...], mask: str, side: str) -> None:
    cache, batch = TeacherCache.open(folder), make_batch(*indices, side=side)
    counted = MASKS[mask](batch)

    top, label_log_probs = cache.lookup(batch, counted)

    expected = live_log_probs(batch, counted)
    values, ids = expected.topk(TOP_K)
    assert torch.equal(top.ids, ids)
    assert torch.allclose(top.log_probs.double(), values, rtol=2**-10, atol=1e-4)
    exact = expected.gather(-1, next_tokens(batch, counted).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(label_log_probs.double(), exact, atol=1e-5)
    assert torch.allclose(top.log_normalisers[2.0].double(), (expected / 2).logsumexp(-1), atol=1e-5)
    assert torch.equal(top.log_normalisers[1.0], torch.zeros(len(ids)))
    mass = values.exp().sum(-1)
    assert torch.allclose(top.log_probs.double().exp().sum(-1), mass, atol=2e-6)  # nearer than float16 is


def test_some_of_the_positions_can_be_asked_for(folder: Path) -> None:
    cache, batch = TeacherCache.open(folder), make_batch(0, 2, 7)
    counted = MASKS["all"](batch)
    chosen = counted & (torch.rand(counted.shape, generator=torch.Generator().manual_seed(0)) < 0.5)

    every, some = cache.lookup(batch, counted)[0], cache.lookup(batch, chosen)[0]

    assert 0 < len(some) < len(every)
    assert torch.equal(some.ids, every.ids[chosen[counted]])


def test_no_position_is_no_row(folder: Path) -> None:
    batch = make_batch(0, 1)

    top, labels = TeacherCache.open(folder).lookup(batch, torch.zeros_like(MASKS["all"](batch)))

    assert top.ids.shape == (0, TOP_K) and top.ids.dtype == torch.int64
    assert labels.shape == top.log_normalisers[2.0].shape == (0,)


@pytest.mark.parametrize("function", [forward_kl, reverse_kl])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_over_all_tokens_is_that_of_the_whole_distribution(whole: Path, function, temperature: float) -> None:  # type: ignore[no-untyped-def]
    cache, batch = TeacherCache.open(whole), make_batch(0, 1, 2, 3)
    counted = MASKS["completion"](batch)
    top, _ = cache.lookup(batch, counted)
    generator = torch.Generator().manual_seed(3)
    student = (torch.randn(len(top), VOCABULARY, generator=generator) * 2).requires_grad_()
    teacher = live_log_probs(batch, counted)

    dense = function(student, teacher.float(), temperature=temperature)
    stored = function(student, top, temperature=temperature)

    assert cache.key.top_k == VOCABULARY
    assert torch.allclose(stored, dense, rtol=2e-3, atol=1e-4)
    gradients = [torch.autograd.grad(loss.sum(), student)[0] for loss in (dense, stored)]
    assert torch.allclose(*gradients, atol=2e-3)


def reduced(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities of the tokens and of all others together, (N, K + 1) float64."""
    p = (logits.double() / temperature).softmax(-1)
    return torch.cat([p.gather(-1, ids), p.scatter(-1, ids, 0).sum(-1, keepdim=True)], -1).log()


def textbook_jsd(q: Tensor, p: Tensor) -> Tensor:
    middle = ((q.exp() + p.exp()) / 2).log()
    return ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("function", "textbook"),
    [
        (forward_kl, lambda q, p: (p.exp() * (p - q)).sum(-1)),
        (reverse_kl, lambda q, p: (q.exp() * (q - p)).sum(-1)),
        (generalised_jsd, textbook_jsd),
    ],
    ids=["forward_kl", "reverse_kl", "jsd"],
)
def test_very_sure_teacher_keeps_its_tail(tmp_path: Path, function: Any, textbook: Any, temperature: float) -> None:
    # Tails of 1e-4 down to 1e-14: what 1 - the sum of K rounded probabilities leaves is noise.
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(6, VOCABULARY, generator=generator)
    teacher[torch.arange(6), torch.arange(6) * 7] += torch.linspace(14, 36, 6)
    student = torch.randn(6, VOCABULARY, generator=generator)
    key = make_key(temperatures=(0.5, 1.0, 2.0))
    item = {"input_ids": torch.arange(1, 8), "labels": torch.arange(1, 8)}
    batch = PaddingCollator(0)([item])
    digest = describe_rows(batch, mask="completion").digests.tobytes()
    blob = layout_of(key).pack(summarise(teacher, item["labels"][1:], key))
    write_manifest(
        tmp_path, Manifest(key=key, complete=True, shards={write_shard(tmp_path, {digest: (blob, 6)}).name: 1})
    )

    top, _ = TeacherCache.open(tmp_path).lookup(batch, MASKS["completion"](batch))
    stored = function(student, top, temperature=temperature)

    ids = teacher.topk(TOP_K).indices
    q, p = (reduced(logits, ids, temperature) for logits in (student, teacher))
    assert p[-1, -1] < math.log(1e-6)
    # float16 rounds each of the K by 2**-11 of itself; the loss weighs these errors by q at most.
    rounding = (q.exp().max(-1).values + p.exp().max(-1).values) * 2**-11 * top.log_probs.abs().amax(-1) / temperature
    error = (stored.double() / temperature**2 - textbook(q, p)).abs()
    assert (error <= rounding + 1e-5).all()


def test_rows_that_are_not_there_are_refused(folder: Path) -> None:
    cache, batch = TeacherCache.open(folder), make_batch(0, 1)
    batch["input_ids"][0, 0] += 1

    with pytest.raises(ConfigError, match="1 of 2 rows of a batch are not in it"):
        cache.lookup(batch, MASKS["completion"](batch))
    assert cache.count_missing(describe_rows(batch, mask="all").digests) == 1


def test_positions_beyond_the_recorded_mask_are_refused(whole: Path) -> None:
    batch = make_batch(2)

    with pytest.raises(ConfigError, match=r"record with task\.cache\.mask=all"):
        TeacherCache.open(whole).lookup(batch, MASKS["all"](batch))


def test_what_is_no_finished_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no teacher cache; record it with mode=cache_teacher"):
        TeacherCache.open(tmp_path)
    write_manifest(tmp_path, Manifest(key=make_key(), complete=False))
    with pytest.raises(ConfigError, match="was not finished"):
        TeacherCache.open(tmp_path)


def test_damaged_and_missing_shards_are_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cache = TeacherCache.open(tmp_path)
    assert cache.find_damage() == []
    cache.shards[0].unlink()
    cache.shards[1].write_bytes(cache.shards[1].read_bytes()[:-1] + b"?")

    problems = cache.find_damage(rank=0, world_size=2) + cache.find_damage(rank=1, world_size=2)

    assert [cache.shards[0].name in problems[0], cache.shards[1].name in problems[1]] == [True, True]
    assert "is missing" in problems[0] and "sha256 differs" in problems[1]


def test_temperature_without_a_normaliser_is_refused_with_those_there_are(folder: Path) -> None:
    readings = {name: Reading(mask="all", temperature=value) for name, value in (("kl", 4.0), ("other", 2.0))}

    (problem,) = TeacherCache.open(folder).find_reading_problems(readings)

    assert problem.startswith("task.terms.kl.temperature=4: the cache has the normalisers of 1, 2 only")
    assert "task.cache.temperatures=[1,2,4]" in problem


def test_terms_that_need_more_tokens_or_other_positions_are_refused(whole: Path, folder: Path) -> None:
    def problems(cache: Path, **needed: Any) -> list[str]:
        reading = Reading(**{"mask": "completion", "temperature": 1.0, **needed})
        return TeacherCache.open(cache).find_reading_problems({"kl": reading})

    (too_many,) = problems(folder, top_k=TOP_K + 1)
    (elsewhere,) = problems(whole, mask="prompt", temperature=None)

    assert too_many.startswith(f"task.terms.kl.top_k={TOP_K + 1}: the cache has the {TOP_K} most likely tokens")
    assert f"record with task.cache.top_k={TOP_K + 1}" in too_many
    assert elsewhere.startswith("task.terms.kl.mask=prompt: the cache holds the tokens of mask completion only")
    assert problems(folder, top_k=TOP_K) == problems(folder, mask="prompt") == problems(whole) == []


def test_student_with_fewer_logits_is_refused(tmp_path: Path) -> None:
    write_empty_cache(tmp_path)
    cache = TeacherCache.open(tmp_path)

    assert cache.check_vocabulary(64) == cache.check_vocabulary(None) == VOCABULARY
    with pytest.raises(ConfigError, match="the student has 60"):
        cache.check_vocabulary(60)


def test_a_thousand_tokens_are_found_in_milliseconds(tmp_path: Path) -> None:
    key = make_key(vocabulary=151_936, top_k=64, temperatures=(1.0, 2.0))
    layout, rows = layout_of(key), {}
    items = [{"input_ids": torch.randint(1, 60, (129,))} for _ in range(64)]
    items = [{**item, "labels": item["input_ids"]} for item in items]
    for number, item in enumerate(items):
        digest = describe_rows({name: value[None] for name, value in item.items()}, mask="completion").digests
        rows[digest.tobytes()] = (layout.pack(make_entries(128, layout, seed=number)), 128)
    write_manifest(tmp_path, Manifest(key=key, complete=True, shards={write_shard(tmp_path, rows).name: 1}))
    cache, seconds = TeacherCache.open(tmp_path), []
    for start in range(0, 64, 8):
        batch = PaddingCollator(0)(items[start : start + 8])
        counted, began = MASKS["completion"](batch), time.perf_counter()
        top, _ = cache.lookup(batch, counted)
        seconds.append(time.perf_counter() - began)

    assert top.ids.shape == (1024, 64)
    print(f"{1000 * float(np.median(seconds)):.2f} ms for 1,024 tokens x 64")
    assert np.median(seconds) < 0.1  # of a step that takes seconds
