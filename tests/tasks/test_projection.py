"""The learned maps between widths: what they start as, and what is refused."""

import pytest
import torch

from tasks.projection import Projection, projection
from trainer import ConfigError


@pytest.mark.parametrize(("narrow", "wide"), [(8, 24), (24, 8), (16, 16)])
def test_maps_start_orthonormal_without_an_offset_and_each_otherwise(narrow, wide):
    torch.manual_seed(0)
    maps = projection(student_size=narrow, teacher_size=wide, count=2).maps

    for linear in maps:
        weight = linear.weight if wide <= narrow else linear.weight.T
        torch.testing.assert_close(weight @ weight.T, torch.eye(min(narrow, wide)))
        assert linear.bias.abs().sum() == 0
    assert not torch.equal(maps[0].weight, maps[1].weight)


def test_a_wider_space_keeps_lengths_and_angles():
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    (projected,) = projection(student_size=8, teacher_size=24)([rows])

    torch.testing.assert_close(projected @ projected.T, rows @ rows.T)


def test_the_seed_decides_the_start_in_every_precision():
    starts = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.manual_seed(3)
        torch.set_default_dtype(dtype)
        starts.append(projection(student_size=8, teacher_size=24).maps[0].weight)
        torch.set_default_dtype(torch.float32)

    assert torch.equal(starts[0], starts[2]) and torch.equal(starts[0].bfloat16(), starts[1])


def test_each_place_goes_through_its_own_map():
    module = Projection(student_size=8, teacher_size=4, count=2)
    first, second = torch.randn(3, 8), torch.randn(2, 5, 8)

    projected = module([first, second])

    assert torch.equal(projected[0], module.maps[0](first)) and torch.equal(projected[1], module.maps[1](second))
    assert projected[1].shape == (2, 5, 4)


def test_other_numbers_of_places_and_other_widths_are_refused_with_the_key():
    module = projection(student_size=8, teacher_size=4)

    with pytest.raises(ConfigError, match=r"1 maps, but states of 2 places.*build.count=2"):
        module([torch.zeros(1, 8), torch.zeros(1, 8)])
    with pytest.raises(ConfigError, match=r"takes states of 8 features, the student's have 9.*build.student_size=9"):
        module([torch.zeros(1, 9)])
    with pytest.raises(ConfigError, match=r"build.count=0: must be at least 1"):
        projection(student_size=8, teacher_size=4, count=0)
