"""Several language models in one run learn what each would alone: against plain PyTorch in float64, text by text."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.disjoint import DisjointTask
from tests.tasks.normalisation_runs import Weights, difference
from tests.tasks.task_runs import (
    LR,
    OWN,
    SHARED,
    STEPS,
    llama,
    own_texts,
    own_validation,
    shared_texts,
    shared_validation,
    windows,
)
from trainer.data.example import Example

TOLERANCE = 1e-6  # 3 SGD steps in float32 against float64

TEXTS = {"shared": (shared_texts, SHARED), "own": (own_texts, OWN)}


def text_loss(model: Any, example: Example) -> tuple[Tensor, int]:
    """Returns the sum of the cross-entropies of a text and their number; an unlabelled token counts for nothing."""
    tokens, labels = (torch.tensor(part.tolist()) for part in (example.input_ids, example.labels))
    logits = model(input_ids=tokens[None]).logits[0, :-1]
    return F.cross_entropy(logits, labels[1:], reduction="sum"), int((labels[1:] != -100).sum())


@functools.cache
def reference(name: str, texts: str, updates: tuple[int, ...] = (1, 2, 3)) -> tuple[Weights, list[float]]:
    """Returns the weights of one model alone, updated in those steps only, and its loss in each of them."""
    model, (make, size) = llama(name, dtype=torch.float64), TEXTS[texts]
    optimizer, examples, losses = torch.optim.SGD(model.parameters(), lr=LR), make(), []
    for step, indices in enumerate(windows(len(examples), size, wraps=True), start=1):
        if step not in updates:
            continue
        sums, counts = zip(*(text_loss(model, examples[index]) for index in indices), strict=True)
        loss = sum(sums) / sum(counts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return dict(model.state_dict()), losses


def entropy(model: Any, examples: list[Example]) -> float:
    with torch.no_grad():
        parts = [text_loss(model, example) for example in examples]
    sums, counts = [total for total, _ in parts], [count for _, count in parts]
    return torch.stack(sums).sum().item() / sum(counts)


@pytest.fixture
def found(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    cases: dict[str, Any] = ranks[0]["disjoint"]
    return cases


def test_the_engines_are_those_that_the_tests_speak_of(found: dict[str, Any]) -> None:
    zero1, zero3 = ("DeepSpeedEngine", 1), ("DeepSpeedEngine", 3)
    assert found["shared"]["engines"] == {"small": zero1, "large": zero3, "judge": ("LlamaForCausalLM", None)}
    assert found["own"]["engines"] == {"small": zero1, "large": zero3}
    if "swapped" in found:
        assert found["swapped"]["engines"] == {"small": zero3, "large": zero1}


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_model_learns_beside_others_what_it_learns_alone(found: dict[str, Any], name: str) -> None:
    weights, losses = reference(name, "shared")

    for case in {"shared", "swapped"} & found.keys():
        assert difference(found[case]["weights"][name], weights) <= TOLERANCE, case
        assert [step[f"train/{name}/loss"] for step in found[case]["steps"]] == pytest.approx(losses, abs=1e-5)
    assert difference(dict(llama(name).state_dict()), weights) > 1000 * TOLERANCE, "it did learn"


def test_the_logged_loss_is_the_sum_over_the_models(found: dict[str, Any]) -> None:
    for step in found["shared"]["steps"]:
        assert step["train/loss"] == pytest.approx(step["train/small/loss"] + step["train/large/loss"])


def test_a_model_with_data_of_its_own_learns_from_these_and_the_other_from_the_shared(found: dict[str, Any]) -> None:
    """18 texts of its own in windows of 12, beside 12 in windows of 6."""
    own = found["own"]
    for name, texts in (("small", "own"), ("large", "shared")):
        weights, losses = reference(name, texts)
        assert difference(own["weights"][name], weights) <= TOLERANCE, name
        assert [step[f"train/{name}/loss"] for step in own["steps"]] == pytest.approx(losses, abs=1e-5)
    assert difference(reference("small", "own")[0], reference("small", "shared")[0]) > 100 * TOLERANCE


def test_each_model_is_scored_on_its_own_validation_set_of_whatever_length(found: dict[str, Any]) -> None:
    """19 texts of its own beside 7 shared ones: the shorter set ends early, and its fillers count for nothing."""
    before = found["own"]["validations"][0]

    assert before["val/small/cross_entropy"] == pytest.approx(entropy(llama("small"), own_validation()), abs=1e-5)
    assert before["val/large/cross_entropy"] == pytest.approx(entropy(llama("large"), shared_validation()), abs=1e-5)


def test_the_closing_scores_are_those_of_the_trained_weights(found: dict[str, Any]) -> None:
    after = found["shared"]["validations"][-1]
    for name in ("small", "large"):
        model = llama(name, dtype=torch.float64)
        model.load_state_dict(reference(name, "shared")[0])
        assert after[f"val/{name}/cross_entropy"] == pytest.approx(entropy(model, shared_validation()), abs=1e-5)


def test_a_frozen_model_is_scored_and_neither_trained_nor_called_in_training(found: dict[str, Any]) -> None:
    shared = found["shared"]
    score = entropy(llama("judge"), shared_validation())

    assert [metrics["val/judge/cross_entropy"] for metrics in shared["validations"]] == pytest.approx([score] * 2)
    assert shared["forwards"]["judge"] == []
    assert difference(shared["weights"]["judge"], dict(llama("judge").state_dict())) == 0
    assert not any(name.startswith("train/judge") for step in shared["steps"] for name in step)


def test_a_model_outside_its_update_window_costs_no_forward(found: dict[str, Any]) -> None:
    if "window" not in found:
        pytest.skip("runs on 1 and 2 ranks")
    window = found["window"]

    assert {name: sorted(set(steps)) for name, steps in window["forwards"].items()} == {
        "small": [2],
        "large": [1, 2, 3],
    }
    assert len(window["forwards"]["small"]) == 1, "one micro-batch, one forward"
    assert difference(window["weights"]["small"], reference("small", "shared", (2,))[0]) <= TOLERANCE
    assert difference(window["weights"]["large"], reference("large", "shared")[0]) <= TOLERANCE
    losses = [step.get("train/small/loss") for step in window["steps"]]
    assert losses[0] is None and losses[1] == losses[2], "the third step shows the last loss"


def test_perplexity_is_the_exponential_of_the_cross_entropy(found: dict[str, Any]) -> None:
    for metrics in found["shared"]["validations"]:
        for name in ("small", "large", "judge"):
            assert metrics[f"val/{name}/perplexity"] == pytest.approx(math.exp(metrics[f"val/{name}/cross_entropy"]))


def test_a_models_name_may_be_that_of_the_metric() -> None:
    derived = DisjointTask().derive_metrics({"cross_entropy/cross_entropy": 1.0, "cross_entropy/other": 2.0})

    assert derived == {"cross_entropy/perplexity": pytest.approx(math.e)}


def test_a_window_has_a_text_without_a_label_and_there_are_steps_of_two_epochs() -> None:
    assert any(example.num_counted == 0 for example in shared_texts())
    assert len(shared_texts()) < STEPS * SHARED
