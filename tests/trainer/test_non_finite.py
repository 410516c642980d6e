"""A window with a loss or gradient that is not finite: left out as if it had not been, or the end of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer.non_finite_runs import CASES, POISONED, run_checks
from tests.trainer.several_runs import OPTIMIZER_CLASSES
from trainer.incident import MicroRecord, named_examples, named_sources
from trainer.non_finite import NonFinitePolicy
from trainer.task import TaskModule
from trainer.window import Window

# float32 on both sides, after 4 updates of weights of size 1: rounding is a few 1e-8 a step.
TOLERANCE = 1e-6
BFLOAT16 = {0: "FP16_UnfusedOptimizer", **OPTIMIZER_CLASSES}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("non_finite")
    return run_ranks(run_checks, folder, folder=folder, world_size=request.param, timeout=400)


# Skipping


def test_a_skipped_window_leaves_the_weights_of_plain_pytorch_without_it(found: list[dict[str, Any]]) -> None:
    for rank in found:
        cases = rank["skip"]
        assert set(cases) == set(CASES)
        assert {
            case: result["difference"] for case, result in cases.items() if not result["difference"] < TOLERANCE
        } == {}
        assert all(result["error"] == "" for result in cases.values())
        assert all(result["stages"] == list(case[1:3]) for case, result in cases.items())


def test_a_skipped_window_moves_no_schedule_is_counted_and_shows_its_loss(found: list[dict[str, Any]]) -> None:
    for result in (result for rank in found for result in rank["skip"].values()):
        assert result["updates"] == [(4, 1, 0)] * 2
        assert result["schedules"] == [4, 4]
        assert [index for index, loss in enumerate(result["losses"], start=1) if loss != loss] == [POISONED]


def test_models_that_were_updated_earlier_in_the_window_keep_that(found: list[dict[str, Any]]) -> None:
    for micro_batch, updates in ((0, [(8, 2), (4, 1)]), (1, [(9, 1), (4, 1)])):
        for rank in found:
            assert rank[f"own {micro_batch}"]["updates"] == updates
        assert found[0][f"own {micro_batch}"]["difference"] < TOLERANCE


@pytest.mark.parametrize("run", ["0 data", "1 constant", "2 data", "3 constant", "2 offload", "3 offload"])
def test_bfloat16_goes_on_to_the_last_bit_as_if_the_window_had_not_been(found: list[dict[str, Any]], run: str) -> None:
    for rank in found:
        result = rank[f"half {run}"]
        assert result["engine"] == BFLOAT16[int(run[0])]
        assert result["updates"] == [(4, 1), (4, 1)]
    assert found[0][f"half {run}"]["equal"]


@pytest.mark.parametrize("run", ["2 True", "3 False", "3 True"])
def test_a_weight_without_a_gradient_in_the_next_window_takes_none_of_the_skipped(
    found: list[dict[str, Any]], run: str
) -> None:
    assert found[0][f"unused {run}"] == {"error": "", "difference": pytest.approx(0, abs=TOLERANCE)}


@pytest.mark.parametrize("run", ["0", "1", "2", "3", "autocast"])
def test_an_infinite_gradient_leaves_out_its_model_only(found: list[dict[str, Any]], run: str) -> None:
    for rank in found:
        assert rank[f"gradient {run}"]["error"] == ""
        assert rank[f"gradient {run}"]["updates"] == [(4, 1), (5, 0)]
    # autocast: a's layers compute in bfloat16
    assert found[0][f"gradient {run}"]["difference"] < (2e-3 if run == "autocast" else TOLERANCE)


# Ending the run


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_on_the_last_rank_ends_all_ranks_alike_and_leaves_the_examples_in_a_file(
    found: list[dict[str, Any]], stage: int
) -> None:
    last, main = len(found) - 1, found[0][f"stop {stage}"]
    shown = ", ".join(map(str, sorted(main["bad"])))

    assert {rank[f"stop {stage}"]["error"] for rank in found} == {main["error"]}
    assert main["error"].startswith(
        f"the loss of a is nan, b is nan at step {POISONED} (not finite: a, b on rank {last}); no model was updated. "
        f"It came from examples {shown} of data.train."
    )
    assert f"non_finite_step-{POISONED}.json holds every loss" in main["error"]
    assert (main["step"], main["updates"], main["is finite"]) == (POISONED - 1, [(2, 0), (2, 0)], True)

    (record,) = main["files"].values()
    micro_batches = record["micro_batches"]
    assert (record["step"], record["seed"], record["losses"]) == (POISONED, 0, {"a": "nan", "b": "nan"})
    assert [(micro["rank"], micro["micro_batch"]) for micro in micro_batches] == [
        (rank, index) for rank in range(len(found)) for index in range(3)
    ]
    assert [micro["indices"]["data.train"] for micro in micro_batches] == main["indices"]
    bad = [(m["rank"], m["micro_batch"]) for m in micro_batches if m["losses"] == {"a": "nan", "b": "nan"}]
    assert bad == [(last, 1)]
    assert all(isinstance(m["losses"]["b"], float) for m in micro_batches if (m["rank"], m["micro_batch"]) not in bad)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_infinite_gradient_is_not_applied_before_it_ends_the_run(found: list[dict[str, Any]], stage: int) -> None:
    for rank in found:
        result = rank[f"stop gradient {stage}"]
        assert result["error"].startswith(f"the gradients of a are not finite at step {POISONED}, though every loss is")
        assert result["updates"] == [(2, 1), (2, 0)]
        assert result["is finite"]
        assert result["saved"] == ["last", f"step-{POISONED - 1:08d}"]  # was still being written
    (record,) = found[0][f"stop gradient {stage}"]["files"].values()
    assert record["grad_norms"]["a"] in ("inf", "nan")
    assert record["skipped_in_a_row"] == {"a": 1, "b": 0}


def test_one_skip_in_a_row_too_many_ends_the_run(found: list[dict[str, Any]]) -> None:
    for rank in found:
        bound = rank["bound"]
        assert "The last 2 updates of a were left out like this; trainer.max_skipped is 1." in bound["error"]
        # 1 and 3: a loss, which both leave out; 4: a gradient of a
        assert (bound["step"], bound["updates"], bound["is finite"]) == (3, [(1, 3), (1, 2)], True)
        assert list(bound["files"]) == ["non_finite_step-4.json"]
        assert [value is None for value in bound["logged"]] == [True, False, True]


def test_an_update_that_deepspeed_was_told_not_to_check_ends_the_run_right_after(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["unchecked"]["step"] == POISONED - 1
        assert "the update was applied, since models.a.plugin.bf16.check_grad_overflow" in rank["unchecked"]["error"]


def test_the_examples_of_a_models_own_set_are_named(found: list[dict[str, Any]]) -> None:
    shown = ", ".join(map(str, sorted(found[0]["own data"]["bad"])))
    for rank in found:
        assert f"It came from examples {shown} of models.b.data.train." in rank["own data"]["error"]


def test_weights_that_are_no_numbers_are_found_in_a_step_that_leaves_their_model_out(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert "the loss of a is nan at step 1" in rank["left out"]["error"]
        assert rank["left out"]["updates"] == [(0, 0), (0, 0)]


# Words


def record(rank: int, losses: dict[str, float], *, count: int = 2) -> MicroRecord:
    indices = {"data.train": list(range(count)), "models.b.data.train": [7]}
    return MicroRecord(rank=rank, micro_batch=0, is_filler=False, indices=indices, losses=losses)


def test_terms_are_named_by_rank_and_examples_by_set() -> None:
    records = [record(0, {"a/ce": 1.0, "b": float("inf")}), record(1, {"a/ce": float("nan"), "b": 2.0})]

    assert named_sources(records) == "b on rank 0; a/ce on rank 1"
    assert named_examples(records) == "7 of models.b.data.train; 0, 1 of data.train"
    assert named_examples([record(0, {"joint": float("nan")})]) == "0, 1 of data.train; 7 of models.b.data.train"
    assert named_examples([record(0, {"a": float("nan")}, count=50)]).endswith("18, 19 and 30 more of data.train")


def test_losses_that_only_their_sum_makes_infinite_are_told() -> None:
    assert "every loss that the task returned is finite" in named_sources([record(0, {"a": 1e38})])


@pytest.mark.parametrize(
    ("action", "bound", "rule"), [("stpo", 1, "must be one of stop, skip"), ("skip", -1, "at least 0")]
)
def test_a_policy_that_does_not_exist_is_refused(action: str, bound: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        NonFinitePolicy(action=action, max_skipped=bound)


def test_a_window_of_unknown_examples_has_none() -> None:
    assert Window(TaskModule(), [{"x": torch.ones(1)}], [False], device=torch.device("cpu")).indices == [{}]
