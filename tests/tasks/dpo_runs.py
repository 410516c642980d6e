"""Runs of DPO on real engines, and the same in plain PyTorch in float64."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.dpo import DPOTask
from tests.tasks.task_runs import PAD, TOKENS, Found, error_of, fit, frozen, llama, trained, windows, zero
from trainer import IGNORED, CheckpointPlan, ModelSpec, TrainingData
from trainer.data.preferences import PreferenceCollator

STEPS, BATCH, BETA, LR = 3, 6, 0.5, 0.1
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
LORA_LR = 4.0  # B starts at 0 and with it A's gradient
Pair = dict[str, Tensor]


def make_pairs(count: int, *, seed: int) -> list[Pair]:
    """Prompts of 1 to 4 tokens, answers of 1 to 6, the two of a pair of different lengths mostly."""
    draw = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        prompt = draw.integers(1, TOKENS, size=1 + index % 4).tolist()
        pair = {}
        for side, length in (("chosen", 1 + (3 * index) % 6), ("rejected", 1 + (5 * index + 2) % 6)):
            answer = draw.integers(1, TOKENS, size=length).tolist()
            pair[f"{side}_input_ids"] = torch.tensor(prompt + answer)
            pair[f"{side}_labels"] = torch.tensor([IGNORED] * len(prompt) + answer)
        pairs.append(pair)
    return pairs


def train_pairs(count: int = 12) -> list[Pair]:
    return make_pairs(count, seed=0)


def held_out_pairs() -> list[Pair]:
    return make_pairs(7, seed=1)


def data(world_size: int, *, count: int = 12, accumulation: int = 1) -> TrainingData:
    train: Any = train_pairs(count)
    validation: Any = held_out_pairs()
    size = BATCH // world_size // accumulation
    return TrainingData(train=train, validation=validation, batch_size=size, collate=PreferenceCollator(PAD))


def run(
    task: DPOTask,
    world_size: int,
    *,
    stages: tuple[int, int | None] = (2, 3),
    lora: bool = False,
    count: int = 12,
    accumulation: int = 1,
    **options: Any,
) -> Found:
    """Returns what a run found; the reference is the model of the same start weights."""
    spec: dict[str, Any] = {"lora": LORA, "lr": LORA_LR} if lora else {"lr": LR}
    models: dict[str, ModelSpec] = {"policy": trained(llama, "small", **spec)}
    plugins: dict[str, Any] = {"policy": zero(stages[0])}
    if "reference" in task.models_for("fit", ["policy", "reference"]):
        models["reference"] = frozen("small")
        plugins["reference"] = {"replicate": True} if stages[1] is None else zero(stages[1])
    given = data(world_size, count=count, accumulation=accumulation)
    options = {"steps": STEPS, "gradient_accumulation_steps": accumulation, **options}
    return fit(task, models, plugins, given, **options)[1]


def settings(name: str) -> dict[str, Any]:
    """The task's settings of each case that is held against plain PyTorch."""
    return {
        "sigmoid": {},
        "ipo": {"loss": "ipo", "length_normalised": True},
        "held": {"loss": "robust", "label_smoothing": 0.1, "sft_weight": 0.3},
        "alone": {"reference": "none", "loss": "sigmoid", "length_normalised": True, "target_margin": 0.4},
        "hinge": {"loss": "hinge"},
    }[name]


def run_dpo(folder: Path) -> dict[str, Any]:
    """Returns the findings of all cases by name; every rank calls it."""
    from trainer import distributed

    world_size = distributed.world_size()

    def task(name: str = "sigmoid", **more: Any) -> DPOTask:
        return DPOTask(beta=BETA, **{**settings(name), **more})

    found: dict[str, Any] = {"sigmoid": run(task(), world_size)}
    if world_size == 1:
        found["ipo"] = run(task("ipo", fused=False), 1)
        found["held"] = run(task("held"), 1, stages=(1, None), accumulation=3)
        found["alone"] = run(task("alone"), 1, stages=(3, None))
        found["hinge"] = run(task("hinge"), 1, stages=(0, None), accumulation=2)
    else:
        found["held"] = run(task("held"), 2, stages=(3, 3), accumulation=3)
        found["uneven"] = run(task(), 2, stages=(1, None), count=7, accumulation=3)
    for stage in (0, 3) if world_size == 1 else (2, 3):
        for kind in ("reference", "adapter", "cached"):
            found[f"lora {kind} {stage}"] = run(task(reference=kind), world_size, stages=(stage, None), lora=True)
    found["cached"] = run(task(reference="cached"), world_size, stages=(3, None))
    found |= run_in_parts(folder, task, world_size)
    return found


def run_in_parts(folder: Path, task: Any, world_size: int) -> dict[str, Any]:
    """Returns an undisturbed run with a recorded reference, one that ended and went on, and what is refused."""
    place = folder / "run"
    make = functools.partial(task, reference="cached")
    whole = run(make(), world_size, stages=(2, None), steps=4)
    saving = {"folder": place, "checkpoint": CheckpointPlan()}
    run(make(), world_size, stages=(2, None), steps=4, stop_at_step=2, **saving)
    file = place / "reference_log_probs.safetensors"
    written = file.stat().st_mtime_ns
    rest = run(make(), world_size, stages=(2, None), steps=4, resume=place, **saving)
    is_untouched = file.stat().st_mtime_ns == written
    models = {"policy": trained(llama, "other", lr=LR)}
    refused = error_of(lambda: fit(make(cache=str(file)), models, {"policy": zero(2)}, data(world_size), steps=1))
    run(make(cache=str(file)), world_size, stages=(2, None), count=14, steps=1)
    is_extended = file.stat().st_mtime_ns != written
    return {"whole": whole, "rest": rest, "is_untouched": is_untouched, "refused": refused, "is_extended": is_extended}


# The same by hand


def log_prob(model: Any, pair: Pair, side: str) -> tuple[Tensor, int]:
    """Returns log p of one answer, one row without padding, and its number of tokens."""
    tokens, labels = pair[f"{side}_input_ids"], pair[f"{side}_labels"]
    log_probs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
    places = (labels != IGNORED).nonzero().squeeze(-1)
    return torch.stack([log_probs[place - 1, tokens[place]] for place in places]).sum(), len(places)


def loss_of_pair(policy: Any, reference: Any, pair: Pair, name: str) -> tuple[Tensor, Tensor, int]:
    """Returns the loss of a pair, the cross-entropy of its chosen answer, and that answer's tokens."""
    given = settings(name)
    (won, won_size), (lost, lost_size) = (log_prob(policy, pair, side) for side in ("chosen", "rejected"))
    cross_entropy = -won
    if given.get("reference") != "none":
        with torch.no_grad():
            won_before, lost_before = (log_prob(reference, pair, side)[0] for side in ("chosen", "rejected"))
        won, lost = won - won_before, lost - lost_before
    if given.get("length_normalised"):
        won, lost = won / won_size, lost / lost_size
    z = BETA * (won - lost)
    flip = given.get("label_smoothing", 0.0)
    loss = {
        "sigmoid": lambda: -F.logsigmoid(z),
        "ipo": lambda: (won - lost - 1 / (2 * BETA)) ** 2,
        "held": lambda: (-(1 - flip) * F.logsigmoid(z) + flip * F.logsigmoid(-z)) / (1 - 2 * flip),
        "alone": lambda: -F.logsigmoid(z - 0.4),
        "hinge": lambda: torch.clamp(1 - z, min=0),
    }[name]()
    return loss, cross_entropy, won_size


def reference_run(name: str, *, count: int = 12) -> tuple[dict[str, Tensor], list[float]]:
    """Returns the policy's weights after all steps, and the loss of each step, in float64."""
    policy: Any = llama("small").double()
    reference: Any = llama("small").double()
    optimizer = torch.optim.SGD(policy.parameters(), lr=LR)
    pairs, weight, losses = train_pairs(count), settings(name).get("sft_weight", 0.0), []
    for window in windows(count, BATCH, steps=STEPS):
        found = [loss_of_pair(policy, reference, pairs[index], name) for index in window]
        loss = torch.stack([one for one, *_ in found]).mean()
        loss = loss + weight * sum(ce for _, ce, _ in found) / sum(size for *_, size in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return policy.state_dict(), losses


@torch.no_grad()
def held_out_numbers(pairs: Sequence[Pair], policy: Any, reference: Any) -> dict[str, float]:
    """Returns what a validation must say, pair by pair."""
    rows = []
    for pair in pairs:
        (won, won_size), (lost, lost_size) = (log_prob(policy, pair, side) for side in ("chosen", "rejected"))
        won_before, lost_before = (log_prob(reference, pair, side)[0] for side in ("chosen", "rejected"))
        won_by, lost_by = float(won - won_before), float(lost - lost_before)
        rows.append(
            {
                "reward_accuracy": float(won_by > lost_by) if won_by != lost_by else 0.5,
                "reward_margin": BETA * (won_by - lost_by),
                "chosen_reward": BETA * won_by,
                "rejected_reward": BETA * lost_by,
                "log_prob_accuracy": float(won > lost),
                "chosen_log_prob": float(won),
                "rejected_log_prob": float(lost),
                "chosen_log_ratio": won_by,
                "drift": (abs(won_by) / won_size + abs(lost_by) / lost_size) / 2,
            }
        )
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
