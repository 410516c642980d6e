"""Slices are the weights and the optimizer's state exactly, whatever the stage, and come back exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.trainer.saving.fragment_runs import RESUMED, run_all
from tests.trainer.test_check import problems_of
from trainer.saving.fragments import find_problem

# After 4 updates of weights of size 1, in float32 in another order.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fragments")
    return run_ranks(run_all, folder, folder=folder, world_size=1)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_are_what_deepspeed_gives_out_of_each_weight(found: dict[str, Any], stage: int, dtype: str):
    assert found[f"deepspeed {stage} torch.{dtype}"] == []


def test_half_precision_weights_at_stage_0_are_saved_as_the_optimizer_holds_them(found: dict[str, Any]):
    assert len(found["half weights"]) == 7 and all(found["half weights"].values()), found["half weights"]


def test_slices_at_stage_0_are_those_of_torchs_own_optimizer(found: dict[str, Any]):
    assert found["torch"] < TOLERANCE


def test_a_run_goes_on_at_another_stage(found: dict[str, Any]):
    assert len(found["moved"]) == 4 and max(found["moved"].values()) < TOLERANCE


@pytest.mark.parametrize(("kind", "stage"), RESUMED)
def test_unusual_weights_resume_to_the_last_bit(found: dict[str, Any], kind: str, stage: int):
    assert isinstance(found[f"{kind} {stage}"], dict), found[f"{kind} {stage}"]
    assert found[f"{kind} {stage}"]["differing"] == []


def test_a_weight_that_is_not_contiguous_stays_so_at_stage_0(found: dict[str, Any]):
    assert not all(found["unusual 0"]["contiguous"])


@pytest.mark.parametrize("stage", range(4))
def test_a_tied_weight_is_saved_once(found: dict[str, Any], stage: int):
    names = [key for key in found[f"unusual {stage}"]["slices"] if key.startswith("weight/")]

    assert "weight/middle.weight" in names and "weight/tied.weight" not in names and "weight/tied.bias" in names


@pytest.mark.parametrize("stage", range(4))
def test_a_weight_without_a_gradient_is_saved_as_well(found: dict[str, Any], stage: int):
    assert "weight/unused.weight" in found[f"unusual {stage}"]["slices"]


@pytest.mark.parametrize(("freeze_stage", "lora_stage"), [(1, 0), (3, 2)])
def test_only_what_is_trained_is_saved(found: dict[str, Any], freeze_stage: int, lora_stage: int):
    frozen, adapted = found[f"freeze {freeze_stage}"]["numels"], found[f"lora {lora_stage}"]["numels"]

    assert frozen == {"middle.weight": 25, "last.weight": 20}
    assert sorted(adapted.values()) == [8, 10, 10, 10] and all("lora_" in name for name in adapted)


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_state_of_whole_matrices_resumes_exactly_at_stage_0(found: dict[str, Any], name: str):
    assert found[f"adafactor {name}"]["differing"] == []
    assert any(key.startswith("whole/") for key in found[f"adafactor {name}"]["slices"])


@pytest.mark.parametrize("name", ["torch", "transformers"])
@pytest.mark.parametrize(("way", "stages"), [("0 to 2", "stage 0 to ZeRO-2"), ("2 to 0", "ZeRO-1, 2 or 3 to stage 0")])
def test_an_optimizer_that_sees_shapes_does_not_change_them(found: dict[str, Any], name: str, way: str, stages: str):
    text = found[f"adafactor {name} from {way}"]

    assert text.startswith("models.a: what Adafactor knows of the weights") and stages in text
    assert text.endswith("; resume with the plugin that the run had")


def test_other_weights_than_those_that_were_saved_are_refused(found: dict[str, Any]):
    assert "the weight first.weight has no trained elements in the checkpoint and 20 in this" in found["another size"]
    assert "the weight 0.weight has 32 trained elements in the checkpoint and none in this" in found["fewer trained"]


PROBLEMS: dict[str, dict[str, Any]] = {
    "offload_optimizer.device=nvme": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
    "offload_param.device=nvme": {"stage": 3, "offload_param": {"device": "nvme"}},
    "offload_optimizer.ratio": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "zenflow": {"stage": 2, "zenflow": {"topk_ratio": 0.1}},
    "mics_shard_size": {"stage": 3, "mics_shard_size": 2},
}


@pytest.mark.parametrize("key", PROBLEMS)
def test_a_plugin_under_which_nothing_can_be_saved_is_named(key: str):
    problem = find_problem({"zero_optimization": PROBLEMS[key]})

    assert problem is not None and problem.startswith(f"zero_optimization.{key}")


@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"stage": 3, "mics_shard_size": -1, "offload_param": {"device": "cpu"}},
        {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}, "zenflow": None},
        {"offload_optimizer": None, "offload_param": {"device": "none"}},
    ],
)
def test_other_plugins_have_no_problem(zero: dict[str, Any]):
    assert find_problem({"zero_optimization": zero}) is None and find_problem({}) is None


OFFLOADS = (
    "plugin@models.student.plugin=zero3",
    "+models.student.plugin.zero_optimization.offload_param.device=nvme",
    "+models.student.plugin.zero_optimization.offload_param.nvme_path=/tmp",
)


def test_a_run_that_cannot_be_saved_is_refused_before_it_starts():
    (problem,) = problems_of(*OFFLOADS)

    assert problem == (
        "models.student.plugin.zero_optimization.offload_param.device=nvme: weights on NVMe cannot be saved; use cpu; "
        "or give checkpoint.enabled=false"
    )


def test_a_plugin_without_a_block_of_zero_is_no_crash():
    assert isinstance(problems_of("models.student.plugin.zero_optimization=null"), list)


@pytest.mark.parametrize("change", ["checkpoint.enabled=false", "mode=validate"])
def test_a_run_that_is_not_saved_may_keep_its_plugin(change: str):
    assert problems_of(*OFFLOADS, change) == []
