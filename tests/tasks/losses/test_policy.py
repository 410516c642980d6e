"""Policy losses: against TRL's own on the same tensors, and against the formulas in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from tasks.losses.policy import (
    KL_ESTIMATES,
    PolicyLoss,
    Tokens,
    batch_deviation,
    group_advantages,
)

ROWS, WIDTH, MAX_LENGTH = 6, 9, 12


def make_case(*, dtype: torch.dtype = torch.float32, is_far: bool = True) -> dict[str, Tensor]:
    """Answers of 1 to 9 tokens whose ratios reach beyond every bound, one without any token."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 1, 4, 0, 6, 3])
    mask = torch.arange(WIDTH) < lengths[:, None]
    old = -torch.rand(ROWS, WIDTH, generator=draw, dtype=torch.float64) * 4 - 0.1
    moved = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * (0.6 if is_far else 0.02)
    reference = old + torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) * 0.5
    advantages = torch.tensor([1.3, -0.7, -1.9, 0.4, 0.0, 0.8], dtype=torch.float64)
    case = {"new": old + moved, "old": old, "reference": reference, "advantages": advantages}
    return {**{name: value.to(dtype) for name, value in case.items()}, "mask": mask}


def ours(loss: PolicyLoss, case: dict[str, Tensor], *, kl: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns our loss and its gradient of the log-probabilities, (ROWS, WIDTH)."""
    mask = case["mask"]
    new = case["new"].clone().requires_grad_()
    tokens = Tokens.of(mask)
    log_probs = new[mask]
    terms = loss(log_probs, case["old"][mask], case["advantages"][tokens.rows], tokens)
    values = terms.loss + kl * KL_ESTIMATES["k3"](log_probs, case["reference"][mask])
    total = (values * loss.weights(tokens, like=values)).sum() / loss.items(mask)
    total.backward()
    assert new.grad is not None
    return total.detach(), new.grad


class OneProcess:
    num_processes, sync_gradients = 1, True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def theirs(loss_type: str, case: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the loss and the gradient of TRL's own method, with its log-probabilities given."""
    new = case["new"].clone().requires_grad_()
    mask = case["mask"].long()
    arguments = {"delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "steps_per_generation": 1}
    arguments |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    arguments |= {"use_bias_correction_kl": False, **options.pop("args", {})}
    settings = {"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, **options}
    trainer = SimpleNamespace(
        **settings,
        loss_type=loss_type,
        args=SimpleNamespace(**arguments),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": torch.ones_like(mask[:, :1]),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if loss_type == "rloo":
        inputs["old_logps"] = (case["old"] * mask).sum(-1)
        total = RLOOTrainer._compute_loss(trainer, None, inputs)
    else:
        total = GRPOTrainer._compute_loss(trainer, None, inputs)
    total.backward()
    return total.detach(), new.grad


TYPES: dict[str, tuple[PolicyLoss, str, dict[str, Any]]] = {
    "grpo": (PolicyLoss(normalisation="grpo", clip_high=0.28), "grpo", {}),
    "dapo": (PolicyLoss(normalisation="token", clip_high=0.28), "dapo", {}),
    "bnpo": (PolicyLoss(normalisation="token", clip_high=0.28), "bnpo", {}),
    "dr_grpo": (PolicyLoss(normalisation="dr_grpo", clip_high=0.28, max_length=MAX_LENGTH), "dr_grpo", {}),
    "two-sided": (PolicyLoss(clip_high=0.28, max_ratio=1.6), "dapo", {"args": {"delta": 1.6}}),
    "gspo": (
        PolicyLoss(normalisation="grpo", ratio="sequence", clip_low=0.05, clip_high=0.1),
        "grpo",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "luspo": (
        PolicyLoss(normalisation="luspo", ratio="sequence", clip_low=0.05, clip_high=0.1),
        "luspo",
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    # TRL's bound is the largest ratio itself.
    "cispo": (PolicyLoss(surrogate="cispo", clip_high=0.5), "cispo", {"epsilon_high": 1.5}),
    "sapo": (PolicyLoss(surrogate="sapo", normalisation="grpo"), "sapo", {}),
    "vespo": (PolicyLoss(surrogate="vespo"), "vespo", {}),
    "rloo": (PolicyLoss(normalisation="grpo", ratio="product", clip_high=0.28), "rloo", {}),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_are_trls(name: str, kl: float) -> None:
    loss, loss_type, options = TYPES[name]
    if loss_type == "rloo" and kl:
        pytest.skip("RLOO takes the divergence from the reward")
    case = make_case()
    # TRL counts an answer without a token as one whose loss is 0; ours counts it for nothing.
    present = case["mask"].any(-1)
    case = {key: value[present] for key, value in case.items()}

    found, gradient = ours(loss, case, kl=kl)
    expected, wanted = theirs(loss_type, case, beta=kl, **options)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.abs().sum() > 0


def by_formula(loss: PolicyLoss, case: dict[str, Tensor]) -> float:
    """Returns the loss, written out number by number in double precision."""
    total, count = 0.0, 0.0
    for row in range(ROWS):
        places = [place for place in range(WIDTH) if case["mask"][row, place]]
        if not places:
            continue
        advantage = case["advantages"][row].item()
        new, old = ([case[name][row, place].item() for place in places] for name in ("new", "old"))
        logs = [a - b for a, b in zip(new, old, strict=True)]
        whole = {"sequence": math.exp(sum(logs) / len(logs)), "product": math.exp(sum(logs))}
        for index, log_ratio in enumerate(logs):
            ratio = whole.get(loss.ratio, math.exp(log_ratio))
            if loss.surrogate == "clip":
                bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
                value = -min(min(ratio, loss.max_ratio or math.inf) * advantage, bounded * advantage)
            elif loss.surrogate == "cispo":
                value = -min(ratio, 1 + loss.clip_high) * advantage * new[index]
            elif loss.surrogate == "sapo":
                sharp = loss.sapo_positive if advantage > 0 else loss.sapo_negative
                value = -4 / sharp / (1 + math.exp(-sharp * (ratio - 1))) * advantage
            else:
                power, decay = (2, 3) if advantage >= 0 else (3, 2)
                value = -math.exp(decay * (1 - whole["product"])) * whole["product"] ** power * advantage * new[index]
            total += value / (len(logs) if loss.normalisation == "grpo" else 1)
        count += {"token": len(logs), "dr_grpo": MAX_LENGTH}.get(loss.normalisation, 1)
    return total / count


@pytest.mark.parametrize("name", TYPES)
def test_loss_is_the_formula_in_double_precision(name: str) -> None:
    loss, case = TYPES[name][0], make_case(dtype=torch.float64)

    found, _ = ours(loss, case)
    single, _ = ours(loss, make_case())

    assert found.item() == pytest.approx(by_formula(loss, case), rel=1e-12)
    assert single.item() == pytest.approx(found.item(), rel=1e-5)


def test_a_ratio_beyond_its_bound_has_no_gradient_and_is_counted() -> None:
    new = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])

    terms = PolicyLoss()(new, torch.zeros(5), advantages, None)
    terms.loss.sum().backward()

    assert new.grad is not None and (new.grad == 0).tolist() == [True, False, False, True, False]
    assert terms.is_high.tolist() == [True, False, False, False, False]
    assert terms.is_low.tolist() == [False, False, False, True, False]


def test_the_bounds_may_differ() -> None:
    new = torch.tensor([0.25, 0.25], requires_grad=True)  # a ratio of 1.284

    for high, has_gradient in ((0.28, False), (0.29, True)):
        (gradient,) = torch.autograd.grad(
            PolicyLoss(clip_high=high)(new, torch.zeros(2), torch.ones(2), None).loss.sum(), new
        )
        assert (gradient != 0).all().item() == has_gradient


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_mean_of_an_unbiased_estimate_is_the_divergence(name: str) -> None:
    policy, reference = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)

    estimate = (policy.exp() * KL_ESTIMATES[name](policy, reference)).sum()

    assert estimate.item() == pytest.approx((policy.exp() * (policy - reference)).sum().item(), rel=1e-12)


@pytest.mark.parametrize(("name", "is_right"), [("k1", False), ("k2", True), ("k3", False)])
def test_only_k2_has_the_divergences_gradient_as_a_loss(name: str, is_right: bool) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    reference = torch.randn(20, generator=torch.Generator().manual_seed(2)).double().log_softmax(-1)
    policy = logits.log_softmax(-1)

    # The mean over tokens that the policy drew: their probability has no gradient.
    (found,) = torch.autograd.grad(
        (policy.detach().exp() * KL_ESTIMATES[name](policy, reference)).sum(), logits, retain_graph=True
    )
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)

    assert torch.allclose(found, wanted, atol=1e-12) == is_right


# Advantages ----------------------------------------------------------------------------------------------------------

GROUPS = torch.tensor([[1.0, 0.0, 0.5, 0.0], [2.0, 2.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.3]])


def rewards_by_trl(rewards: Tensor, scale: str) -> Tensor:
    """Returns the advantages as TRL's own lines compute them."""
    from trl.trainer.utils import nanstd

    size, flat = rewards.shape[1], rewards.flatten()
    mean = torch.nanmean(rewards, dim=1).repeat_interleave(size)
    found = flat - mean
    if scale != "none":
        spread = nanstd(rewards, dim=1).repeat_interleave(size) if scale == "group" else nanstd(flat)
        found = found / (spread + 1e-4)
    return torch.nan_to_num(found, nan=0.0).view_as(rewards)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("missing", [[], [(0, 1)], [(0, 1), (1, 0), (1, 2)]])
def test_advantages_are_trls(scale: str, missing: list[tuple[int, int]]) -> None:
    rewards = GROUPS.clone()
    for place in missing:
        rewards[place] = math.nan

    found = group_advantages(rewards, baseline="mean", scale=scale, deviation=batch_deviation(rewards))

    expected = rewards_by_trl(rewards, scale)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-6)
    # TRL's mean of equal rewards is rounded, and what is left is divided by EPSILON.
    assert (found[2] == 0).all() and expected[2].abs().max() < 1e-3


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = GROUPS.clone()
    rewards[1, 0] = math.nan

    found = group_advantages(rewards, baseline="leave_one_out", scale="none")

    assert found[0].tolist() == pytest.approx([1 - 0.5 / 3, -0.5, 0.5 - 1 / 3, -0.5])
    assert found[1].tolist() == pytest.approx([0.0, 2 - 0.5, 0.0, -1.5])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_that_are_alike_give_exactly_nothing(baseline: str, scale: str) -> None:
    rewards = torch.full((2, 7), 0.1)

    found = group_advantages(rewards, baseline=baseline, scale=scale, deviation=batch_deviation(rewards))

    assert (found == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_whose_squares_no_float32_holds_are_told_apart(baseline: str, scale: str) -> None:
    plain = torch.tensor([[1.0, 2.0, 3.0, 7.0]])
    rewards, extreme = plain * 1e25, torch.tensor([[-3.4e38, 3.4e38, 0.0, 0.0]])

    found, of_plain, of_extreme = (
        group_advantages(one, baseline=baseline, scale=scale, deviation=batch_deviation(one))
        for one in (rewards, plain, extreme)
    )

    torch.testing.assert_close(found, of_plain, rtol=1e-4, atol=1e-6)  # but for EPSILON alike
    assert of_extreme[0, 0] == -of_extreme[0, 1] and 1 < of_extreme[0, 1] < 2
    assert found.dtype == torch.float32


@pytest.mark.parametrize("rewards", [[[math.nan, math.nan, math.nan]], [[math.nan, 2.0, math.nan]], [[2.0]]])
def test_a_reward_with_nothing_beside_it_says_nothing(rewards: list[list[float]]) -> None:
    given = torch.tensor(rewards)
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group", "batch", "none"):
            found = group_advantages(given, baseline=baseline, scale=scale, deviation=batch_deviation(given))
            assert (found == 0).all()


def test_the_deviation_of_the_batch_adds_up_over_ranks() -> None:
    rewards = GROUPS.clone()
    rewards[0, 0] = math.nan
    other = torch.tensor([5.0, math.nan, -3.0])
    everything = torch.cat([rewards.flatten(), other])
    kept = everything[~everything.isnan()].double()
    sums = iter([torch.stack([torch.tensor(2.0).double(), torch.tensor(2.0).double()]), None])

    def total(value: Tensor) -> Tensor:
        share = next(sums)
        if share is not None:
            return value + share
        return value + ((other[[0, 2]].double() - kept.mean()) ** 2).sum()

    assert batch_deviation(rewards, total).item() == pytest.approx(kept.std().item(), rel=1e-12)
