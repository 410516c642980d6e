"""DPO: its updates against plain PyTorch in float64, its references against each other, its recording, its words."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.dpo import DPOTask
from tests.ranks import run_ranks
from tests.tasks.dpo_runs import STEPS, held_out_numbers, held_out_pairs, reference_run, run_dpo
from tests.tasks.task_runs import llama
from tests.test_examples import run as run_python
from trainer.config import ConfigError

Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    found: Ranks = {}
    for world_size in (1, 2):
        folder: Path = tmp_path_factory.mktemp(f"dpo{world_size}")
        found[world_size] = run_ranks(run_dpo, folder, folder=folder, world_size=world_size)
    return found


CASES = [(1, name, name, 12) for name in ("sigmoid", "ipo", "held", "alone", "hinge")]
CASES += [(2, "sigmoid", "sigmoid", 12), (2, "held", "held", 12), (2, "uneven", "sigmoid", 7)]


@pytest.mark.parametrize(("world_size", "case", "name", "count"), CASES, ids=lambda value: str(value))
def test_updates_are_those_of_plain_pytorch(ranks: Ranks, world_size: int, case: str, name: str, count: int) -> None:
    weights, losses = reference_run(name, count=count)

    found = ranks[world_size][0][case]

    measured = [step["train/policy/loss"] for step in found["steps"]]
    assert measured == pytest.approx(losses, rel=2e-5)
    for key, value in found["weights"]["policy"].items():
        torch.testing.assert_close(value.double(), weights[key], rtol=0, atol=2e-6, msg=key)
    moved = max(float((weights[key] - value).abs().max()) for key, value in llama("small").state_dict().items())
    assert moved > 1e-3  # or the comparison could not fail


def test_engines_are_those_that_the_cases_claim(ranks: Ranks) -> None:
    engines = {"policy": ("DeepSpeedEngine", 2), "reference": ("DeepSpeedEngine", 3)}

    assert ranks[2][0]["sigmoid"]["engines"] == engines
    assert list(ranks[2][0]["cached"]["engines"]) == ["policy"]  # nothing else is in memory


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_cached_and_switched_off_references_are_one(ranks: Ranks, world_size: int) -> None:
    found = ranks[world_size][0]
    stages = [int(name.split()[-1]) for name in found if name.startswith("lora adapter")]

    assert len(stages) == 2
    for stage in stages:
        frozen, others = found[f"lora reference {stage}"], ("adapter", "cached")
        for kind in others:
            other = found[f"lora {kind} {stage}"]
            for step, expected in zip(other["steps"], frozen["steps"], strict=True):
                for key in ("loss", "chosen_log_ratio", "reward_margin"):
                    name = f"train/policy/{key}"
                    assert step[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (kind, name)
            for key, value in other["weights"]["policy"].items():
                torch.testing.assert_close(value, frozen["weights"]["policy"][key], rtol=0, atol=2e-5, msg=key)
        assert abs(frozen["steps"][-1]["train/policy/reward_margin"]) > 1e-3  # the adapters have learnt something
    whole, recorded = found["sigmoid"], found["cached"]
    for key, value in recorded["weights"]["policy"].items():
        torch.testing.assert_close(value, whole["weights"]["policy"][key], rtol=0, atol=2e-6, msg=key)


def test_the_first_step_is_the_loss_of_a_coin(ranks: Ranks) -> None:
    step = ranks[2][0]["sigmoid"]["steps"][0]

    assert step["train/policy/preference"] == pytest.approx(0.693147, abs=1e-5)
    assert step["train/policy/drift"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_counts_each_held_out_pair_once(ranks: Ranks, world_size: int) -> None:
    found = ranks[world_size][0]["sigmoid"]
    policy: Any = llama("small")
    policy.load_state_dict(found["weights"]["policy"])
    expected = held_out_numbers(held_out_pairs(), policy.double(), llama("small").double())

    before, after = found["validations"]

    assert {name: after[f"val/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert after["val/pairs"] == 7
    assert before["val/reward_accuracy"] == 0.5  # reference and policy are the same
    assert after["val/log_prob_accuracy_low"] < after["val/log_prob_accuracy"] < after["val/log_prob_accuracy_high"]


def test_numbers_are_the_same_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks[2]

    for name in ("sigmoid", "held", "uneven"):
        assert first[name]["steps"] == second[name]["steps"]
        assert len(first[name]["steps"]) == STEPS


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_with_a_recording_goes_on_exactly(ranks: Ranks, world_size: int) -> None:
    found = ranks[world_size][0]

    assert found["rest"]["steps"] == found["whole"]["steps"][2:]
    for key, value in found["rest"]["weights"]["policy"].items():
        assert torch.equal(value, found["whole"]["weights"]["policy"][key]), key
    assert found["is_untouched"]  # read, not recorded again


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_recording_of_other_weights_is_refused_and_one_of_fewer_pairs_extended(ranks: Ranks, world_size: int) -> None:
    for found in ranks[world_size]:
        assert "reference_log_probs.safetensors: was recorded with other weights" in found["refused"]["error"]
        assert found["is_extended"]


# Without engines ------------------------------------------------------------------------------------------------------


def test_only_the_models_that_the_reference_needs_are_built() -> None:
    names = ["policy", "reference"]

    assert DPOTask().models_for("fit", names) == names
    for kind in ("adapter", "cached", "none"):
        assert DPOTask(reference=kind).models_for("fit", names) == ["policy"]


def test_models_that_do_not_fit_are_refused() -> None:
    task = DPOTask()

    assert task.check_models({"policy": True, "reference": False}, stage="fit") == []
    assert task.check_models({"policy": False, "reference": True}, stage="fit") == [
        "models.policy.trainable=false, but task.policy trains it; set it to true",
        "models.reference.trainable=true, but task.reference is frozen; set it to false",
    ]
    (problem,) = task.check_models({"policy": True}, stage="fit")
    assert problem.startswith("task.reference=reference: models has no reference, only policy; or take one of adapter")
    assert DPOTask(reference="cached").check_models({"policy": True}, stage="fit") == []
    (problem,) = DPOTask(reference="adapter").check_adapters(["other"])
    assert problem.startswith("task.reference=adapter: models.policy has no adapters")
    assert DPOTask(reference="adapter").check_adapters(["policy"]) == task.check_adapters([]) == []


def test_wrong_settings_are_refused_together() -> None:
    wrong: dict[str, Any] = {"beta": -1, "loss": "dpo", "length_normalised": 1, "sft_weight": "x", "fused": "no"}
    with pytest.raises(ConfigError) as refused:
        DPOTask(policy="a", reference="a", cache="x", **wrong)

    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "task.loss='dpo'",
        "task.beta=-1",
        "task.policy and task.reference are both 'a'; name two models, or take one of adapter, cached, none",
        "task.cache=x",
        "task.length_normalised=1",
        "task.sft_weight='x'",
        "task.fused='no'",
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reference": "none", "loss": "apo_zero"}, "task.reference=none: task.loss=apo_zero takes each"),
        ({"policy": "cached"}, "task.policy='cached': is a word of task.reference"),
        ({"reference": ["a"]}, r"task.reference is \['a'\]; it must be the name of a model"),
        ({"reference": "cached", "cache": 3}, "task.cache=3: must be a file, or null"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DPOTask(**settings)


def watched(**before: float) -> DPOTask:
    task = DPOTask()
    trainer: Any = SimpleNamespace(before=before, global_step=40, is_main=True)
    task.trainer = trainer
    return task


def test_falling_chosen_answers_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    task = watched()

    with caplog.at_level(logging.WARNING):
        for ratio in (0.5, -0.5):
            task.on_train_step_end(
                {"train/policy/chosen_log_prob": -20 + ratio, "train/policy/chosen_log_ratio": ratio}
            )
        assert not caplog.records
        for _ in range(30):
            task.on_train_step_end({"train/policy/chosen_log_prob": -24.0, "train/policy/chosen_log_ratio": -4.0})

    (record,) = caplog.records
    assert record.message.startswith("step 40: the chosen answers have log-probability -22")
    assert "task.sft_weight=1" in record.message


@pytest.mark.parametrize(("now", "is_told"), [(-20.5, False), (-23.0, True)])
def test_held_out_chosen_answers_are_watched_too(caplog: pytest.LogCaptureFixture, now: float, is_told: bool) -> None:
    with caplog.at_level(logging.WARNING):
        watched(**{"val/chosen_log_prob": -20.0}).on_validation_end({"val/chosen_log_prob": now})

    assert bool(caplog.records) == is_told


def test_a_policy_that_does_not_start_as_its_reference_is_told(caplog: pytest.LogCaptureFixture) -> None:
    task = watched()
    task.trainer.global_step = 0

    with caplog.at_level(logging.WARNING):
        task.on_validation_end({"val/drift": 1e-7})
        assert not caplog.records
        task.on_validation_end({"val/drift": 0.3})

    assert "differs from its reference by 0.300 nats per token" in caplog.text


# By the command line --------------------------------------------------------------------------------------------------

TINY = ["model@models.policy.build=tiny_llama", "data.tokenizer=embedded:bpe-4k"]


def command(*words: str, folder: Path) -> dict[str, Any]:
    done = run_python(["-m", "trainer", "task=dpo", *words, "logger=jsonl", "hydra.run.dir=run"], folder=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return summary


def test_a_run_by_name_exports_a_policy_that_scores_the_same(tmp_path: Path) -> None:
    summary = command(*TINY, "data.batch_size=2", "trainer.max_steps=2", "trainer.limit_val_batches=3", folder=tmp_path)

    assert (summary["status"], summary["global_step"]) == ("completed", 2)
    assert summary["before"]["val/pairs"] == 6
    assert summary["before"]["val/drift"] == 0  # the reference has the policy's build and start weights
    assert summary["after"]["val/drift"] > 0
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["policy"]  # rescored, or it had failed


def test_models_that_a_choice_lacks_are_told_before_anything_is_built(tmp_path: Path) -> None:
    done = run_python(["-m", "trainer", "task=dpo", "task.reference=adapter", "task.beta=0"], folder=tmp_path)

    assert done.returncode == 2
    assert "task.beta=0: must be a finite number above 0" in done.stderr + done.stdout
    done = run_python(["-m", "trainer", "task=dpo", "task.reference=adapter"], folder=tmp_path)
    assert done.returncode == 2
    assert "models.policy has no adapters to switch off" in done.stderr + done.stdout


@pytest.mark.slow
def test_the_default_run_learns_to_tell_held_out_answers_apart(tmp_path: Path) -> None:
    summary = command(folder=tmp_path)

    assert summary["after"]["val/reward_accuracy_low"] > 0.5  # the whole interval is better than chance
    assert summary["after"]["val/log_prob_accuracy"] > summary["before"]["val/log_prob_accuracy"]
