"""Losses of a pair of answers, one preferred to the other, from the log-probabilities of whole answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.values import is_number
from trainer import ConfigError, did_you_mean

DISCOPOP_TAU = 0.05  # of arXiv:2406.08414


def log_ratios(policy: Tensor, reference: Tensor | None, *, lengths: Tensor | None = None) -> Tensor:
    """Returns log pi(y|x) - log pi_ref(y|x) of each answer, (B,), in float32 at least.

    Args:
        policy: log pi(y|x), (B,), summed over the answer's tokens.
        reference: The same of the reference, without a graph; None: a reference that knows no difference, log 1.
        lengths: Tokens of each answer, (B,): the result is per token; None: of whole answers.
    """
    policy = policy.to(torch.promote_types(policy.dtype, torch.float32))
    ratios = policy if reference is None else policy - reference.detach().to(policy.dtype)
    return ratios if lengths is None else ratios / lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A loss of pairs, by name; `difference` is the log-ratio of the chosen answer minus that of the rejected one.

    Args:
        name: One of `LOSSES`.
        beta: Multiplies log-ratios: how dear a step away from the reference is. Of ipo and sppo_hard the 1/beta that
            they aim at.
        label_smoothing: The share of pairs believed to be the wrong way round.
        target_margin: What beta times the difference should be at least, in nats; the gamma of SimPO
            (arXiv:2405.14734, eq. 6).
    """

    name: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    target_margin: float = 0.0

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Returns the loss of each pair, (B,).

        Args:
            chosen: Log-ratios of the chosen answers, (B,), from `log_ratios`.
            rejected: Of the rejected ones.
        """
        return LOSSES[self.name](chosen, rejected, self)


def _sigmoid(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """DPO, arXiv:2305.18290, eq. 7; with label smoothing the conservative DPO of the same authors (cDPO)."""
    logits = given.beta * (chosen - rejected) - given.target_margin
    return -(1 - given.label_smoothing) * F.logsigmoid(logits) - given.label_smoothing * F.logsigmoid(-logits)


def _robust(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """Robust DPO, arXiv:2403.00409: the loss of clean labels in expectation where so many are flipped."""
    logits, flipped = given.beta * (chosen - rejected), given.label_smoothing
    kept, turned = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    return ((1 - flipped) * kept - flipped * turned) / (1 - 2 * flipped)


def _hinge(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """The hinge of SLiC-HF (arXiv:2305.10425) on log-ratios, as RSO has it (arXiv:2309.06657)."""
    return torch.relu(1 - given.beta * (chosen - rejected))


def _ipo(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """IPO, arXiv:2310.12036, eq. 17; beta is its tau."""
    return (chosen - rejected - 1 / (2 * given.beta)).square()


def _exo_pair(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """EXO-pref, arXiv:2402.00856, eq. 16 with two answers: KL(policy's choice || smoothed label)."""
    logits = given.beta * (chosen - rejected)
    log_won, log_lost = F.logsigmoid(logits), F.logsigmoid(-logits)
    return log_won.exp() * (log_won - math.log1p(-given.label_smoothing)) + log_lost.exp() * (
        log_lost - math.log(given.label_smoothing)
    )


def _nca_pair(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """NCA for pairs, arXiv:2402.05369."""
    won, lost = given.beta * chosen, given.beta * rejected
    return -F.logsigmoid(won) - 0.5 * F.logsigmoid(-won) - 0.5 * F.logsigmoid(-lost)


def _bco_pair(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """BCO on pairs without its reward shift, arXiv:2404.04656: delta is 0."""
    return -F.logsigmoid(given.beta * chosen) - F.logsigmoid(-given.beta * rejected)


def _sppo_hard(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """SPPO, arXiv:2405.00675, eq. 4.7, where the chosen answer wins for sure."""
    target = 0.5 / given.beta
    return (chosen - target).square() + (rejected + target).square()


def _apo_zero(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """APO-zero, arXiv:2408.06266, eq. 7: the chosen answer up, the rejected one down."""
    return torch.sigmoid(-given.beta * chosen) + torch.sigmoid(given.beta * rejected)


def _apo_down(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """APO-down, arXiv:2408.06266, eq. 8: both down, the rejected one further."""
    return torch.sigmoid(given.beta * chosen) + torch.sigmoid(-given.beta * (chosen - rejected))


def _discopop(chosen: Tensor, rejected: Tensor, given: PreferenceLoss) -> Tensor:
    """DiscoPOP, arXiv:2406.08414, eq. 5: log-ratio modulated between the logistic and the exponential loss."""
    logits = given.beta * (chosen - rejected)
    # The product exp(-z) sigmoid(z / tau) as one exponential: apart, the first overflows where the second is 0.
    exponential = (F.logsigmoid(logits / DISCOPOP_TAU) - logits).exp()
    return -F.logsigmoid(logits) * torch.sigmoid(-logits / DISCOPOP_TAU) + exponential


LOSSES: dict[str, Callable[[Tensor, Tensor, PreferenceLoss], Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
_SMOOTHED = ("sigmoid", "robust", "exo_pair")
# Of an answer's log-ratio alone, not of a difference: without a reference it is never near 0.
ANCHORED = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")


def read_preference_loss(
    *, loss: Any, beta: Any, label_smoothing: Any, target_margin: Any, key: str = "task"
) -> PreferenceLoss:
    """Returns the loss of these settings, or raises ConfigError with all that is wrong with them.

    Args:
        key: Where they stand in the configuration.
    """
    problems = []
    is_known = isinstance(loss, str) and loss in LOSSES
    if not is_known:
        hint = did_you_mean(loss, LOSSES) if isinstance(loss, str) else ""
        problems.append(f"{key}.loss={loss!r}: must be one of {', '.join(LOSSES)}{hint}")
    if not (is_number(beta) and beta > 0):
        problems.append(f"{key}.beta={beta!r}: must be a finite number above 0, such as 0.1")
    if not (is_number(label_smoothing) and 0 <= label_smoothing < 0.5):
        problems.append(
            f"{key}.label_smoothing={label_smoothing!r}: must be a number of at least 0 and below 0.5, the share of "
            "pairs that are the wrong way round"
        )
    elif is_known:
        if label_smoothing and loss not in _SMOOTHED:
            problems.append(
                f"{key}.label_smoothing={label_smoothing}: {key}.loss={loss} takes none; set it to 0, or choose one of "
                f"{', '.join(_SMOOTHED)}"
            )
        if loss == "exo_pair" and label_smoothing == 0:
            problems.append(f"{key}.label_smoothing=0: {key}.loss=exo_pair has log(0) then; its paper takes 1e-3")
    if not (is_number(target_margin) and target_margin >= 0):
        problems.append(f"{key}.target_margin={target_margin!r}: must be a finite number of at least 0, in nats")
    elif target_margin and loss != "sigmoid" and is_known:
        problems.append(
            f"{key}.target_margin={target_margin}: {key}.loss={loss} has no target margin; set it to 0, or take sigmoid"
        )
    if problems:
        raise ConfigError(*problems)
    return PreferenceLoss(
        name=loss, beta=float(beta), label_smoothing=float(label_smoothing), target_margin=float(target_margin)
    )
