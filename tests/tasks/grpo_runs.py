"""GRPO on real engines, in several layouts, and the same updates by hand in float64 from the texts."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForSequenceClassification

from tasks.grpo import GRPOTask
from tasks.text.prompts import prompts_of
from tests.tasks.task_runs import LR, VOCABULARY, fit, frozen, llama, trained, zero
from tests.tasks.tiny_tokenizers import CHARACTERS, make_tokenizer
from trainer import Batch, CheckpointPlan, ConfigError, ModelSpec, TrainingData, distributed
from trainer.data.prompts import PromptDataset, PromptRows

STEPS, SAMPLES, NEW, TEMPERATURE = 3, 4, 6, 1.3
END = 36  # a token that the model likes: answers of several lengths
WINDOW = 4  # prompts
PROMPTS = ("a b c", "d", "ef gh", "i j", "k lm", "no", "pq")  # an epoch's last window has 3
GENERATION = {"max_new_tokens": NEW, "temperature": TEMPERATURE}
HERE = "tests.tasks.grpo_runs"
PLUGINS = {"actor": zero(2), "reference": zero(3), "judge": zero(3)}


def distinct(completions: Sequence[str], *, scale: float = 1.0) -> list[float]:
    """How many characters there are, each counted once."""
    return [scale * len(set(text)) for text in completions]


def early(completions: Sequence[str], prompts: Sequence[str], level: Sequence[int]) -> list[float | None]:
    """Nothing for some prompts, and for others how many letters are from the alphabet's beginning."""
    return [
        None if one == 2 else sum(letter < "h" for letter in text) / (1 + len(text))
        for text, _, one in zip(completions, prompts, level, strict=True)
    ]


def constant(completions: Sequence[str]) -> list[float]:
    return [0.1] * len(completions)


def nothing(completions: Sequence[str]) -> list[None]:
    return [None] * len(completions)


def for_a_while(completions: Sequence[str]) -> list[float | None]:
    """Something on rank 0 in the first window, and from then on nothing."""
    has_begun = Recorded.now is not None and bool(Recorded.now.trainer.global_step)
    return [None if has_begun or not distributed.is_main() else float(len(text)) for text in completions]


REWARDS: dict[str, Any] = {
    "distinct": {"function": f"{HERE}.distinct", "scale": 0.3},
    "early": {"function": f"{HERE}.early", "weight": 2.0},
}
CONSTANT = {"function": f"{HERE}.constant"}
KL = {"weight": 0.2}
# Name to the task's settings, and the actor's micro-batches per update where a window has two.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"loss": {"normalisation": "grpo"}, "kl": KL},
    "passes": {"epochs": 2, "advantages": {"scale": "batch"}, "kl": {**KL, "estimator": "k2"}, "mask_truncated": True},
    "sequence": {"epochs": 2, "loss": {"ratio": "sequence", "normalisation": "grpo", "clip_low": 0.02}},
    "rloo": {
        "epochs": 2,
        "advantages": {"baseline": "leave_one_out", "scale": "none"},
        "loss": {"ratio": "product", "normalisation": "grpo"},
        "kl": {**KL, "estimator": "k1", "place": "reward"},
    },
    "dr": {"loss": {"normalisation": "dr_grpo"}, "advantages": {"scale": "none"}},
}


def tokenizer() -> Any:
    """As many tokens as the models have logits."""
    special = ("<pad>", *(f"<{index}>" for index in range(1, END)), "<end>")
    return make_tokenizer(special=special, characters=CHARACTERS[: VOCABULARY - len(special)])


def judge() -> Any:
    """A reward model, whose pad token is its end token."""
    config = llama("small").config
    config.num_labels, config.pad_token_id = 1, END
    torch.manual_seed(5)
    return LlamaForSequenceClassification(config)


def prompts() -> PromptDataset:
    rows = [{"prompt": text, "level": index % 3} for index, text in enumerate(PROMPTS)]
    return PromptRows().build(rows, tokenizer(), block_size=16)


class Recorded(GRPOTask):
    """Keeps what was written: by window and micro-batch, rows of (example, prompt, answer, components, has ended)."""

    now: Recorded | None = None  # the last one

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        Recorded.now = self
        self.windows: list[list[dict[str, Any]]] = []

    def prepare_batch(self, batch: Batch) -> Batch:
        rollout = super().prepare_batch(batch)
        asked = [prompt for prompt in prompts_of(batch) for _ in range(self.num_completions)]
        places = [index for index in self.trainer.indices[""] for _ in range(self.num_completions)]
        attended = rollout["attention_mask"] != 0
        rows = [
            (index, prompt, ids[mask].tolist()[len(prompt) :], parts, bool(ended))
            for index, prompt, ids, mask, parts, ended in zip(
                places,
                asked,
                rollout["input_ids"],
                attended,
                rollout["components"].tolist(),
                rollout["is_ended"].tolist(),
                strict=True,
            )
        ]
        self._micros = [*getattr(self, "_micros", []), {"rows": rows, "is_filler": self.trainer.is_filler}]
        return rollout

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        self.windows.append(self._micros)
        self._micros = []
        return super().prepare_window(batches, is_filler=is_filler)


def run(
    settings: dict[str, Any],
    *,
    accumulation: int = 1,
    updates: int = 1,
    steps: int = STEPS,
    rewards: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns the run's findings and texts.

    Args:
        updates: Of the actor in each window.
    """
    settings = {"num_completions": SAMPLES, "generation": GENERATION, "rewards": rewards or REWARDS, **settings}
    if "kl" in settings:
        settings.setdefault("reference", "reference")
    task = Recorded(**settings)
    names = task.models_for("fit", ["actor", "reference", *task.own_tokens])
    actor = trained(llama, "small", gradient_accumulation_steps=accumulation // updates, lora=lora)
    judge_spec = ModelSpec(build=judge, trainable=False, dtype=torch.float32)
    models = {name: {"actor": actor, "reference": frozen("large"), "judge": judge_spec}[name] for name in names}
    size = WINDOW // accumulation // distributed.world_size()
    data = TrainingData(
        train=prompts(),
        validation=prompts(),
        batch_size=size,
        collate=PromptRows().collator(tokenizer()),
        tokenizer=tokenizer(),
    )
    _, found = fit(
        task,
        models,
        {name: PLUGINS[name] for name in names},
        data,
        steps=steps * task.passes,
        gradient_accumulation_steps=accumulation,
        **options,
    )
    return {**found, "windows": task.windows, "tapped": sorted(task.taps.taps)}


def run_cases(folder: Path) -> dict[str, Any]:
    """Returns what every case found on this number of ranks; one spawn serves all tests."""
    found = {name: run(settings) for name, settings in CASES.items()}
    found["accumulated"] = run(CASES["plain"], accumulation=2)
    found["updates"] = run(CASES["passes"], accumulation=2, updates=2)
    found["untapped"] = run({**CASES["plain"], "fused": False})
    found["alike"] = run({}, rewards={"constant": CONSTANT})
    found["unrewarded"] = run_unrewarded()
    try:
        run({}, rewards={"nothing": {"function": f"{HERE}.nothing"}, "constant": {"weight": 0.0, **CONSTANT}})
    except ConfigError as error:
        found["nothing"] = error.problems
    found["judged"] = run({}, rewards={"helpful": {"model": "judge", "weight": 2.0}, **REWARDS})
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    found["adapter"] = run({"reference": "adapter", "kl": KL}, lora=lora)
    if distributed.world_size() == 2:
        found["resumed"] = run_in_parts(folder)
    return found


def run_unrewarded() -> dict[str, Any]:
    """Returns a run that has rewards in its first window only, and what it warned of."""
    warned = Warnings()
    logging.getLogger("tasks.policy.health").addHandler(warned)
    try:
        found = run({}, rewards={"for_a_while": {"function": f"{HERE}.for_a_while"}})
    finally:
        logging.getLogger("tasks.policy.health").removeHandler(warned)
    return {**found, "warned": warned.messages}


class Warnings(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run_in_parts(folder: Path) -> dict[str, Any]:
    """Returns a run that was ended between two passes over a rollout, the copy of it that went on."""
    place = folder / "parts"
    plan = {"folder": place, "checkpoint": CheckpointPlan()}
    ended = run(CASES["passes"], stop_at_step=3, **plan)
    if distributed.is_main():
        shutil.copytree(place, folder / "copy")
    distributed.barrier()
    return {"ended": ended, "rest": run(CASES["passes"], resume=place, **plan)}


# The same by hand -----------------------------------------------------------------------------------------------------


def log_probs_of(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """log p of each token of an answer, at the temperature, without padding."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def estimate(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    apart = policy - reference
    return {"k1": apart, "k2": apart**2 / 2, "k3": torch.exp(-apart) - 1 + apart}[name]


def reward_of(components: list[float]) -> float:
    """The weighted sum of those that exist."""
    weights = [1.0, 2.0]
    there = [weight * value for weight, value in zip(weights, components, strict=True) if not math.isnan(value)]
    return sum(there) if there else math.nan


def advantages_of(rewards: dict[int, list[float]], *, baseline: str, scale: str) -> dict[int, list[float]]:
    """Advantages by prompt; all of these rewards exist."""

    def deviation(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))

    everything = [value for values in rewards.values() for value in values]
    found = {}
    for index, values in rewards.items():
        mean = sum(values) / len(values)
        others = [(sum(values) - value) / (len(values) - 1) for value in values]
        centred = [
            v - (other if baseline == "leave_one_out" else mean) for v, other in zip(values, others, strict=True)
        ]
        divisor = {"group": deviation(values) + 1e-4, "batch": deviation(everything) + 1e-4, "none": 1.0}[scale]
        found[index] = [value / divisor for value in centred]
    return found


def reference_run(settings: dict[str, Any], by_rank: list[list[list[dict[str, Any]]]], *, updates: int = 1) -> Any:
    """Returns the actor after all windows, from the texts of every rank, in plain PyTorch and float64."""
    actor: Any = llama("small").double()
    other: Any = llama("large").double()
    optimizer = torch.optim.SGD(actor.parameters(), lr=LR)
    loss = {"ratio": "token", "normalisation": "token", "clip_low": 0.2, "clip_high": 0.2, **settings.get("loss", {})}
    kl = {"weight": 0.0, "estimator": "k3", "place": "loss", **settings.get("kl", {})}
    how = {"baseline": "mean", "scale": "group", **settings.get("advantages", {})}
    for window in zip(*by_rank, strict=True):
        micros = list(zip(*window, strict=True))  # by micro-batch, then by rank
        parts = [[row for one in micro if not one["is_filler"] for row in one["rows"]] for micro in micros]
        rows = [row for part in parts for row in part]
        known = {id(row): {} for row in rows}
        for row in rows:
            with torch.no_grad():
                known[id(row)]["old"] = log_probs_of(actor, row[1], row[2])
                known[id(row)]["reference"] = log_probs_of(other, row[1], row[2])
        rewards: dict[int, list[float]] = {}
        for row in rows:
            taken = 0.0
            if kl["place"] == "reward":
                pair = known[id(row)]
                taken = kl["weight"] * estimate(kl["estimator"], pair["old"], pair["reference"]).sum().item()
            rewards.setdefault(row[0], []).append(reward_of(row[3]) - taken)
        left = {index: iter(values) for index, values in advantages_of(rewards, **how).items()}
        for row in rows:
            known[id(row)]["advantage"] = next(left[row[0]])
        for _ in range(settings.get("epochs", 1)):
            size = len(parts) // updates
            for start in range(0, len(parts), size):
                chosen = [row for part in parts[start : start + size] for row in part]
                chosen = [row for row in chosen if row[4] or not settings.get("mask_truncated")]
                _update(actor, optimizer, [(row, known[id(row)]) for row in chosen], loss, kl)
    return actor.state_dict()


def _update(actor: Any, optimizer: Any, rows: list[Any], loss: dict[str, Any], kl: dict[str, Any]) -> None:
    total: Any = 0.0
    for row, known in rows:
        new = log_probs_of(actor, row[1], row[2])
        logs, advantage = new - known["old"], known["advantage"]
        if loss["ratio"] == "sequence":
            logs = logs.mean().expand(len(new))
        elif loss["ratio"] == "product":
            logs = logs.sum().expand(len(new))
        ratio = torch.exp(logs)
        clipped = ratio.clamp(1 - loss["clip_low"], 1 + loss["clip_high"])
        values = -torch.minimum(ratio * advantage, clipped * advantage)
        if kl["place"] == "loss":
            values = values + kl["weight"] * estimate(kl["estimator"], new, known["reference"])
        total = total + (values.mean() if loss["normalisation"] == "grpo" else values.sum())
    if not rows:
        return
    counts = {"grpo": len(rows), "dr_grpo": len(rows) * NEW, "token": sum(len(row[2]) for row, _ in rows)}
    (total / counts[loss["normalisation"]]).backward()
    optimizer.step()
    optimizer.zero_grad()
