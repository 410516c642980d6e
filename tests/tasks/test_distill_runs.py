"""The distillation task on real engines, against an example at a time in float64."""

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tasks import distill_runs
from tests.tasks.distill_runs import CASES, TERMS, reference


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {terms: reference(terms) for terms in TERMS}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("distill")
    return run_ranks(distill_runs.run_cases, folder, folder=folder, world_size=request.param, timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_weights_after_three_steps_are_those_of_plain_pytorch(name, found, references):
    for model, expected in references[CASES[name][0]].items():
        ours = found[0][name]["weights"][model]
        distances = {key: float((ours[key].double() - value).abs().max()) for key, value in expected.items()}
        # float32 against float64 after 3 SGD steps of size 0.02: rounding is a few 1e-7
        assert {key: distance for key, distance in distances.items() if not distance < 1e-6} == {}


@pytest.mark.parametrize("name", CASES)
def test_runs_are_on_the_engines_that_they_claim(name, found):
    _, stage, teacher_stage, _ = CASES[name]
    engines = found[0][name]["engines"]

    assert engines["student"] == ("DeepSpeedEngine", stage)
    assert engines["teacher"][1] == teacher_stage


def test_every_term_is_logged_with_its_own_denominator(found):
    first = found[0]["fused, zero2, sharded teacher"]["steps"][0]
    dense = found[0]["dense, zero1"]["steps"][0]

    assert {name for name in first if name.startswith("train/student/")} >= {
        f"train/student/{name}" for name in (*TERMS["tokens"], "loss")
    }
    parts = 1.0 * first["train/student/kl"] + 0.5 * first["train/student/jsd"] + 0.3 * first["train/student/ce"]
    assert first["train/student/loss"] == pytest.approx(parts, rel=1e-6)
    for name in TERMS["tokens"]:
        assert first[f"train/student/{name}"] == pytest.approx(dense[f"train/student/{name}"], rel=1e-5)


def test_a_changing_weight_shows_in_the_loss(found):
    steps = found[0]["fused, zero3"]["steps"]

    for step, weight in zip(steps, (1.0, 0.6, 0.2), strict=True):
        rest = 0.5 * step["train/student/jsd"] + 0.3 * step["train/student/ce"]
        assert step["train/student/loss"] == pytest.approx(weight * step["train/student/kl"] + rest, rel=1e-6)


def test_validation_is_the_same_under_every_stage_and_with_or_without_tiles(found):
    scored = {name: found[0][name]["evaluated"] for name in ("fused, zero0", "fused, zero3", "dense, zero1")}
    first = scored.pop("fused, zero0")

    assert {"val/forward_kl", "val/reverse_kl", "val/cross_entropy", "val/ece", "val/top1_agreement"} <= first[0].keys()
    for other in scored.values():
        for ours, expected in zip(other, first, strict=True):
            assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
