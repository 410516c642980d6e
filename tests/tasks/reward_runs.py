"""Runs of the reward task on real engines, with a critic beside it, and the same by hand in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tasks.reward import RewardTask
from tasks.scores.intervals import wilson_interval
from tasks.scores.scoring import sequence_scores, token_scores
from tests.tasks.task_runs import LR, PAD, fit, llama, windows, zero
from trainer import IGNORED, ModelSpec, TrainingData
from trainer.data.preferences import PreferenceCollator
from trainer.export import export_model, rescore
from trainer.scorers import sequence_scorer, token_scorer
from trainer.seeds import seed_everything

PAIRS, HELD_OUT, SIZE, STEPS = 11, 7, 6, 3
CENTERING = 0.05
# (ZeRO stage, micro-batch per rank, accumulation): six pairs a step, however they are cut.
CUTS = {1: {"zero0": (0, 3, 2), "zero2": (2, 6, 1)}, 2: {"zero1": (1, 3, 1), "zero3": (3, 1, 3)}}
ROWS = [[5, 9, 17, PAD, 8], [7, 3, PAD], [11], [30, 31, 32, 33]]  # the pad token stands inside texts too
WIDTH = 6
Found = dict[str, Any]


def make_pairs(count: int, *, seed: int, with_margin: bool) -> list[dict[str, Tensor]]:
    """Pairs of one prompt and answers of other lengths; some hold the pad token, some end with it."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for index in range(count):
        prompt = torch.randint(1, 50, (1 + index % 4,), generator=generator)
        pair = {}
        for side, length in (("chosen", 1 + index % 5), ("rejected", 1 + (index * 3 + 1) % 6)):
            answer = torch.randint(0, 50, (length,), generator=generator)
            answer[-1] = PAD if index % 3 else answer[-1]
            pair[f"{side}_input_ids"] = torch.cat([prompt, answer])
            pair[f"{side}_labels"] = torch.cat([torch.full_like(prompt, IGNORED), answer])
        if with_margin:
            pair["margin"] = torch.tensor(0.25 * (index % 3))
        pairs.append(pair)
    return pairs


def train_pairs() -> list[dict[str, Tensor]]:
    return make_pairs(PAIRS, seed=0, with_margin=True)


def held_out_pairs() -> list[dict[str, Tensor]]:
    return make_pairs(HELD_OUT, seed=1, with_margin=True)


def save_language_model(folder: Path) -> Path:
    """Writes the causal language model from which the reward model and the critic start."""
    llama("small").save_pretrained(folder)
    return folder


def spec(build: Any, folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(build=functools.partial(build, name=str(folder)), dtype=torch.float32, **options)


def run_reward(folder: Path) -> dict[str, Found]:
    """Returns what each cut of this number of ranks found; every rank must call it."""
    from trainer import distributed

    return {name: run_cut(folder, name, *cut) for name, cut in CUTS[distributed.world_size()].items()}


def run_cut(folder: Path, name: str, stage: int, batch_size: int, accumulation: int) -> Found:
    train: Any = train_pairs()
    validation: Any = held_out_pairs()
    models = {
        "reward": spec(
            sequence_scorer, folder / "lm", trainable=True, optimizer=functools.partial(torch.optim.SGD, lr=LR)
        ),
        "critic": spec(token_scorer, folder / "lm", trainable=False),
    }
    plugins = {"reward": zero(stage), "critic": zero(3) if stage % 2 else {"replicate": True}}
    data = TrainingData(
        train=train, validation=validation, batch_size=batch_size, collate=PreferenceCollator(PAD), tokenizer=None
    )
    trainer, found = fit(
        RewardTask(centering=CENTERING),
        models,
        plugins,
        data,
        steps=STEPS,
        gradient_accumulation_steps=accumulation,
    )
    with torch.no_grad():
        for side in ("right", "left"):
            batch = padded(side)
            found[f"texts {side}"] = sequence_scores(trainer.models["reward"], batch)
            found[f"tokens {side}"] = token_scores(trainer.models["critic"], batch)[batch["attention_mask"] != 0]
            found[f"critic as texts {side}"] = sequence_scores(trainer.models["critic"], batch)
    export = folder / f"export-{name}"
    export_model(trainer.models["reward"], export, tokenizer=None, build={})
    found["rescored"] = rescore(
        trainer, "reward", export, build=functools.partial(sequence_scorer, name=str(folder / "lm")), tolerance=1e-5
    )
    return found


def padded(side: str) -> dict[str, Tensor]:
    """Returns ROWS as a batch; pads are told from the pad token inside texts by the mask only."""
    rows = [torch.tensor(row) for row in ROWS]
    before = [WIDTH - len(row) if side == "left" else 0 for row in rows]
    tokens = torch.full((len(rows), WIDTH), PAD)
    mask = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    for index, (row, start) in enumerate(zip(rows, before, strict=True)):
        tokens[index, start : start + len(row)] = row
        mask[index, start : start + len(row)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


# The same by hand: one text at a time, no padding, float64


def start_model(folder: Path, build: Any, name: str) -> Any:
    """Returns a model as the engines make it: by the run's seed and its role."""
    seed_everything(0, name)
    return build(str(folder), dtype=torch.float32).double()


def scores_of_tokens(model: Any, tokens: Tensor) -> Tensor:
    return model.score(model.model(input_ids=tokens[None]).last_hidden_state)[0, :, 0]  # type: ignore[no-any-return]


def scores_of(model: Any, pair: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (
        scores_of_tokens(model, pair["chosen_input_ids"])[-1],
        scores_of_tokens(model, pair["rejected_input_ids"])[-1],
    )


def reference_loss(model: Any, pair: dict[str, Tensor]) -> Tensor:
    chosen, rejected = scores_of(model, pair)
    return -F.logsigmoid(chosen - rejected - pair["margin"]) + CENTERING * (chosen + rejected) ** 2


def reference_run(folder: Path) -> tuple[dict[str, Tensor], list[float], list[dict[str, float]]]:
    """Returns the weights, the loss of each step, and the scores on held-out pairs before and after."""
    model = start_model(folder, sequence_scorer, "reward")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    pairs, losses, scores = train_pairs(), [], [held_out_scores(model)]
    for window in windows(len(pairs), SIZE, steps=STEPS):
        loss = torch.stack([reference_loss(model, pairs[index]) for index in window]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    scores.append(held_out_scores(model))
    return model.state_dict(), losses, scores


@torch.no_grad()
def held_out_scores(model: Any) -> dict[str, float]:
    pairs = [tuple(float(score) for score in scores_of(model, pair)) for pair in held_out_pairs()]
    chances = [float(torch.sigmoid(torch.tensor(chosen - rejected))) for chosen, rejected in pairs]
    right = sum(chosen > rejected for chosen, rejected in pairs) / len(pairs)
    low, high = wilson_interval(right, len(pairs))
    error = 0.0
    for start in range(10):  # bins of the probability of the side that the model prefers
        inside = [chance for chance in chances if int((max(chance, 1 - chance) - 0.5) * 20) == start]
        error += abs(sum((chance > 0.5) - max(chance, 1 - chance) for chance in inside)) / len(pairs)
    return {
        "val/accuracy": right,
        "val/accuracy_low": low,
        "val/accuracy_high": high,
        "val/margin": sum(chosen - rejected for chosen, rejected in pairs) / len(pairs),
        "val/mean_score": sum(chosen + rejected for chosen, rejected in pairs) / len(pairs) / 2,
        "val/pairwise_loss": -sum(float(torch.tensor(chance).log()) for chance in chances) / len(pairs),
        "val/brier_score": sum((1 - chance) ** 2 for chance in chances) / len(pairs),
        "val/calibration_error": error,
    }
