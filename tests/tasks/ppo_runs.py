"""Runs of PPO on real engines, and the same updates by hand in float64 from the texts that were written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from tasks.generation import GenerationOptions, Written
from tasks.policy.scored_answers import Rollout
from tasks.ppo import PPOTask
from tests.tasks.normalisation_runs import Weights
from tests.tasks.sequence_runs import ENDS, tokenizer
from tests.tasks.task_runs import PAD, VOCABULARY, Watch, zero
from tests.tasks.tiny_tokenizers import CHARACTERS
from tests.trainer.test_trainer import reset_accelerate
from trainer import IGNORED, Batch, CheckpointPlan, ModelSpec, MultiModelTrainer, TrainingData, distributed
from trainer.export import ExportError, export_model, rescore
from trainer.handle import gathered_state_dict

LR, NEW, EPOCHS = {"actor": 0.5, "critic": 0.05}, 6, 2
VOWELS = "aeiou"
FIRST_LETTER = VOCABULARY - len(CHARACTERS[: VOCABULARY - 37])  # ids below are special tokens
STAGES = {"actor": 2, "critic": 1, "reference": 3}
SETTINGS: dict[str, Any] = {
    "rewards": {
        "vowels": {"function": "tests.tasks.ppo_runs.vowels", "weight": 2.0},
        "hint": {"function": "tests.tasks.ppo_runs.hint", "weight": 1.0},
    },
    "generation": {"max_new_tokens": NEW, "temperature": 1.5},
    "epochs": EPOCHS,
    "gamma": 0.97,
    "lam": 0.8,
    "loss": {"clip_low": 0.1, "clip_high": 0.15, "value_clip": 0.05, "entropy_weight": 0.01},
    "kl": {"weight": 0.3, "target": 0.5, "gain": 0.5},
    "missing_end_penalty": 0.7,
}


def vowels(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(text.count(vowel) for vowel in VOWELS)) for text in completions]


def hint(prompts: list[str], completions: list[str], *, bonus: list[float], **columns: Any) -> list[float]:
    return [float(given) for given in bonus]


def config_of(role: str, tokens: int = VOCABULARY) -> LlamaConfig:
    hidden = 24 if role == "critic" else 32
    return LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        initializer_range=0.15,
        num_labels=1,
        classifier_dropout=0.0,
    )


def build(role: str, tokens: int = VOCABULARY) -> nn.Module:
    """The reference is not what the actor starts from, so that their KL is there from the first rollout on."""
    torch.manual_seed(sum(map(ord, role)))
    kind: Any = LlamaForTokenClassification if role == "critic" else LlamaForCausalLM
    return kind(config_of(role, tokens))  # type: ignore[no-any-return]


def prompts(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 6 tokens, each with a column of its own."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "prompt_input_ids": torch.randint(FIRST_LETTER, VOCABULARY, (1 + index % 6,), generator=draw),
            "columns": {"prompt": f"prompt {index}", "bonus": 0.25 * (index % 3)},
        }
        for index in range(count)
    ]


def collate(items: list[dict[str, Any]]) -> Batch:
    rows = [item["prompt_input_ids"] for item in items]
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "prompt_input_ids": pad(rows, padding_value=PAD),
        "prompt_attention_mask": pad([torch.ones_like(row) for row in rows]),
        "columns": {name: [item["columns"][name] for item in items] for name in items[0]["columns"]},
    }


class Scripted:
    """Writes letters only, so that no answer ends: some of none at all, the others of up to 3 tokens."""

    def write(
        self, prompts: Sequence[list[int]], *, seeds: Sequence[int] | None, options: GenerationOptions
    ) -> Written:
        answers = [[FIRST_LETTER + (sum(prompt) + n) % 20 for n in range(sum(prompt) % 4)] for prompt in prompts]
        return Written(answers=answers, is_ended=[False] * len(prompts))

    def update_weights(self) -> None:
        pass


class Recorded(PPOTask):
    """Notes the texts of each rollout, by micro-batch; fillers are left out."""

    writes_script = False

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.writes_script:
            self.writer = Scripted()
        self.rollouts: list[list[list[dict[str, Any]]]] = []
        self.held_out: list[list[dict[str, Any]]] = []  # by validation
        self._micro_batches: list[list[dict[str, Any]]] = []

    def prepare_batch(self, batch: Batch) -> Batch:
        prepared = super().prepare_batch(batch)
        self._micro_batches.append(self._rows_of(prepared))
        return prepared

    def on_validation_start(self) -> None:
        self.held_out.append([])

    def _judge(self, rollout: Rollout) -> Batch:
        judged = super()._judge(rollout)
        if self.held_out and not self.models["actor"].module.training:
            self.held_out[-1] += self._rows_of(judged)
        return judged

    def _rows_of(self, batch: Batch) -> list[dict[str, Any]]:
        tokens, labels, attended = (batch[key] for key in ("input_ids", "labels", "attention_mask"))
        rows = [
            {"index": index, "tokens": row[mask != 0].tolist(), "answer": own[own != IGNORED].tolist()}
            for index, row, own, mask in zip(self.trainer.indices[""], tokens, labels, attended, strict=True)
        ]
        return [] if self.trainer.is_filler else rows

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        self.rollouts.append(self._micro_batches)
        self._micro_batches = []
        return super().prepare_window(batches, is_filler=is_filler)


def run(
    count: int = 16,
    *,
    batch_size: int = 4,
    accumulation: int = 2,
    own: dict[str, int] | None = None,
    steps: int = 2 * EPOCHS,
    folder: Path | None = None,
    stop_at_step: int | None = None,
    resume: Path | None = None,
    is_scripted: bool = False,
    critic_tokens: int = VOCABULARY,
    lora: dict[str, Any] | None = None,
    twin: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Returns the weights after a run and what it noted; every rank must call it.

    Args:
        batch_size: Of all ranks together.
        own: Micro-batches per update of each trained model; default: 1, so mini-batches.
        lora: The actor's.
        twin: Whether the reference is what the actor's base model is.
    """
    reset_accelerate()
    task, watch = Recorded(**{**SETTINGS, **settings}), Watch()
    task.writes_script = is_scripted
    roles = task.models_for("fit", list(STAGES))
    trainer = MultiModelTrainer(
        {role: zero(STAGES[role]) for role in roles},
        max_steps=steps,
        stop_at_step=stop_at_step,
        gradient_accumulation_steps=accumulation,
        log_every=1,
        callbacks={"watch": watch},
        folder=folder,
        checkpoint=CheckpointPlan() if folder is not None and lora is None else None,
    )
    models = {
        role: ModelSpec(
            build=functools.partial(
                build,
                "actor" if twin and role == "reference" else role,
                critic_tokens if role == "critic" else VOCABULARY,
            ),
            trainable=role in LR,
            dtype=torch.float32,
            optimizer=functools.partial(torch.optim.SGD, lr=LR[role]) if role in LR else None,
            gradient_accumulation_steps=(own or dict.fromkeys(LR, 1))[role] if role in LR else None,
            lora=lora if role == "actor" else None,
        )
        for role in roles
    }
    rows: Any = prompts(count, seed=0)
    held_out: Any = prompts(5, seed=1)
    data = TrainingData(
        train=rows,
        validation=held_out,
        batch_size=batch_size // distributed.world_size(),
        collate=collate,
        tokenizer=tokenizer(),
    )
    trainer.fit(task, models=models, data=data, resume=resume)
    weights: dict[str, Weights] = {}
    for name, model in trainer.models.items():
        model.settle()
        weights[name] = gathered_state_dict(model.module)
    return {
        "weights": weights,
        "engines": {name: (type(model.engine).__name__, model.stage) for name, model in trainer.models.items()},
        "rollouts": task.rollouts,
        "held_out": task.held_out,
        "export": check_export(trainer, folder) if lora and folder is not None else None,
        "steps": watch.steps,
        "validations": watch.validations,
        "state": task.state_dict(),
    }


def check_export(trainer: MultiModelTrainer, folder: Path) -> str:
    """Returns what is said of a critic's export that lacks its head; that of a right one, and the actor's, pass."""
    for name in LR:
        build_of = functools.partial(build, name)
        export_model(trainer.models[name], folder / name, tokenizer=None, build={})
        rescore(trainer, name, folder / name, build=lambda dtype: build_of().to(dtype), tolerance=1e-3)  # noqa: B023
    file = folder / "critic" / "model.safetensors"
    if distributed.is_main():
        weights = load_file(file)
        save_file({**weights, "score.weight": weights["score.weight"] + 0.1}, file, metadata={"format": "pt"})
    distributed.barrier()
    try:
        rescore(trainer, "critic", folder / "critic", build=build, tolerance=1e-3)
    except ExportError as error:
        return str(error)
    return ""


# The same by hand


def read(model: Any, one: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of each token of the answer: its log-probability and the entropy, (n,)."""
    tokens, size = torch.tensor([one["tokens"]]), len(one["answer"])
    logits = model(input_ids=tokens).logits[0, -size - 1 : -1] / chosen["generation"].get("temperature", 1.0)
    log_p = logits.log_softmax(-1)
    return log_p[range(size), one["answer"]], -(log_p.exp() * log_p).sum(-1)


def value(critic: Any, one: dict[str, Any]) -> Tensor:
    """What the critic says before each token of the answer, (n,)."""
    found: Tensor = critic(input_ids=torch.tensor([one["tokens"]])).logits[0, -len(one["answer"]) - 1 : -1, 0]
    return found


def score(one: dict[str, Any], rows: Sequence[dict[str, Any]], chosen: dict[str, Any]) -> float:
    letters = [CHARACTERS[token - FIRST_LETTER] for token in one["answer"] if token >= FIRST_LETTER]
    total = 2.0 * sum(letter in VOWELS for letter in letters) + rows[one["index"]]["columns"]["bonus"]
    is_ended = bool(one["answer"]) and one["answer"][-1] in ENDS
    return float(total - (0 if is_ended else chosen["missing_end_penalty"]))


@torch.no_grad()
def judge(
    answers: Sequence[dict[str, Any]], models: Any, rows: Any, chosen: dict[str, Any], coefficient: float
) -> None:
    """Adds to each answer what the models say of it, its advantages ("raw") and its returns ("return")."""
    for one in answers:
        one["old"], one["near"] = (read(models[role], one, chosen)[0] for role in ("actor", "reference"))
        one["value"], size = value(models["critic"], one), len(one["answer"])
        if chosen["kl"].get("place", "reward") == "reward":
            reward = -coefficient * (one["old"] - one["near"])
        else:
            reward = torch.zeros(size, dtype=torch.float64)
        if size:
            reward[-1] += score(one, rows, chosen)
        after = torch.cat([one["value"], torch.zeros(1)])
        delta = reward + chosen["gamma"] * after[1:] - one["value"]
        decay = chosen["gamma"] * chosen["lam"]
        sums = [sum(decay**k * delta[t + k] for k in range(size - t)) for t in range(size)]
        one["raw"] = torch.stack(sums) if sums else torch.zeros(0)  # type: ignore[arg-type]
        one["return"] = one["raw"] + one["value"]


def by_hand(rollouts: Sequence[Sequence[Sequence[dict[str, Any]]]], *, every: int = 1, **settings: Any) -> Any:
    """Returns the weights after the updates on written answers, one at a time and without padding, in float64.

    Args:
        rollouts: Each a list of micro-batches, of all ranks together.
        every: Micro-batches per update.
    """
    chosen = {**SETTINGS, **settings}
    models = {role: build(role).double() for role in STAGES}
    optimizers = {role: torch.optim.SGD(models[role].parameters(), lr=lr) for role, lr in LR.items()}
    kl_options, loss = chosen["kl"], chosen["loss"]
    coefficient, last_kl, coefficients = kl_options["weight"], None, []

    for rollout in rollouts:
        answers = [dict(one) for micro in rollout for one in micro]
        if last_kl is not None and kl_options.get("target") is not None:
            error = min(max(last_kl / kl_options["target"] - 1, -0.2), 0.2)
            coefficient *= 1 + kl_options["gain"] * error
        coefficients.append(coefficient)
        judge(answers, models, prompts(100, seed=0), chosen, coefficient)
        last_kl = sum(float((one["old"] - one["near"]).sum()) for one in answers) / len(answers)
        everything = torch.cat([one["raw"] for one in answers])
        for one in answers:
            is_white = chosen.get("whiten", True)
            one["advantage"] = (
                (one["raw"] - everything.mean()) / everything.std(correction=0) if is_white else one["raw"]
            )
        sizes = [len(micro) for micro in rollout]
        micros = list(torch.arange(len(answers)).split(sizes))
        updates = [torch.cat(micros[start : start + every]).tolist() for start in range(0, len(micros), every)]
        for _ in range(chosen["epochs"]):
            for update in updates:
                policy, regression, count = torch.zeros(()), torch.zeros(()), 0
                for one in (answers[index] for index in update):
                    log_p, entropy = read(models["actor"], one, chosen)
                    ratio = (log_p - one["old"]).exp()
                    gain = torch.minimum(
                        ratio * one["advantage"],
                        ratio.clamp(1 - loss["clip_low"], 1 + loss["clip_high"]) * one["advantage"],
                    ) + (loss["entropy_weight"] * entropy)
                    policy = policy - gain.sum()
                    if kl_options.get("place") == "loss":
                        apart = one["near"] - log_p
                        policy = policy + coefficient * (apart.exp() - 1 - apart).sum()
                    new, old = value(models["critic"], one), one["value"]
                    near = old + (new - old).clamp(-loss["value_clip"], loss["value_clip"])
                    worse = torch.maximum((new - one["return"]) ** 2, (near - one["return"]) ** 2)
                    regression, count = regression + worse.sum() / 2, count + len(one["answer"])
                for role, total in (("actor", policy), ("critic", regression)):
                    optimizers[role].zero_grad()
                    (total / count).backward()
                    optimizers[role].step()
    return {
        "weights": {role: models[role].state_dict() for role in LR},
        "coefficients": coefficients,
    }


# What the ranks run

WHOLE = {"batch_size": 8, "accumulation": 1}  # one update of each model in each pass
CUT = {"batch_size": 2, "accumulation": 4, "own": dict.fromkeys(LR, 4)}  # the same in four micro-batches
UNEVEN = {"count": 13, "batch_size": 4, "accumulation": 2}  # the last micro-batch has one prompt: on 2 ranks a filler
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
LOSS: dict[str, Any] = {"kl": {"weight": 0.3, "place": "loss", "estimator": "k3"}, "whiten": False}


def run_all(folder: Path) -> dict[str, Any]:
    """Returns what each run found; every rank must call it."""
    found = {"mini": run(), "whole": run(**WHOLE), "uneven": run(**UNEVEN), "resumed": run_in_parts(folder)}
    found["adapter"] = run(**WHOLE, lora=LORA, reference="adapter", folder=folder / "adapter")
    found["twin"] = run(**WHOLE, lora=LORA, twin=True)
    if distributed.world_size() == 1:
        found["cut"] = run(**CUT)
        found["scripted"] = run(**WHOLE, **LOSS, is_scripted=True)
    return found


def run_in_parts(folder: Path) -> dict[str, Any]:
    """Ends between two passes over the second rollout, whose KL coefficient is no longer the first one's."""
    run(folder=folder, stop_at_step=3)
    return run(folder=folder, resume=folder)
