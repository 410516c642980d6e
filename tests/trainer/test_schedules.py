"""Learning-rate schedules: the documented curve, its ends, and refused values."""

import math

import pytest
import torch

from trainer.schedules import constant, cosine, linear

SCHEDULES = {"cosine": cosine, "linear": linear, "constant": constant}


def sgd(lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(build, num_updates: int, **kwargs) -> list[float]:
    """The rate of each update relative to the peak, as an optimizer sees it."""
    optimizer = sgd()
    scheduler = build(optimizer, **kwargs)
    seen = []
    for _ in range(num_updates):
        seen.append(optimizer.param_groups[0]["lr"] / 0.5)
        optimizer.step()
        scheduler.step()
    return seen


def test_linear_rises_to_the_peak_and_falls_towards_the_end():
    assert rates(linear, 6, total_steps=6, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_a_cosine_down_to_its_minimum():
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * x / 4)) / 2 for x in range(4)]

    assert rates(cosine, 4, total_steps=4, min_ratio=0.2) == pytest.approx(expected)


def test_constant_stays_at_the_peak_after_its_warmup():
    assert rates(constant, 5, total_steps=5, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_update_is_lost_to_a_rate_of_zero_and_none_exceeds_the_peak(name):
    for total in (1, 2, 3, 40):
        seen = rates(SCHEDULES[name], total, total_steps=total, warmup_steps=0.05)
        assert all(0 < rate <= 1 for rate in seen) and max(seen) == 1


@pytest.mark.parametrize("build", [cosine, linear])
def test_last_update_is_near_the_minimum_and_later_ones_stay_there(build):
    seen = rates(build, 105, total_steps=100, warmup_steps=10, min_ratio=0.1)

    assert seen[99] == pytest.approx(0.1, abs=0.011) and seen[99] > 0.1
    assert seen[100:] == pytest.approx([0.1] * 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_below_one_is_a_share_of_the_run(name):
    shared = rates(SCHEDULES[name], 40, total_steps=40, warmup_steps=0.1)

    assert shared == rates(SCHEDULES[name], 40, total_steps=40, warmup_steps=4)


def test_run_may_end_within_its_warmup():
    assert rates(cosine, 2, total_steps=2, warmup_steps=4) == pytest.approx([0.25, 0.5])


def test_every_group_of_parameters_keeps_its_own_peak():
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.1)], lr=1.0
    )

    linear(optimizer, total_steps=4, warmup_steps=2)

    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]


def test_schedule_resumes_from_its_state():
    whole = rates(cosine, 10, total_steps=10, warmup_steps=3)
    first = cosine(sgd(), total_steps=10, warmup_steps=3)
    for _ in range(4):
        first.optimizer.step()
        first.step()

    optimizer = sgd()
    resumed = cosine(optimizer, total_steps=10, warmup_steps=3)
    resumed.load_state_dict(first.state_dict())
    optimizer.step()
    resumed.step()

    assert optimizer.param_groups[0]["lr"] / 0.5 == pytest.approx(whole[5])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total_steps", 0),
        ("total_steps", 2.5),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
        ("warmup_steps", math.nan),
        ("min_ratio", 1.1),
        ("min_ratio", -0.1),
    ],
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
        cosine(sgd(), **{"total_steps": 10, name: value})
