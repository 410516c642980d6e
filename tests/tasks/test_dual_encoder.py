"""Two encoders on one contrastive loss over all ranks: against plain PyTorch, float64, the whole batch at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.dual_encoder import DualEncoderTask
from tests.tasks.normalisation_runs import Weights, difference
from tests.tasks.task_runs import (
    ENCODER_LR,
    GATHERED,
    MICRO,
    TEMPERATURE,
    UNEVEN,
    encoder,
    gathered_loss,
    gathered_rows,
    make_pairs,
    validation_pairs,
    windows,
)
from trainer import ConfigError

TOLERANCE = 1e-6  # 3 SGD steps in float32 against float64
NAMES = ("query", "document")
Pairs = list[dict[str, Tensor]]


def embed(model: Any, texts: list[Tensor]) -> Tensor:
    """Returns the mean over a text's tokens, as a unit vector; a text at a time, without padding."""
    means = [model(input_ids=text[None]).last_hidden_state[0].mean(0) for text in texts]
    return torch.stack([mean / mean.norm() for mean in means])


def similarities(models: dict[str, Any], pairs: Pairs) -> Tensor:
    queries, documents = (embed(models[name], [pair[f"{name}_input_ids"] for pair in pairs]) for name in NAMES)
    return queries @ documents.T


def info_nce(models: dict[str, Any], pairs: Pairs) -> Tensor:
    """Returns the sum over pairs of -log softmax at the own one, the mean of both directions."""
    scores = similarities(models, pairs) / TEMPERATURE
    both = scores.softmax(1).diagonal().log() + scores.softmax(0).diagonal().log()
    return -both.sum() / 2


def retrieval(models: dict[str, Any], pairs: Pairs) -> dict[str, float]:
    with torch.no_grad():
        scores = similarities(models, pairs)
    ranks = [sorted(row.tolist(), reverse=True).index(row[i].item()) + 1 for i, row in enumerate(scores)]
    return {
        "val/top1_accuracy": sum(rank <= 1 for rank in ranks) / len(ranks),
        "val/top5_accuracy": sum(rank <= 5 for rank in ranks) / len(ranks),
        "val/mean_reciprocal_rank": sum(1 / rank for rank in ranks) / len(ranks),
    }


def fresh() -> dict[str, Any]:
    models: dict[str, Any] = {name: encoder(name).double() for name in NAMES}
    return models


@functools.cache
def reference(count: int, window: int, micro: int | None = None) -> tuple[dict[str, Weights], list[float]]:
    """Returns both encoders' weights, and the loss of each step.

    Args:
        window: Pairs of a global step.
        micro: Pairs that are each other's negatives: those of one micro-batch of all ranks; None: the whole window.
    """
    models, pairs, losses = fresh(), make_pairs(count), []
    weights = [parameter for model in models.values() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=ENCODER_LR)
    for indices in windows(count, window):
        size = micro or window
        groups = [indices[start : start + size] for start in range(0, len(indices), size)]
        loss = sum(info_nce(models, [pairs[index] for index in group]) for group in groups) / len(indices)
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # type: ignore[union-attr]
    return {name: dict(model.state_dict()) for name, model in models.items()}, losses


def loaded(weights: dict[str, Weights]) -> dict[str, Any]:
    models = fresh()
    for name, model in models.items():
        model.load_state_dict(weights[name])
    return models


@pytest.fixture
def world_size(ranks: list[dict[str, Any]]) -> int:
    return len(ranks)


@pytest.fixture
def found(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    cases: dict[str, Any] = ranks[0]["dual"]
    return cases


def check(run: dict[str, Any], expected: tuple[dict[str, Weights], list[float]]) -> None:
    weights, losses = expected
    assert {name: stage for name, (_, stage) in run["engines"].items()} == {"query": 1, "document": 3}
    for name in NAMES:
        assert difference(run["weights"][name], weights[name]) <= TOLERANCE, name
    assert [step["train/joint/loss"] for step in run["steps"]] == pytest.approx(losses, abs=1e-5)


def test_the_update_of_eight_pairs_does_not_depend_on_how_ranks_share_them(found: dict[str, Any]) -> None:
    """1 rank with 8, 2 with 4 each, 3 with 3, 3 and 2."""
    expected = reference(8, 8)

    check(found["eight"], expected)
    for name in NAMES:
        assert difference(dict(encoder(name).state_dict()), expected[0][name]) > 1000 * TOLERANCE, "it did learn"


def test_a_rank_with_nothing_but_a_filler_changes_nothing(found: dict[str, Any], world_size: int) -> None:
    """On 2 ranks the second window holds one pair, on 3 ranks two."""
    check(found["uneven"], reference(UNEVEN[world_size], MICRO[world_size] * world_size))


def test_negatives_are_those_of_one_micro_batch_of_all_ranks(found: dict[str, Any], world_size: int) -> None:
    micro = MICRO[world_size] * world_size

    if "accumulated" not in found:
        pytest.skip("runs on 1 and 2 ranks")

    check(found["accumulated"], reference(4 * micro, 2 * micro, micro))


def test_without_the_gradient_of_the_other_ranks_losses_the_update_would_be_another(
    found: dict[str, Any], world_size: int
) -> None:
    """So the tests above are seen to bite."""
    if world_size != 2:
        pytest.skip("runs on 2 ranks")
    weights, losses = reference(8, 8)

    for name in NAMES:
        assert difference(found["detached"]["weights"][name], weights[name]) > 1e-4
    assert found["detached"]["steps"][0]["train/joint/loss"] == pytest.approx(losses[0], abs=1e-5)


def test_the_logged_accuracy_is_that_of_the_whole_batch(found: dict[str, Any]) -> None:
    scores = similarities(fresh(), make_pairs(8))

    right = (scores.argmax(1) == torch.arange(8)).double().mean().item()

    assert found["eight"]["steps"][0]["train/batch_accuracy"] == pytest.approx(right)


def test_retrieval_is_over_the_whole_validation_set_whatever_its_batches(found: dict[str, Any]) -> None:
    if "validated" not in found:
        pytest.skip("runs on 1 and 2 ranks")
    expected = retrieval(fresh(), validation_pairs())

    for metrics in found["validated"].values():
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_each_validation_of_a_run_counts_from_the_beginning(found: dict[str, Any]) -> None:
    run = found["eight"]
    before, after = fresh(), loaded(reference(8, 8)[0])

    expected = [retrieval(models, validation_pairs()) for models in (before, after)]

    assert len(run["validations"]) == 3
    for metrics, values in zip((run["validations"][0], run["validations"][-1]), expected, strict=True):
        assert {name: metrics[name] for name in values} == pytest.approx(values, abs=1e-6)


def test_an_export_is_scored_on_its_few_batches_alone_and_as_often_as_asked(
    found: dict[str, Any], world_size: int
) -> None:
    pairs, trained = validation_pairs(), loaded(reference(8, 8)[0])
    first = pairs[: MICRO[world_size] * world_size]

    expected = retrieval(trained, first)
    expected["val/contrastive_loss"] = info_nce(trained, first).item() / len(first)

    for metrics in found["eight"]["rescored"]:
        assert metrics == pytest.approx(expected, abs=1e-5)
    whole = retrieval(trained, pairs)
    assert {name: found["eight"]["evaluated"][name] for name in whole} == pytest.approx(whole, abs=1e-6)


def test_vectors_of_two_sizes_and_data_of_its_own_are_refused(found: dict[str, Any]) -> None:
    if "refused" not in found:
        pytest.skip("runs on 1 rank")
    assert "models.query gives vectors of size 24, models.document of size 32" in found["refused"]["sizes"]["error"]
    assert found["refused"]["own data"]["error"].startswith("ConfigError: models.query.data: ")


# Retrieval by hand


def score(queries: Tensor, documents: Tensor) -> dict[str, float]:
    """Returns what the task derives from encoders that give these vectors, (N, D) each, in batches of 4."""
    task = DualEncoderTask()
    task.trainer = SimpleNamespace(is_filler=False)  # type: ignore[assignment]
    for index, rows in enumerate(torch.split(torch.arange(len(queries)), 4)):
        states: dict[str, Callable[..., Tensor]] = {
            "query": lambda rows=rows, **_: queries[rows, None],
            "document": lambda rows=rows, **_: documents[rows, None],
        }
        task.models = states  # type: ignore[assignment]
        text = torch.ones(len(rows), 1, dtype=torch.long)
        task.validation_step(
            {f"{name}_{part}": text for name in NAMES for part in ("input_ids", "attention_mask")}, index
        )
    return task.derive_metrics({})


def test_a_pair_that_is_nearest_to_itself_is_found() -> None:
    vectors = torch.eye(10)

    assert score(vectors, 3 * vectors) == {"top1_accuracy": 1.0, "top5_accuracy": 1.0, "mean_reciprocal_rank": 1.0}


def test_the_rank_counts_the_documents_that_are_nearer() -> None:
    """Angles in degrees: 40 is 9 from 31, its own is 15; 25 is 6 from its own 31; 5 is 75 from its own 80."""
    queries, documents = (
        (torch.tensor(angles) / 57.29578) for angles in ([0.0, 40.0, 25.0, 5.0], [1.0, 15.0, 31.0, 80.0])
    )
    vectors = [torch.stack([angles.cos(), angles.sin()], 1) for angles in (queries, documents)]

    metrics = score(*vectors)

    assert metrics == pytest.approx({"top1_accuracy": 0.5, "top5_accuracy": 1.0, "mean_reciprocal_rank": 2.75 / 4})


@pytest.mark.parametrize("kind", ["all equal", "zero", "not a number"])
def test_encoders_that_tell_nothing_apart_find_nothing(kind: str) -> None:
    torch.manual_seed(0)
    row = {"all equal": torch.randn(33), "zero": torch.zeros(33), "not a number": torch.full((33,), torch.nan)}[kind]
    vectors = row.expand(301, 33)

    assert score(vectors, vectors) == pytest.approx(
        {"top1_accuracy": 0.0, "top5_accuracy": 0.0, "mean_reciprocal_rank": 1 / 301}
    )


def test_a_document_as_near_as_the_own_one_stands_before_it() -> None:
    vectors = torch.eye(8)
    vectors[1] = vectors[0]

    metrics = score(vectors, vectors)

    assert metrics["top1_accuracy"] == pytest.approx(6 / 8)
    assert metrics["mean_reciprocal_rank"] == pytest.approx((6 + 2 / 2) / 8)


def test_encoders_that_tell_nothing_apart_are_not_right_in_training_either() -> None:
    task = DualEncoderTask()
    task.trainer = SimpleNamespace(is_filler=False)  # type: ignore[assignment]
    same: Any = lambda **_: torch.ones(16, 2, 4)  # noqa: E731
    task.models = dict.fromkeys(NAMES, same)
    text = torch.ones(16, 2, dtype=torch.long)
    batch = {f"{name}_{part}": text for name in NAMES for part in ("input_ids", "attention_mask")}

    right, count = task.training_step(batch, 0).metrics["batch_accuracy"]  # type: ignore[misc]

    assert (int(right), count) == (1, 16)


# Roles and settings


def test_wrong_roles_and_settings_are_refused_by_key() -> None:
    trainable = {"query": True, "document": True}

    assert DualEncoderTask().check_models(trainable, stage="fit") == []
    assert DualEncoderTask(document="doc").check_models(trainable, stage="fit") == [
        "task.document=doc: models has no doc, only query, document"
    ]
    assert DualEncoderTask(document="query").check_models(trainable, stage="fit") == [
        "task.query and task.document are both 'query'; name two models"
    ]
    with pytest.raises(ConfigError, match=r"task\.temperature=0"):
        DualEncoderTask(temperature=0)


# The gather alone


def test_rows_of_all_ranks_come_in_their_order_and_their_gradient_is_that_of_one_process(
    ranks: list[dict[str, Any]], world_size: int
) -> None:
    """Ranks with 2, 0 and 3 rows, each with a loss of its own in all of them."""
    parts = [gathered_rows(rank).requires_grad_() for rank in range(world_size)]
    everything = torch.cat(parts)
    total = sum(gathered_loss(rank, everything) for rank in range(world_size))
    total.backward()  # type: ignore[union-attr]

    assert [len(part) for part in parts] == list(GATHERED[:world_size])
    for rank, part in enumerate(parts):
        gathered = ranks[rank]["gather"]
        torch.testing.assert_close(gathered["rows"], everything.detach(), rtol=0, atol=0)
        assert gathered["first"] == sum(GATHERED[:rank])
        torch.testing.assert_close(gathered["gradient"], part.grad, rtol=1e-6, atol=1e-6)
