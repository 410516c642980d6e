"""Runs of the disjoint, mutual and dual encoder tasks on real engines; one spawn serves the tests of all three."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import tasks.dual_encoder
from tasks.disjoint import DisjointTask
from tasks.dual_encoder import DualEncoderTask
from tasks.mutual import MutualTask
from tests.tasks.normalisation_runs import Weights
from tests.trainer.test_trainer import reset_accelerate
from trainer import (
    IGNORED,
    Callback,
    ConfigError,
    ModelSpec,
    MultiModelTrainer,
    TaskModule,
    TrainingData,
    gather_with_gradient,
)
from trainer.data import PaddingCollator
from trainer.data.example import Example
from trainer.data.order import BatchPlan
from trainer.data.text import TextDataset
from trainer.handle import gathered_state_dict
from trainer.updates import UpdatePlan

STEPS, LR = 3, 0.02
VOCABULARY, PADDED, TOKENS, PAD = 61, 64, 59, 0  # logits of a model, of one with a padded head, and the tokenizer's
SHARED, OWN = 6, 12  # examples per global step
Found = dict[str, Any]

# Models and data, the same here and in the plain references


def llama(name: str, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Returns the model of a role: all differ in their start weights, and "small" and "large" in their size."""
    torch.manual_seed(sum(map(ord, name)))
    hidden, layers = (48, 2) if name == "large" else (32, 1)
    config = LlamaConfig(
        vocab_size=PADDED if name == "padded" else VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        initializer_range=0.15,  # far from a uniform distribution
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)  # type: ignore[no-any-return]


def make_texts(count: int, *, seed: int) -> list[Example]:
    """Lengths from 2 to 11 tokens, the first tokens a prompt; every fifth has no label that counts."""
    draw = np.random.default_rng(seed)
    texts = []
    for index in range(count):
        tokens = draw.integers(1, TOKENS, size=2 + (index * 7) % 10, dtype=np.int32)
        labels = tokens.copy()
        labels[: len(tokens) if index % 5 == 4 else index % 3] = IGNORED
        texts.append(Example(input_ids=tokens, labels=labels))
    return texts


def shared_texts() -> list[Example]:
    return make_texts(12, seed=0)


def shared_validation() -> list[Example]:
    return make_texts(7, seed=1)


def own_texts() -> list[Example]:
    return make_texts(18, seed=2)


def own_validation() -> list[Example]:
    return make_texts(19, seed=3)


def encoder(name: str) -> BertModel:
    torch.manual_seed(sum(map(ord, name)))
    config = BertConfig(
        vocab_size=40,
        hidden_size=24 if name == "narrow" else 32,
        intermediate_size=32,
        num_hidden_layers=2 if name == "document" else 1,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )
    return BertModel(config, add_pooling_layer=False)


def make_pairs(count: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            f"{field}_input_ids": torch.randint(1, 40, (2 + (index * step) % 5,), generator=generator)
            for field, step in (("query", 1), ("document", 3))
        }
        for index in range(count)
    ]


def collate_pairs(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {}
    for key in items[0]:
        rows = [item[key] for item in items]
        batch[key] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batch[key.replace("input_ids", "attention_mask")] = (batch[key] != 0).long()  # no token is 0
    return batch


def windows(count: int, size: int, *, wraps: bool = False, steps: int = STEPS) -> list[list[int]]:
    """Returns the examples of each global step of so many, whatever its cut: those of one rank and micro-batch."""
    plan = BatchPlan(count, batch_size=size, accumulation=1, rank=0, world_size=1, seed=0, shuffle=True, wraps=wraps)
    stream: Iterator[tuple[int, int, Any]] = plan.windows()
    return [[index for micro in next(stream)[2] for index in micro.indices] for _ in range(steps)]


def texts_data(train: list[Example], validation: list[Example], *, batch_size: int, tokens: int = 0) -> TrainingData:
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: {"last": tokens - 1}) if tokens else None
    return TrainingData(
        train=TextDataset(train, prompts=[]),
        validation=TextDataset(validation, prompts=[]),
        batch_size=batch_size,
        collate=PaddingCollator(PAD),
        tokenizer=tokenizer,
    )


def shared_data(world_size: int, *, tokens: int = 0) -> TrainingData:
    return texts_data(shared_texts(), shared_validation(), batch_size=SHARED // world_size, tokens=tokens)


# A run


class Watch(Callback):
    """Notes the metrics of each step and validation, and each model's forwards within and outside validations."""

    order = 1000

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []
        self.forwards: dict[str, list[int]] = {}
        self.is_validating = False

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        for name, model in trainer.models.items():
            self.forwards[name] = []
            model.module.register_forward_pre_hook(functools.partial(self._note, trainer, name))

    def _note(self, trainer: MultiModelTrainer, name: str, *_: Any) -> None:
        if not self.is_validating:
            self.forwards[name].append(trainer.global_step + 1)

    def on_validation_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self.is_validating = True

    def on_validation_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.is_validating = False
        self.validations.append(dict(metrics))

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.steps.append(dict(metrics))


def zero(stage: int) -> dict[str, Any]:
    block = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **block}}


def trained(build: Callable[[str], nn.Module], name: str, *, lr: float = LR, **options: Any) -> ModelSpec:
    return ModelSpec(
        build=functools.partial(build, name),
        optimizer=functools.partial(torch.optim.SGD, lr=lr),
        dtype=torch.float32,
        **options,
    )


def frozen(name: str) -> ModelSpec:
    return ModelSpec(build=functools.partial(llama, name), trainable=False, dtype=torch.float32)


def fit(
    task: TaskModule,
    models: Mapping[str, ModelSpec],
    plugins: Mapping[str, Any],
    data: TrainingData,
    *,
    steps: int = STEPS,
    resume: Path | None = None,
    **options: Any,
) -> tuple[MultiModelTrainer, Found]:
    """Returns the trainer after its run, and what the tests ask about; every rank must call it."""
    reset_accelerate()
    watch = Watch()
    trainer = MultiModelTrainer(plugins, max_steps=steps, log_every=1, callbacks={"watch": watch}, **options)
    trainer.fit(task, models=models, data=data, resume=resume)
    engines = {name: (type(model.engine).__name__, model.stage) for name, model in trainer.models.items()}
    weights: dict[str, Weights] = {}
    for name, model in trainer.models.items():
        model.settle()
        weights[name] = gathered_state_dict(model.module)
    found = {
        "weights": weights,
        "engines": engines,
        "steps": watch.steps,
        "validations": watch.validations,
        "forwards": watch.forwards,
    }
    return trainer, found


# The cases

# What each world size runs: on several ranks what may differ there.
CASES = {
    1: "shared swapped own window | two frozen weight-0 padded own-data | eight uneven accumulated validated refused",
    2: "shared own window | two three | eight uneven accumulated detached validated",
    3: "shared own | two | eight uneven",
}


def run_disjoint(world_size: int) -> dict[str, Callable[[], Found]]:
    own = texts_data(own_texts(), own_validation(), batch_size=OWN // world_size)
    small, large = trained(llama, "small"), trained(llama, "large")

    def run(stages: tuple[int, int] = (1, 3), **models: ModelSpec) -> Found:
        plugins = {"small": zero(stages[0]), "large": zero(stages[1]), "judge": {"replicate": True}}
        models = {"small": small, "large": large, **models}
        task, data = DisjointTask(), shared_data(world_size)
        return fit(task, models, {name: plugins[name] for name in models}, data)[1]

    return {
        "shared": lambda: run(judge=frozen("judge")),
        "swapped": lambda: run((3, 1)),
        "own": lambda: run(small=trained(llama, "small", data=own)),
        "window": lambda: run(small=trained(llama, "small", plan=UpdatePlan(update_every=2))),
    }


def run_mutual(world_size: int) -> dict[str, Callable[[], Found]]:
    own = texts_data(own_texts(), own_validation(), batch_size=2)
    stages = {"small": 1, "large": 3, "third": 2, "judge": 3, "padded": 2}

    def run(*names: str, tokens: int = 0, data: TrainingData | None = None, **settings: float) -> Found:
        models = {name: frozen(name) if name == "judge" else trained(llama, name) for name in names}
        models[names[0]].data = data
        plugins = {name: zero(stages[name]) for name in names}
        return fit(MutualTask(**settings), models, plugins, shared_data(world_size, tokens=tokens))[1]

    return {
        "two": lambda: run("small", "large", weight=0.5, temperature=2.0),
        "three": lambda: run("small", "large", "third"),
        "frozen": lambda: run("small", "judge"),
        "weight-0": lambda: run("small", "large", weight=0.0),
        "padded": lambda: run("padded", "large", tokens=TOKENS),
        "own-data": lambda: error_of(lambda: run("small", "large", data=own)),
    }


def error_of(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        function()
    except (ConfigError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}


ENCODERS = {"query": zero(1), "document": zero(3)}
MICRO = {1: 8, 2: 4, 3: 3}  # pairs per micro-batch and rank
ENCODER_LR = 0.05
# Pairs of a run whose last window leaves the last rank nothing but a filler; on 1 rank it is short.
UNEVEN = {1: 11, 2: 9, 3: 11}


def pairs_data(count: int, *, batch_size: int) -> TrainingData:
    train: Any = make_pairs(count)
    validation: Any = validation_pairs()
    return TrainingData(train=train, validation=validation, batch_size=batch_size, collate=collate_pairs)


def validation_pairs() -> list[dict[str, Tensor]]:
    return make_pairs(13, seed=5)


def detached_gather(rows: Tensor) -> tuple[Tensor, int]:
    """What everybody writes first: the other ranks' rows as constants."""
    everything, first = gather_with_gradient(rows.detach())
    return torch.cat([everything[:first], rows, everything[first + len(rows) :]]), first


def run_dual(world_size: int) -> dict[str, Callable[[], Any]]:
    size = MICRO[world_size]

    def run(count: int, *, build: str = "query", own: TrainingData | None = None, **options: Any) -> Any:
        models = {"query": encoder_spec(build), "document": encoder_spec("document")}
        models["query"].data = own
        task, data = DualEncoderTask(temperature=TEMPERATURE), pairs_data(count, batch_size=size)
        return fit(task, models, ENCODERS, data, **options)

    def eight() -> Any:
        trainer, found = run(8, val_every=2)
        found["rescored"] = [trainer.evaluate(limit_batches=1)[0] for _ in range(2)]
        found["evaluated"] = trainer.evaluate()[0]
        return found

    def detached() -> Any:
        with mock.patch.object(tasks.dual_encoder, "gather_with_gradient", detached_gather):
            return run(8)[1]

    return {
        "eight": eight,
        "uneven": lambda: run(UNEVEN[world_size])[1],
        "accumulated": lambda: run(4 * size * world_size, gradient_accumulation_steps=2)[1],
        "detached": detached,
        "validated": lambda: {str(size): validate(size) for size in ((2, 13) if world_size == 1 else (2,))},
        "refused": lambda: {
            "sizes": error_of(lambda: run(8, build="narrow")),
            "own data": error_of(lambda: run(8, own=pairs_data(8, batch_size=2))),
        },
    }


TEMPERATURE = 0.2


def encoder_spec(name: str) -> ModelSpec:
    return trained(encoder, name, lr=ENCODER_LR)


def validate(batch_size: int) -> dict[str, float]:
    reset_accelerate()
    trainer = MultiModelTrainer(ENCODERS, max_steps=1)
    models = {name: encoder_spec(name) for name in ENCODERS}
    task, data = DualEncoderTask(temperature=TEMPERATURE), pairs_data(8, batch_size=batch_size)
    return trainer.validate(task, models=models, data=data)


GATHERED = (2, 0, 3)  # rows of each rank


def gathered_rows(rank: int) -> Tensor:
    return torch.randn(GATHERED[rank], 2, 4, generator=torch.Generator().manual_seed(rank))


def gathered_loss(rank: int, rows: Tensor) -> Tensor:
    """A loss of one rank in the rows of all: each rank weighs them otherwise."""
    weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(100 + rank))
    return (rows * weights).pow(2).sum() + (rank + 1) * rows.prod(1).sum()


def run_gather(rank: int) -> Found:
    rows = gathered_rows(rank).requires_grad_()
    everything, first = gather_with_gradient(rows)
    gathered_loss(rank, everything).backward()  # type: ignore[no-untyped-call]
    return {"rows": everything.detach(), "first": first, "gradient": rows.grad}


def run_tasks(folder: Path) -> dict[str, Any]:
    """Returns the findings of all tasks by name and case; weights are on rank 0 only."""
    from trainer import distributed

    world_size = distributed.world_size()
    wanted = [part.split() for part in CASES[world_size].split("|")]
    runs = {"disjoint": run_disjoint, "mutual": run_mutual, "dual": run_dual}
    found: dict[str, Any] = {}
    for (task, make), names in zip(runs.items(), wanted, strict=True):
        cases: Mapping[str, Callable[[], Any]] = make(world_size)
        found[task] = {name: cases[name]() for name in names}
    return {**found, "gather": run_gather(distributed.rank())}
