"""Deep mutual learning against its paper's formula in plain PyTorch: float64, text by text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.mutual import MutualTask
from tests.tasks.normalisation_runs import Weights, difference
from tests.tasks.task_runs import LR, SHARED, TOKENS, llama, shared_texts, shared_validation, windows
from trainer import ConfigError
from trainer.data.example import Example

TOLERANCE = 1e-6  # 3 SGD steps in float32 against float64


def distributions(
    models: dict[str, Any], example: Example, *, temperature: float, vocabulary: int | None
) -> dict[str, Tensor]:
    """Returns each model's distribution over the next token where that has a label, (N, V)."""
    tokens, labels = (torch.tensor(part.tolist()) for part in (example.input_ids, example.labels))
    counted = labels[1:] != -100
    return {
        name: (model(input_ids=tokens[None]).logits[0, :-1, :vocabulary][counted] / temperature).softmax(-1)
        for name, model in models.items()
    }


def terms(
    models: dict[str, Any], examples: list[Example], *, temperature: float = 1.0, vocabulary: int | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns L_C and 1/(K-1) * sum over l != k of T² * KL(p_l || p_k), means over tokens, of each model k."""
    entropy: dict[str, list[Tensor]] = {name: [] for name in models}
    divergence: dict[str, list[Tensor]] = {name: [] for name in models}
    for example in examples:
        labels = torch.tensor(example.labels.tolist())[1:]
        labels = labels[labels != -100]
        plain = distributions(models, example, temperature=1.0, vocabulary=vocabulary)
        soft = distributions(models, example, temperature=temperature, vocabulary=vocabulary)
        for name, own in soft.items():
            entropy[name].append(-plain[name][torch.arange(len(labels)), labels].log())
            peers = [soft[peer].detach() for peer in models if peer != name]
            kls = [(p * (p.log() - own.log())).sum(-1) for p in peers]
            divergence[name].append(temperature**2 * sum(kls, torch.zeros(len(labels))) / (len(models) - 1))
    return {name: (torch.cat(entropy[name]).mean(), torch.cat(divergence[name]).mean()) for name in models}


Trained = tuple[dict[str, Weights], list[dict[str, tuple[float, float]]]]


@functools.cache
def reference(
    names: tuple[str, ...], weight: float, temperature: float = 1.0, vocabulary: int | None = None
) -> Trained:
    """Returns the weights of all models after the run, and L_C and the peers' part of each in every step."""
    models = {name: llama(name, dtype=torch.float64) for name in names}
    learning = {name: torch.optim.SGD(models[name].parameters(), lr=LR) for name in names if name != "judge"}
    examples, steps = shared_texts(), []
    for indices in windows(len(examples), SHARED):
        window = [examples[index] for index in indices]
        parts = terms(models, window, temperature=temperature, vocabulary=vocabulary)
        losses = {name: entropy + weight * divergence for name, (entropy, divergence) in parts.items()}
        gradients = {name: torch.autograd.grad(losses[name], list(models[name].parameters())) for name in learning}
        for name, optimizer in learning.items():
            for parameter, gradient in zip(models[name].parameters(), gradients[name], strict=True):
                parameter.grad = gradient
            optimizer.step()
        steps.append({name: (entropy.item(), divergence.item()) for name, (entropy, divergence) in parts.items()})
    return {name: dict(model.state_dict()) for name, model in models.items()}, steps


@pytest.fixture
def found(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    cases: dict[str, Any] = ranks[0]["mutual"]
    return cases


def check(run: dict[str, Any], expected: Trained, *, weight: float) -> None:
    weights, steps = expected
    for name in weights:
        assert difference(run["weights"][name], weights[name]) <= TOLERANCE, name
    for metrics, parts in zip(run["steps"], steps, strict=True):
        for name in weights.keys() - {"judge"}:
            entropy, divergence = parts[name]
            assert metrics[f"train/{name}/cross_entropy"] == pytest.approx(entropy, abs=1e-5)
            assert metrics[f"train/{name}/peer_kl"] == pytest.approx(divergence, abs=1e-5)
            assert metrics[f"train/{name}/loss"] == pytest.approx(entropy + weight * divergence, abs=1e-5)


def test_two_models_at_temperature_2_learn_by_the_formula_with_its_square(found: dict[str, Any]) -> None:
    expected = reference(("small", "large"), 0.5, 2.0)

    check(found["two"], expected, weight=0.5)
    for other in (reference(("small", "large"), 0.5), reference(("small", "large"), 0.125, 2.0)):  # no T; T, no square
        for name in ("small", "large"):
            assert difference(other[0][name], expected[0][name]) > 10 * TOLERANCE, "the test tells them apart"


def test_of_three_models_each_learns_from_the_mean_of_its_two_peers(found: dict[str, Any]) -> None:
    if "three" not in found:
        pytest.skip("runs on 2 ranks")

    check(found["three"], reference(("small", "large", "third"), 1.0), weight=1.0)


def test_the_engines_are_those_that_the_tests_speak_of(found: dict[str, Any]) -> None:
    stages = {case: [stage for _, stage in run["engines"].values()] for case, run in found.items() if "engines" in run}
    expected = {"two": [1, 3], "three": [1, 3, 2], "frozen": [1, 3], "weight-0": [1, 3], "padded": [2, 3]}
    assert stages == {case: expected[case] for case in stages}


def test_weight_0_is_every_model_for_itself(ranks: list[dict[str, Any]]) -> None:
    mutual, disjoint = ranks[0]["mutual"], ranks[0]["disjoint"]["shared"]["weights"]
    if "weight-0" not in mutual:
        pytest.skip("runs on 1 rank")
    for name in ("small", "large"):
        assert difference(mutual["weight-0"]["weights"][name], disjoint[name]) <= 1e-7
        assert difference(mutual["two"]["weights"][name], disjoint[name]) > 10 * TOLERANCE


def test_a_frozen_peer_teaches_and_learns_nothing(found: dict[str, Any]) -> None:
    if "frozen" not in found:
        pytest.skip("runs on 1 rank")
    run = found["frozen"]

    check(run, reference(("small", "judge"), 1.0), weight=1.0)
    assert difference(run["weights"]["judge"], dict(llama("judge").state_dict())) == 0
    assert not any(name.startswith("train/judge") for step in run["steps"] for name in step)


def test_heads_padded_to_different_sizes_are_cut_to_the_tokens(found: dict[str, Any]) -> None:
    """64 and 61 logits for 59 tokens: no mass of either goes to what is no token."""
    if "padded" not in found:
        pytest.skip("runs on 1 rank")

    check(found["padded"], reference(("padded", "large"), 1.0, 1.0, TOKENS), weight=1.0)


def test_validation_scores_every_model_and_its_distance_to_its_peers(found: dict[str, Any]) -> None:
    before = found["two"]["validations"][0]
    models = {name: llama(name) for name in ("small", "large")}
    with torch.no_grad():
        parts = terms(models, shared_validation(), temperature=2.0)

    for name, (entropy, divergence) in parts.items():
        assert before[f"val/{name}/cross_entropy"] == pytest.approx(entropy.item(), abs=1e-5)
        assert before[f"val/{name}/peer_kl"] == pytest.approx(divergence.item(), abs=1e-5)
        assert before[f"val/{name}/perplexity"] == pytest.approx(entropy.exp().item(), rel=1e-5)


def test_data_of_its_own_is_refused_with_its_key(found: dict[str, Any]) -> None:
    if "own-data" not in found:
        pytest.skip("runs on 1 rank")
    assert found["own-data"]["error"].startswith("ConfigError: models.small.data: ")


def test_one_model_has_no_peer() -> None:
    assert MutualTask().check_models({"small": True, "large": True}, stage="fit") == []
    assert MutualTask().check_models({"small": True}, stage="fit") == [
        "task=mutual needs at least two models to learn from each other; models has ['small']"
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": -0.1}, r"task\.weight=-0\.1"),
        ({"weight": float("nan")}, r"task\.weight=nan"),
        ({"temperature": 0.0}, r"task\.temperature=0"),
    ],
)
def test_impossible_settings_are_refused_by_key(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MutualTask(**settings)
