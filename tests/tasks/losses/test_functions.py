"""The functions that a term may name, and their options."""

import pytest
import torch
from torch import Tensor

from tasks.losses import (
    FUNCTIONS,
    TopTokens,
    accepts_top_tokens,
    cross_entropy,
    find_function,
    generalised_jsd,
    skew_kl,
    skew_reverse_kl,
)
from tests.tasks.losses.reference import random_logits
from trainer.config import ConfigError

HERE = "tests.tasks.losses.test_functions"
STUDENT, TEACHER, LABELS = random_logits(6, 50, seed=0), random_logits(6, 50, seed=1), torch.arange(6)


def own(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float, margin: float, sharp: int = 1):
    return student.sum(-1) * margin * sharp


def open_ended(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float, **options: float):
    return student.sum(-1) * options["gain"]


def plain(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return student.sum(-1)


def problems_of(name: object, options: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        find_function(name, options)
    return error.value.problems


def test_a_function_is_found_by_name_or_dotted_path():
    assert find_function("forward_kl") is FUNCTIONS["forward_kl"]
    assert find_function("forward_kl", {}) is FUNCTIONS["forward_kl"]
    assert find_function(f"{HERE}.plain") is plain


@pytest.mark.parametrize("name", ["os.getcwd", "torch.nn.functional.relu", "torch.nn.functional.kl_div"])
def test_a_function_that_cannot_be_called_as_a_loss_is_refused(name):
    (problem,) = problems_of(name, {})

    assert problem.startswith(f"{name} cannot be called as a loss (")
    assert "it must take (student, teacher, labels, *, temperature)" in problem


@pytest.mark.parametrize("options", [{"labels": 3}, {"student": 1, "gain": 2.0}])
def test_an_option_cannot_take_the_place_of_a_tensor(options):
    (problem,) = problems_of(f"{HERE}.open_ended", options)

    assert "cannot be called as a loss (multiple values for argument" in problem


def test_options_have_names():
    assert problems_of(f"{HERE}.open_ended", {1: 2.0}) == [f"1 is no option of {HERE}.open_ended; options have names"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foward_kl", "did you mean forward_kl"),
        ("generalized_jsd", "did you mean generalised_jsd"),
        (
            "xyz",
            "generalised_jsd, skew_kl, skew_reverse_kl, total_variation, cross_entropy, or the dotted path",
        ),
        ("", "is no loss function"),
        (".kl", "is no loss function"),
        (None, "is no loss function"),
        (["forward_kl"], "is no loss function"),
        ("no_such_package.loss", "cannot be imported: No module named 'no_such_package'"),
        ("torch.nn.functional.kl_dev", "torch.nn.functional has no callable kl_dev"),
        ("math.pi", "math has no callable pi"),
    ],
)
def test_an_unknown_function_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        find_function(name)


@pytest.mark.parametrize(
    ("name", "options", "direct"),
    [
        ("generalised_jsd", {"beta": 0.3}, lambda s, t, T: generalised_jsd(s, t, beta=0.3, temperature=T)),
        (
            "generalised_jsd",
            {"beta": 1, "top_k": 5},
            lambda s, t, T: generalised_jsd(s, t, beta=1, top_k=5, temperature=T),
        ),
        ("skew_kl", {"skew": 0.2}, lambda s, t, T: skew_kl(s, t, skew=0.2, temperature=T)),
        ("skew_reverse_kl", {"top_k": None}, lambda s, t, T: skew_reverse_kl(s, t, temperature=T)),
        ("cross_entropy", {}, lambda s, t, T: cross_entropy(s, LABELS)),
        (f"{HERE}.own", {"margin": 2.0}, lambda s, t, T: s.sum(-1) * 2),
        (f"{HERE}.own", {"margin": 2.0, "sharp": 3}, lambda s, t, T: s.sum(-1) * 6),
        (f"{HERE}.open_ended", {"gain": 4.0}, lambda s, t, T: s.sum(-1) * 4),
    ],
)
def test_options_are_bound(name, options, direct):
    loss = find_function(name, options)

    assert torch.equal(loss(STUDENT, TEACHER, LABELS, temperature=2.0), direct(STUDENT, TEACHER, 2.0))


@pytest.mark.parametrize(
    ("name", "options", "problems"),
    [
        (
            "generalised_jsd",
            {"bta": 0.5},
            ["bta is no option of generalised_jsd; did you mean beta?; it has beta, top_k"],
        ),
        ("forward_kl", {"skew": 0.5}, ["skew is no option of forward_kl; it has top_k"]),
        ("forward_kl", {"temperature": 2.0}, ["temperature is no option of forward_kl; it has top_k"]),
        ("forward_kl", {"teacher": 2.0}, ["teacher is no option of forward_kl; it has top_k"]),
        ("cross_entropy", {"top_k": 5}, ["top_k is no option of cross_entropy; it has none"]),
        ("skew_kl", {"skew": 1}, ["skew is 1; it must be a number from 0 to below 1"]),
        ("generalised_jsd", {"beta": True}, ["beta is True; it must be a number from 0 to 1"]),
        ("generalised_jsd", {"beta": float("nan")}, ["beta is nan; it must be a number from 0 to 1"]),
        ("generalised_jsd", {"beta": 10**400}, [f"beta is {10**400}; it must be a number from 0 to 1"]),
        ("skew_kl", {"skew": 10**400}, [f"skew is {10**400}; it must be a number from 0 to below 1"]),
        ("generalised_jsd", {"beta": "0.5"}, ["beta is '0.5'; it must be a number from 0 to 1"]),
        (
            "reverse_kl",
            {"top_k": 2.0},
            ["top_k is 2.0; it must be a whole number of at least 1, or null for all tokens"],
        ),
        (
            "generalised_jsd",
            {"beta": -0.1, "top_k": 0, "x": 1},
            [
                "x is no option of generalised_jsd; it has beta, top_k",
                "beta is -0.1; it must be a number from 0 to 1",
                "top_k is 0; it must be a whole number of at least 1, or null for all tokens",
            ],
        ),
        (
            f"{HERE}.own",
            {"shrap": 1},
            [
                f"shrap is no option of {HERE}.own; did you mean sharp?; it has margin, sharp",
                f"{HERE}.own needs the option margin, which is missing",
            ],
        ),
        (f"{HERE}.own", {}, [f"{HERE}.own needs the option margin, which is missing"]),
        (
            "builtins.max",
            {},
            ["builtins.max does not say what it takes; wrap it in a function of yours"],
        ),
    ],
)
def test_wrong_options_are_refused_all_at_once(name, options, problems):
    assert problems_of(name, options) == problems


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_ours_takes_a_sparse_teacher(name):
    sparse = TopTokens.from_logits(TEACHER, k=5, temperatures=[2.0])

    value = FUNCTIONS[name](STUDENT, sparse, LABELS, temperature=2.0)

    dense = find_function(name, {} if name == "cross_entropy" else {"top_k": 5})
    assert accepts_top_tokens(name)
    torch.testing.assert_close(value, dense(STUDENT, TEACHER, LABELS, temperature=2.0), rtol=1e-4, atol=1e-5)


def test_a_function_of_the_users_is_not_taken_to_know_sparse_teachers():
    assert not accepts_top_tokens(f"{HERE}.own")
