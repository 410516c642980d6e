"""What both loops share: the models, the data and the stopwatch."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from trainer import Callback

VOCABULARY, TOKENS, BATCH, LR = 4096, 128, 4, 1e-4
RESULT = "OVERHEAD_RESULT"  # where rank 0 writes what it measured
START = "OVERHEAD_START"  # when the process was started


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, the same in both loops."""

    def __init__(self, num_examples: int) -> None:
        shape = (num_examples, TOKENS)
        self.tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def llama(num_layers: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns a random Llama of about 2M parameters a layer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def student(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the model that both loops train."""
    return llama(4, dtype)


def teacher(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the frozen model of both loops."""
    return llama(8, dtype)


class Stopwatch(Callback):
    """Measures the time to the first step, each step, and the peak memory of rank 0."""

    order = 1000

    def __init__(self) -> None:
        self.first: float | None = None
        self.times: list[float] = []
        self.began = 0.0

    def on_train_step_start(self, trainer: Any, task: Any, step: int) -> None:
        self.start_step()

    def on_train_step_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.end_step()

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.write()

    def start_step(self) -> None:
        """A step begins."""
        self.first = self.first or time.time() - float(os.environ[START])
        self.began = time.perf_counter()

    def end_step(self) -> None:
        """A step ended."""
        self.times.append(time.perf_counter() - self.began)

    def write(self) -> None:
        """Leaves the numbers of rank 0 where the benchmark looks for them."""
        if int(os.environ.get("RANK", 0)) == 0:
            numbers = {
                "step time (s)": statistics.median(self.times[2:]),
                "peak memory (GB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "time to the first step (s)": self.first,
            }
            Path(os.environ[RESULT]).write_text(json.dumps(numbers), encoding="utf-8")
