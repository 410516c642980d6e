"""Several trained models against plain PyTorch in one process: float32, the whole batch at once, 5 updates."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer.several_checks import run_checks
from tests.trainer.several_runs import FACTORS, OPTIMIZER_CLASSES, Case, pair_and_third, run_cases
from trainer.routing import receivers

PLAIN = {"sgd": "SGD", "adamw": "AdamW"}  # of ZeRO-0
# float32 on both sides, after 5 updates of weights of size 1: rounding is a few 1e-8 a step.
TOLERANCE = 1e-6


def pairwise(factors: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    """Returns few cases that hold every pair of levels of every two factors."""
    cases: list[tuple[Any, ...]] = []
    open_pairs = set(_pairs_of_all(factors))
    everything = list(itertools.product(*factors))
    while open_pairs:
        best = max(everything, key=lambda case: len(open_pairs & set(_pairs(case))))
        open_pairs -= set(_pairs(best))
        cases.append(best)
    return cases


def _pairs(case: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return list(itertools.combinations(enumerate(case), 2))


def _pairs_of_all(factors: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    return [pair for case in itertools.product(*factors) for pair in _pairs(case)]


ALL = (*FACTORS, (2, 1))  # the last one: ranks; where it does not matter, two
PAIRWISE = pairwise(ALL)
# Beside the factors: what has no stage of its own to vary.
EXTRA: list[Case] = [
    *(("forgetful", first, second, 3, "sgd") for first, second in ((1, 3), (3, 2), (2, 0))),
    *(("adversarial", first, second, 3, "sgd") for first, second in ((1, 3), (3, 2), (2, 0))),
    *(("undetached", first, second, 3, "sgd") for first, second in ((3, 1), (2, 3))),
    (pair_and_third.__name__, 2, 3, 3, "sgd"),
    (pair_and_third.__name__, 0, 0, 1, "adamw"),
]  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("several")
    cases = [case[:5] for case in PAIRWISE if case[5] == request.param] + EXTRA
    return run_ranks(run_checks, folder, cases, folder=folder, world_size=request.param, timeout=600)


def _wrong(cases: dict[Case, dict[str, Any]]) -> dict[Case, float]:
    return {case: found["difference"] for case, found in cases.items() if not found["difference"] <= TOLERANCE}


def _claims(case: Case) -> list[tuple[str, int]]:
    names = [OPTIMIZER_CLASSES.get(stage, PLAIN[case[4]]) for stage in case[1:3]]
    return list(zip(names, case[1:3], strict=True))


def test_models_under_any_two_stages_train_as_in_plain_pytorch(found: list[dict[str, Any]]) -> None:
    cases = found[0]["cases"]
    assert {case[:5] for case in PAIRWISE if case[5] == len(found)} <= set(cases)
    assert _wrong(cases) == {}


def test_cases_on_one_and_two_ranks_hold_every_pair_of_levels() -> None:
    assert set(_pairs_of_all(ALL)) == {pair for case in PAIRWISE for pair in _pairs(case)}
    assert len(PAIRWISE) < 30


def test_cases_ran_on_the_engines_they_claim(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for case, result in rank["cases"].items():
            assert result["engines"] == _claims(case), case


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_matrix_of_stages_losses_and_windows(world_size: int, tmp_path: Path) -> None:
    factors = FACTORS if world_size < 3 else (*FACTORS[:3], (2,), FACTORS[4])  # 12 examples: 2 x 2 on each of 3 ranks
    cases = list(itertools.product(*factors))

    (cases_found, *_) = run_ranks(run_cases, cases, folder=tmp_path, world_size=world_size, timeout=1800)

    assert len(cases_found) == len(cases)
    assert all(result["engines"] == _claims(case) for case, result in cases_found.items())
    assert _wrong(cases_found) == {}


def test_gradients_at_adamws_own_eps_are_those_of_plain_pytorch(found: list[dict[str, Any]]) -> None:
    """The updates cannot be compared there: AdamW amplifies the rounding of tiny gradients."""
    gradients = found[0]["gradients"]
    assert set(gradients) == {f"{kind} {stages}" for kind in ("mutual", "joint") for stages in ((1, 2), (3, 1), (2, 3))}
    assert {name: value for name, value in gradients.items() if not value <= TOLERANCE} == {}


def test_a_loss_that_is_no_number_on_one_rank_ends_all_ranks_alike(found: list[dict[str, Any]]) -> None:
    last = len(found) - 1
    for rank in found:
        assert _matches(rf"the loss of b is nan at step 1 \(not finite: .*b on rank {last}\)", rank["one rank"]["nan"])
        if last:
            message = r"the ranks have different losses and metrics \(rank 0: .*a/m.*; rank 1: .*a/n"
            assert _matches(message, rank["one rank"]["metric"])
            assert _matches(r"the ranks have different counts of count_items", rank["one rank"]["count"])


def test_a_validation_draws_the_same_numbers_every_time(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["noise"]["first"] == rank["noise"]["second"]
        assert rank["noise"]["first"]["val/noise"] != 0.0


def test_a_model_that_a_step_leaves_out_shows_its_last_loss(found: list[dict[str, Any]]) -> None:
    """Else the sum would jump, and a period of logging that is even would never show a model of odd steps."""
    lines = [line["losses"] for line in found[0]["plans"]["seen"]]

    assert [set(line) for line in lines] == 4 * [{"loss", "a/loss", "b/loss"}] + [{"loss", "a/loss"}]  # b has ended
    assert lines[1]["a/loss"] == lines[0]["a/loss"] != lines[2]["a/loss"]
    assert all(line["loss"] == pytest.approx(sum(v for name, v in line.items() if name != "loss")) for line in lines)


def test_each_model_follows_its_own_plan(found: list[dict[str, Any]]) -> None:
    plans = found[0]["plans"]

    assert plans["weights (1, 3)"] <= TOLERANCE
    assert plans["weights (2, 0)"] <= TOLERANCE
    seen = plans["seen"]
    assert [line["step"] for line in seen] == [1, 2, 3, 4, 5]
    assert [line["updates"]["a"] for line in seen] == [1, 1, 2, 2, 3]
    assert [line["updates"]["b"] for line in seen] == [1, 2, 3, 4, 4]
    # Three updates of a, four of b: each schedule is laid out over its own and moves with them.
    assert [line["lr"]["a"] for line in seen] == pytest.approx([0.1, 0.1, 0.1 * 5 / 6, 0.1 * 5 / 6, 0.1 * 4 / 6])
    assert [line["lr"]["b"] for line in seen] == pytest.approx([0.1, 0.0875, 0.075, 0.0625, 0.0625])
    assert [line["training"] for line in seen] == [True, True, True, True, False]


def test_alternating_updates_are_those_of_plain_pytorch(found: list[dict[str, Any]]) -> None:
    alternation = found[0]["alternation"]
    assert len(alternation) == 6
    assert {name: value for name, value in alternation.items() if not value <= TOLERANCE} == {}


def test_a_gradient_passes_through_a_frozen_model_to_the_trained_one(found: list[dict[str, Any]]) -> None:
    assert set(found[0]["through frozen"]) == {"zero3", "replicate"}
    assert all(value <= TOLERANCE for value in found[0]["through frozen"].values())


def test_the_example_of_the_documents_learns_where_the_data_are(found: list[dict[str, Any]]) -> None:
    example = found[0]["document"]

    assert example["updates"] == {"generator": 40, "critic": 80}
    assert example["before"] > 1.0 > 2 * example["after"]


def test_an_overflow_skips_the_update_of_its_model_only(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for stage in ("zero1", "zero2", "zero3"):
            result = rank["overflow"][stage]
            assert result["updates"] == {"a": 2, "b": 3}, stage
            assert result["skipped"] == {"a": 1, "b": 0}, stage
            assert result["logged"] == [0.0, 1.0, 1.0], stage
            assert result["finite"], stage


@pytest.mark.parametrize("stages", [(1, 2), (3, 3), (0, 2)], ids=str)
@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ("passes_through", r"the loss 'a' passes through models\.b, .*self\.models\['b'\]\.module"),
        ("shares_a_forward", r"the loss 'b' shares a forward with another loss"),
        ("leaves_b_out", r"no loss for the trained model 'b', only for 'a'"),
        ("joint_without_b", r"the loss 'joint' does not depend on the output of models\.b"),
        ("joint_and_own", r"returned 'joint', but 'a', 'b' have losses of their own.*'joint/<term>'"),
        ("joint_through_own", r"the loss 'joint' passes through models\.a"),
        ("wrong_owner", r"the loss 'a' does not depend on the output of models\.a"),
        ("by_the_module", r"the loss 'a' does not depend on the output of models\.a"),
        ("without_graph", r"the loss 'b' depends on no trained model's weights"),
        ("not_a_number", r"the loss of b is nan at step 1 \(not finite: .*b/second on rank 0"),
        ("frozen_with_gradient", r"models\.c is frozen, but a weight of it requires a gradient"),
    ],
)
def test_a_gradient_that_would_go_astray_is_refused(
    found: list[dict[str, Any]], losses: str, message: str, stages: tuple[int, int]
) -> None:
    for rank in found:
        assert _matches(message, rank["refusals"][f"{losses} {stages}"])


def test_models_of_a_joint_loss_must_step_together(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert _matches(
            r"their gradient_accumulation_steps differ: models\.a 1, models\.b 3", rank["refusals"]["windows"]
        )


def test_a_model_starts_from_anothers_weights_and_keeps_them(found: list[dict[str, Any]]) -> None:
    origins = found[0]["origins"]
    for name in ("replicate from zero3", "zero3 from zero1", "zero3 from zero3"):
        assert origins[name]["order"] == ["c", "a"]
        assert origins[name]["equal at the start"] == origins[name]["frozen moved"] == 0.0
        assert origins[name]["trained moved"] > 1e-3
    for rank in found:
        message = r"models\.c\.init_from=a: 0\.bias is \(16,\) in c and \(8,\) in a; both builds must make the same"
        assert _matches(message, rank["origins"]["other shapes"])


def test_a_short_window_beside_a_long_one_costs_no_extra_reductions(found: list[dict[str, Any]]) -> None:
    """2 steps of 3 micro-batches: a updates twice and b 6 times, in one run and in two."""
    for rank in found:
        assert len(rank["reductions"]) == 4
        for stages, (together, apart) in rank["reductions"].items():
            assert together <= apart, stages
            assert together > 0 or len(found) == 1


def test_each_model_reads_its_own_data_and_no_example_is_left_out(found: list[dict[str, Any]]) -> None:
    seen = {name: [x for rank in found for window in rank["own data"]["seen"][name] for x in window] for name in "ab"}

    # 5 steps of 4 examples: four times each of a's five, b's seven at least twice
    assert sorted(seen["a"]) == sorted(4 * [0.0, 1.0, 2.0, 3.0, 4.0])
    assert {x: seen["b"].count(x) for x in seen["b"]}.keys() == {100.0 + i for i in range(7)}
    assert all(2 <= seen["b"].count(x) <= 3 for x in seen["b"])
    assert found[0]["own data"]["updates"] == [5, 5]
    # The shorter validation set counts once, however long the other is.
    assert found[0]["own data"]["before"] == pytest.approx({"val/a/number": 2.0, "val/b/number": 105.0})


def _matches(pattern: str, text: str) -> bool:
    import re

    assert re.search(pattern, text, re.DOTALL), text
    return True


def test_tolerance_is_above_what_the_cut_itself_costs() -> None:
    """Plain PyTorch alone, in another order of sums, moves by less: the tests above measure the trainer."""
    from tests.trainer.several_runs import difference, global_batches, joint, reference

    batches = global_batches()
    other = reference(joint, [list(reversed(batch)) for batch in batches])
    assert 0 < difference(reference(joint, batches), other) < TOLERANCE / 2
    assert not torch.equal(other["a"]["0.weight"], torch.zeros(8, 4))


def stand_in(name: str, **fields: Any) -> Any:
    values = {"is_updating": True, "accumulation": 1, "dtype": torch.float32, "stage": 1, "is_plain": False}
    return SimpleNamespace(name=name, **{**values, **fields})


def test_a_joint_loss_in_float16_is_refused_where_its_scale_would_reach_others() -> None:
    half, single = stand_in("a", dtype=torch.float16), stand_in("b")

    with pytest.raises(ValueError, match=r"models\.a is float16: its loss scale would multiply .*\('a', 'b'\)"):
        receivers(["joint"], [half, single])
    assert receivers(["joint"], [half]) == {"joint": [half]}
    assert receivers(["a", "b"], [half, single]) == {"a": [half], "b": [single]}


def test_an_engine_that_takes_part_in_no_others_backward_is_refused_in_a_joint_loss() -> None:
    autocast, single = stand_in("a", stage=0), stand_in("b")

    with pytest.raises(ValueError, match=r"models\.a is ZeRO-0 with torch_autocast.*plugin=zero1"):
        receivers(["joint"], [autocast, single])
    assert receivers(["joint"], [autocast]) == {"joint": [autocast]}
    plain, bfloat16 = stand_in("a", stage=0, is_plain=True), stand_in("a", stage=0, dtype=torch.bfloat16)
    assert all(receivers(["joint"], [model, single])["joint"] == [model, single] for model in (plain, bfloat16))
