"""Supervised fine-tuning: its update and its numbers against plain PyTorch in float64, cuts, LoRA, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tasks.sft import SFTTask
from tests.tasks.sft_runs import one_update, plain_run
from tests.tasks.task_runs import llama
from trainer import ConfigError

Ranks = list[dict[str, Any]]


def test_every_cut_padding_and_packing_gives_the_update_of_plain_pytorch(token_ranks: Ranks) -> None:
    differences = token_ranks[0]["sft"]["differences"]

    assert len(differences) == 8
    assert {name: value for name, value in differences.items() if not value <= 1e-6} == {}  # one step in float32


def test_the_masks_teach_different_things() -> None:
    completion, everything = one_update("completion"), one_update("all")

    assert max(float((completion[name] - everything[name]).abs().max()) for name in completion) > 1e-3


@pytest.mark.parametrize("mask", ["completion", "all"])
def test_losses_accuracies_and_perplexities_are_those_of_plain_pytorch(token_ranks: Ranks, mask: str) -> None:
    weights, (before, *steps, after) = plain_run(mask)
    found = token_ranks[0]["sft"][mask]

    assert found["engines"] == {"student": ("DeepSpeedEngine", 3)}
    for name, value in found["weights"]["student"].items():
        torch.testing.assert_close(value.double(), weights[name], rtol=0, atol=1e-6)
    for measured, right in zip(found["steps"], steps, strict=True):
        assert {name: measured[f"train/student/{name}"] for name in right} == pytest.approx(right, rel=1e-5)
        assert measured["train/loss"] == pytest.approx(right["cross_entropy"], rel=1e-5)
    for measured, right in zip((found["validations"][0], found["validations"][-1]), (before, after), strict=True):
        assert {name: measured[f"val/{name}"] for name in right} == pytest.approx(right, rel=1e-5)
        assert measured["val/perplexity"] == pytest.approx(math.exp(right["cross_entropy"]), rel=1e-5)
    assert after["cross_entropy"] < before["cross_entropy"]


def test_an_adapter_learns_and_the_weights_below_it_stay(token_ranks: Ranks) -> None:
    found = token_ranks[0]["sft"]["lora"]

    first, last = found["validations"][0], found["validations"][-1]
    assert last["val/cross_entropy"] < first["val/cross_entropy"]
    start = llama("small").state_dict()
    weights = {name.replace(".base_layer", ""): value for name, value in found["weights"]["student"].items()}
    assert any("lora_B" in name and value.any() for name, value in weights.items())
    kept = {name.removeprefix("base_model.model."): value for name, value in weights.items() if "lora" not in name}
    assert kept.keys() == start.keys()
    for name, value in kept.items():
        assert torch.equal(value, start[name]), name


def test_wrong_values_are_refused_together() -> None:
    wrong: Any = {"student": "", "mask": "prompt"}
    with pytest.raises(ConfigError) as refused:
        SFTTask(**wrong)

    assert refused.value.problems == [
        "task.student is ''; it must be the name of a model",
        "task.mask is 'prompt'; it must be completion, the answers' tokens, or all",
    ]
    with pytest.raises(ConfigError, match=r"task\.mask is \['all'\]"):
        SFTTask(mask=["all"])  # type: ignore[arg-type]


def test_models_that_do_not_fit_are_refused() -> None:
    task = SFTTask()

    assert task.check_models({"student": False}, stage="validate") == []
    assert task.check_models({"student": False}, stage="fit") == [
        "models.student.trainable=false, but task.student trains it; set it to true"
    ]
    assert task.check_models({"policy": True}, stage="fit") == [
        "task.student=student: models has no student, only policy"
    ]
