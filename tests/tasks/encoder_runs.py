"""Runs of encoder distillation on real engines, and its models; one spawn serves all tests of a number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

from tasks.distill_encoder import DistillEncoderTask
from tasks.projection import Projection
from tests.tasks.task_runs import UNEVEN, error_of, fit, pairs_data, trained, zero
from trainer import ModelSpec

WIDTHS = {"student": 24, "alike": 32, "teacher": 32}
LR = 0.05
LAYERS = {"embeddings": "embeddings", "encoder.layer.0": "encoder.layer.-1"}
VALUES = {"encoder.layer.0.attention.self.value": "encoder.layer.1.attention.self.value"}
TERMS: dict[str, dict[str, Any]] = {
    "near": {"function": "embedding_cosine", "weight": {"start": 1.5, "end": 0.5, "steps": 3}},
    "ranking": {
        "function": "similarity_kl",
        "weight": 0.5,
        "temperature": {"start": 0.3, "end": 0.5, "steps": 3},
    },
    "matrix": {"function": "similarity_mse", "weight": 2.0},
    "inner": {"function": "hidden_mse", "weight": 0.25, "layers": LAYERS},
    "related": {"function": "attention_relations", "weight": 0.75, "layers": VALUES, "heads": 8},
    "off": {"function": "embedding_mse", "weight": 0.0},
}
PLACES = 3  # the embedding and two pairs of layers
RANKS = (1, 2)


def bert(name: str) -> BertModel:
    """Returns the model of a role; "alike" is a student as wide as its teacher."""
    torch.manual_seed(sum(map(ord, name)))
    config = BertConfig(
        vocab_size=40,
        hidden_size=WIDTHS[name],
        intermediate_size=32,
        num_hidden_layers=2 if name == "teacher" else 1,
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.initializer_range = 0.3
    return BertModel(config, add_pooling_layer=False)


def projection(name: str) -> nn.Module:
    torch.manual_seed(7)
    return Projection(student_size=WIDTHS["student"], teacher_size=WIDTHS["teacher"], count=PLACES)


def specs(student: str, *, with_projection: bool) -> dict[str, ModelSpec]:
    models = {
        "student": trained(bert, student, lr=LR),
        "teacher": ModelSpec(build=functools.partial(bert, "teacher"), trainable=False, dtype=torch.float32),
    }
    return models | ({"projection": trained(projection, "projection", lr=LR)} if with_projection else {})


def task(*, with_projection: bool) -> DistillEncoderTask:
    return DistillEncoderTask(terms=TERMS, projection="projection" if with_projection else None)


def run(count: int, *, world_size: int, plugins: dict[str, Any], student: str = "student", micro: int = 8) -> Any:
    """Returns what the run found; so many pairs are in a global micro-batch, which is cut over the ranks."""
    with_projection = "projection" in plugins
    data = pairs_data(count, batch_size=micro // world_size)
    options = {"val_every": 3}
    return fit(
        task(with_projection=with_projection), specs(student, with_projection=with_projection), plugins, data, **options
    )[1]


REPLICATE = {"replicate": True}


def run_all(world_size: int) -> dict[str, Any]:
    plugins: dict[str, dict[str, Any]] = {
        "joint": {"student": zero(2), "teacher": REPLICATE, "projection": zero(1)},
        # On 2 ranks the last window leaves the second rank nothing but a filler.
        "sharded": {"student": zero(3), "teacher": zero(3), "projection": zero(3)},
        "alike": {"student": zero(2), "teacher": zero(3)},
        "refused": {"student": zero(2), "teacher": REPLICATE},
    }
    found: dict[str, Any] = {
        "joint": run(8, world_size=world_size, plugins=plugins["joint"]),
        "sharded": run(UNEVEN[2], world_size=world_size, plugins=plugins["sharded"]),
        "alike": run(8, world_size=world_size, plugins=plugins["alike"], student="alike"),
    }
    if world_size == 1:
        found["refused"] = error_of(lambda: run(8, world_size=1, plugins=plugins["refused"]))
    return found
