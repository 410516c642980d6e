"""What the benchmarks of post-training share: the model, a stopwatch, TRL's settings and the table of ratios."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.benchmarks.distill.contenders import MAX_NORM, VOCABULARY, WARM_UP, llama
from tests.benchmarks.distill.measure import Numbers, peak_bytes, write_numbers
from trainer import Callback

STEP_TIME, CPU_TIME, MEMORY = "step time (s)", "CPU seconds a step", "peak memory (MB)"
# Of TRL's. The processor's time, of all threads, means something on a busy machine too.
AIMS = {STEP_TIME: 0.95, CPU_TIME: 0.95, MEMORY: 0.9}
LR = 1e-4  # slow enough that the loss is not near 0 after some steps
__all__ = ["AIMS", "LR", "MAX_NORM", "MEMORY", "STEP_TIME", "VOCABULARY", "Stopwatch", "StopwatchCallback"]


def policy(dtype: torch.dtype = torch.float32, *, is_quick: bool = False) -> PreTrainedModel:
    """Returns the model that is trained, and that a reference is a copy of: random, the same in each process."""
    torch.manual_seed(1)
    return llama(width=64 if is_quick else 256, num_layers=1 if is_quick else 6)


class Stopwatch:
    """Measures from the end of a step to the end of the next: all that a step costs, its batch and logging too."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.memory = 0

    def end_step(self) -> None:
        """A step ended."""
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())
        self.memory = peak_bytes()  # before the closing check, which builds logits

    def finish(self, **results: float) -> None:
        """Leaves the numbers, and what the contender came to, by which it is known that it did the same work."""
        times = {STEP_TIME: self.ends, CPU_TIME: self.cpu_ends}
        numbers: Numbers = {
            name: statistics.median(after - before for before, after in pairwise(ends[WARM_UP - 1 :]))
            for name, ends in times.items()
        }
        write_numbers({**numbers, MEMORY: self.memory / 1e6, **results})


class StopwatchCallback(Callback):
    """The stopwatch as this trainer runs it."""

    order = 1000

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_step_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
        self.stopwatch.end_step()


def watch_trl(stopwatch: Stopwatch) -> Any:
    """Returns the stopwatch as a callback of transformers' Trainer."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stopwatch.end_step()

    return Watch()


def trl_settings(num_steps: int, batch_size: int) -> dict[str, Any]:
    """Returns the settings of TRL's trainers that make them do what ours does by default."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": LR,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_epsilon": 1e-8,
        "bf16": False,
        "gradient_checkpointing": False,  # or it would compute the policy's layers twice
        "use_cpu": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a word for each id, such as TRL asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def table_of(
    found: Mapping[str, Numbers], pairs: Sequence[tuple[str, str]], *, title: str, results: Sequence[str] = ()
) -> Table:
    """Returns a row per contender, and for each pair of ours and theirs the ratios.

    Args:
        results: Names of numbers that show what was computed.
    """
    table = Table("", *AIMS, *results, title=title)
    for name, numbers in found.items():
        table.add_row(name, *(f"{numbers[key]:.4g}" for key in AIMS), *(f"{numbers[key]:.4f}" for key in results))
    blank = [""] * len(results)
    for ours, theirs in pairs:
        ratios = (f"{found[ours][key] / found[theirs][key]:.2f}" for key in AIMS)
        table.add_row(f"{ours} / {theirs}", *ratios, *blank)
    table.add_row("aim", *(f"{aim}" for aim in AIMS.values()), *blank)
    return table
