"""The losses of pairs against TRL's own DPOTrainer and CPOTrainer, and against their formulas in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer

from tasks.losses.preference import LOSSES, PreferenceLoss, log_ratios, read_preference_loss
from trainer.config import ConfigError

PAIRS, LONGEST = 9, 7
LENGTHS = torch.tensor([1, 2, 3, 4, 5, 6, 7, 2, 4, 7, 1, 6, 2, 5, 3, 4, 7, 1])  # tokens of each answer, chosen first


def per_token(seed: int, *, scale: float = 1.5) -> Tensor:
    """Log-probabilities of each answer's tokens, (2 pairs, longest), 0 behind its end."""
    values = -torch.rand(2 * PAIRS, LONGEST, generator=torch.Generator().manual_seed(seed)) * scale
    return values * (torch.arange(LONGEST) < LENGTHS[:, None])


# Name of TRL's loss to ours, with label smoothing and length normalisation
TRL_LOSSES: dict[str, tuple[PreferenceLoss, bool]] = {
    "sigmoid": (PreferenceLoss(), False),
    "sigmoid_norm": (PreferenceLoss(), True),
    "hinge": (PreferenceLoss(name="hinge", beta=0.4), False),
    "ipo": (PreferenceLoss(name="ipo"), True),
    "robust": (PreferenceLoss(name="robust", label_smoothing=0.2), False),
    "exo_pair": (PreferenceLoss(name="exo_pair", label_smoothing=0.01), False),
    "nca_pair": (PreferenceLoss(name="nca_pair"), False),
    "bco_pair": (PreferenceLoss(name="bco_pair"), False),
    "sppo_hard": (PreferenceLoss(name="sppo_hard", beta=0.3), False),
    "apo_zero": (PreferenceLoss(name="apo_zero"), False),
    "apo_down": (PreferenceLoss(name="apo_down"), False),
    "discopop": (PreferenceLoss(name="discopop"), False),
}


def trl_loss(policy: Tensor, reference: Tensor, name: str, ours: PreferenceLoss) -> Tensor:
    """The loss of TRL's DPOTrainer, its own code, with given log-probabilities in the place of a model's."""
    mask = (torch.arange(LONGEST) < LENGTHS[:, None]).long()
    blank = torch.zeros(2 * PAIRS, LONGEST)
    output = SimpleNamespace(log_probs=policy, entropy=blank, mean_logits=blank, is_top1=blank.bool())
    same: Callable[[Any], Any] = lambda value: value  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=ours.beta,
        label_smoothing=ours.label_smoothing,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    chosen, rejected = reference.sum(-1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LONGEST + 1, dtype=torch.long),
        "attention_mask": torch.ones(2 * PAIRS, LONGEST + 1),
        "completion_mask": torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.long), mask], dim=1),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    found: Tensor = DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)
    return found


def our_loss(policy: Tensor, reference: Tensor, loss: PreferenceLoss, *, is_normalised: bool) -> Tensor:
    ratios = log_ratios(policy.sum(-1), reference.sum(-1), lengths=LENGTHS if is_normalised else None)
    return loss(*ratios.chunk(2)).mean()


def with_gradient(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    values = values.clone().requires_grad_()
    found = function(values)
    (gradient,) = torch.autograd.grad(found, values)
    return found.detach(), gradient


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_values_and_gradients_are_those_of_dpo_trainer(name: str) -> None:
    loss, is_normalised = TRL_LOSSES[name]
    policy, reference = per_token(0), per_token(1)

    ours = with_gradient(lambda given: our_loss(given, reference, loss, is_normalised=is_normalised), policy)
    theirs = with_gradient(lambda given: trl_loss(given, reference, name, loss), policy)

    mask = torch.arange(LONGEST) < LENGTHS[:, None]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1][mask], theirs[1][mask], rtol=1e-5, atol=1e-6)
    assert ours[1][mask].abs().max() > 1e-4


def test_every_loss_is_compared() -> None:
    assert {loss.name for loss, _ in TRL_LOSSES.values()} == set(LOSSES)


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


# By the papers' formulas, in Python's own float64: won and lost are log-ratios.
FORMULAS: dict[str, Callable[[float, float, float, float], float]] = {
    "sigmoid": lambda won, lost, beta, flip: (
        -(1 - flip) * math.log(logistic(beta * (won - lost))) - flip * math.log(logistic(-beta * (won - lost)))
    ),
    "robust": lambda won, lost, beta, flip: (
        (-(1 - flip) * math.log(logistic(beta * (won - lost))) + flip * math.log(logistic(beta * (lost - won))))
        / (1 - 2 * flip)
    ),
    "hinge": lambda won, lost, beta, flip: max(0.0, 1 - beta * (won - lost)),
    "ipo": lambda won, lost, beta, flip: ((won - lost) - 1 / (2 * beta)) ** 2,
    "exo_pair": lambda won, lost, beta, flip: sum(
        p * math.log(p / q)
        for p, q in (
            (math.exp(beta * won) / (math.exp(beta * won) + math.exp(beta * lost)), 1 - flip),
            (math.exp(beta * lost) / (math.exp(beta * won) + math.exp(beta * lost)), flip),
        )
    ),
    "nca_pair": lambda won, lost, beta, flip: (
        -math.log(logistic(beta * won)) - (math.log(logistic(-beta * won)) + math.log(logistic(-beta * lost))) / 2
    ),
    "bco_pair": lambda won, lost, beta, flip: -math.log(logistic(beta * won) * logistic(-beta * lost)),
    "sppo_hard": lambda won, lost, beta, flip: (won - 1 / (2 * beta)) ** 2 + (lost + 1 / (2 * beta)) ** 2,
    "apo_zero": lambda won, lost, beta, flip: 1 - logistic(beta * won) + logistic(beta * lost),
    "apo_down": lambda won, lost, beta, flip: logistic(beta * won) + 1 - logistic(beta * (won - lost)),
    "discopop": lambda won, lost, beta, flip: (
        (1 - logistic(beta * (won - lost) / 0.05)) * math.log(1 + math.exp(-beta * (won - lost)))
        + logistic(beta * (won - lost) / 0.05) * math.exp(-beta * (won - lost))
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_its_formula(name: str, dtype: torch.dtype) -> None:
    flip = 0.1 if name in ("sigmoid", "robust", "exo_pair") else 0.0
    won, lost = torch.tensor([3.0, -2.0, 0.0, 0.7], dtype=dtype), torch.tensor([-1.0, 4.0, 0.0, 0.9], dtype=dtype)

    found = PreferenceLoss(name=name, beta=0.3, label_smoothing=flip)(won, lost)

    expected = [FORMULAS[name](*pair, 0.3, flip) for pair in zip(won.tolist(), lost.tolist(), strict=True)]
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert found.dtype == dtype


def test_labels_are_smoothed_where_trl_leaves_them_sharp() -> None:
    policy, reference = per_token(0), per_token(1)
    smoothed, sharp = PreferenceLoss(label_smoothing=0.2), PreferenceLoss()

    found = our_loss(policy, reference, smoothed, is_normalised=False)

    # TRL 1.16.0 reads label_smoothing for other losses only, and says nothing.
    theirs = trl_loss(policy, reference, "sigmoid", smoothed)
    torch.testing.assert_close(theirs, our_loss(policy, reference, sharp, is_normalised=False))
    assert abs(float(found - theirs)) > 1e-3


def test_discopop_is_finite_where_trl_is_not() -> None:
    loss = PreferenceLoss(name="discopop", beta=1.0)
    won, lost = torch.tensor([-60.0, -100.0]), torch.tensor([60.0, 100.0])

    found, gradient = with_gradient(lambda given: loss(given, lost).sum(), won)

    assert torch.isfinite(found)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -1.0]))  # the logistic's, which is all that is left
    policy = per_token(0) + 0.0
    policy[:PAIRS, 0] -= 200
    assert not torch.isfinite(trl_loss(policy, per_token(1), "discopop", loss))


def test_target_margin_and_length_are_those_of_simpo() -> None:
    from trl.experimental.cpo import CPOTrainer

    policy = per_token(0)
    means = policy.sum(-1) / LENGTHS
    trainer: Any = SimpleNamespace(
        loss_type="simpo",
        simpo_gamma=0.5,
        beta=2.0,
        label_smoothing=0.1,
        alpha=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    theirs = CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()

    loss = PreferenceLoss(beta=2.0, target_margin=0.5, label_smoothing=0.1)
    ours = loss(*log_ratios(policy.sum(-1), None, lengths=LENGTHS).chunk(2)).mean()

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_log_ratios_are_float32_and_leave_the_reference_alone() -> None:
    policy = torch.tensor([-3.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0], requires_grad=True)

    found = log_ratios(policy, reference, lengths=torch.tensor([3, 0]))

    assert found.dtype == torch.float32
    assert found.tolist() == [-0.5, 1.0]  # an answer without a token is no division by 0
    found.sum().backward()
    assert reference.grad is None
    assert log_ratios(policy, None).tolist() == [-3.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"loss": "sigmiod", "beta": 0}, ["task.loss='sigmiod': must be one of", "task.beta=0: must be a finite"]),
        ({"loss": ["ipo"], "beta": True}, ["task.loss=['ipo']: must be", "task.beta=True: must be"]),
        ({"label_smoothing": 0.5}, ["task.label_smoothing=0.5: must be a number of at least 0 and below 0.5"]),
        ({"loss": "ipo", "label_smoothing": 0.1}, ["task.label_smoothing=0.1: task.loss=ipo takes none"]),
        ({"loss": "exo_pair"}, ["task.label_smoothing=0: task.loss=exo_pair has log(0)"]),
        ({"target_margin": -1}, ["task.target_margin=-1: must be a finite number"]),
        ({"loss": "hinge", "target_margin": 1.0}, ["task.target_margin=1.0: task.loss=hinge has no target margin"]),
    ],
)
def test_wrong_settings_are_refused_together(settings: dict[str, Any], problems: list[str]) -> None:
    wanted: dict[str, Any] = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0, "target_margin": 0, **settings}

    with pytest.raises(ConfigError) as refused:
        read_preference_loss(**wanted)

    assert len(refused.value.problems) == len(problems)
    assert all(found.startswith(text) for found, text in zip(refused.value.problems, problems, strict=True))


def test_settings_become_a_loss() -> None:
    found = read_preference_loss(loss="robust", beta=1, label_smoothing=0.1, target_margin=0)

    assert found == PreferenceLoss(name="robust", beta=1.0, label_smoothing=0.1)
