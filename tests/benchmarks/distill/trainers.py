"""Whole training steps: this trainer, TRL's two distillation trainers, and a loop by hand.

As a module it is the process that measures one of them: python -m tests.benchmarks.distill.trainers ours 8 4 256
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from tests.benchmarks.distill.contenders import (
    LR,
    VOCABULARY,
    Rows,
    divergence,
    student,
    teacher,
    tokens,
)
from tests.benchmarks.distill.measure import Numbers, check_same_work, interleave, num_cores
from tests.benchmarks.stopwatch import (
    MAX_NORM,
    MEMORY,
    STEP_TIME,
    Stopwatch,
    StopwatchCallback,
    trl_settings,
    watch_trl,
)

AIMS = {STEP_TIME: 0.95, MEMORY: 0.8}  # of the best of TRL's
TRL = ("TRL DistillationTrainer", "TRL GKDTrainer")
Contender = Callable[[int, int, int], None]  # steps, rows of a batch, tokens of a row


def ours(num_steps: int, batch_size: int, length: int) -> None:
    """This trainer and its task, as they are used from Python."""
    import functools

    from tasks.distill import DistillTask
    from trainer import ModelSpec, MultiModelTrainer, TrainingData

    stopwatch = Stopwatch()
    trainer = MultiModelTrainer(
        {"student": {"zero_optimization": {"stage": 2}}, "teacher": {"replicate": True}},
        max_steps=num_steps,
        callbacks={"stopwatch": StopwatchCallback(stopwatch)},
    )
    models = {
        "student": ModelSpec(
            build=student,
            dtype=torch.float32,
            optimizer=functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.0),
            max_grad_norm=MAX_NORM,
        ),
        "teacher": ModelSpec(build=teacher, dtype=torch.float32, trainable=False),
    }
    rows = Rows(num_steps * batch_size * trainer.world_size, length)
    # Random models know nothing of random tokens, which is refused otherwise.
    task = DistillTask(terms={"forward_kl": {}}, preflight={"teacher_is_trained": False})
    trainer.fit(task, models=models, data=TrainingData(train=rows, batch_size=batch_size))
    stopwatch.finish(divergence=divergence(trainer.models["student"].module, length))


def by_hand(num_steps: int, batch_size: int, length: int) -> None:
    """Plain torch: the teacher without gradient, the student, the divergence, clipping, AdamW."""
    model: nn.Module = student()
    frozen = teacher().eval()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    stopwatch = Stopwatch()
    for batch in DataLoader(Rows(num_steps * batch_size, length), batch_size=batch_size):
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        with torch.no_grad():
            log_p = torch.log_softmax(frozen(**inputs).logits[:, :-1], dim=-1)
        log_q = torch.log_softmax(model(**inputs).logits[:, :-1], dim=-1)
        loss = F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), reduction="batchmean", log_target=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        stopwatch.end_step()
    stopwatch.finish(divergence=divergence(getattr(model, "module", model), length))


def trl_distillation(num_steps: int, batch_size: int, length: int) -> None:
    """TRL's DistillationTrainer with given completions in place of generated ones, so that it does the same work."""
    from trl import DistillationConfig, DistillationTrainer

    class GivenCompletions(DistillationTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
            rows = torch.tensor([example["input_ids"] for example in inputs])
            ones = torch.ones_like(rows)
            counted = self.accelerator.reduce(torch.tensor(float(rows[:, 1:].numel())))
            return {
                "prompt_ids": rows[:, :1],
                "prompt_mask": ones[:, :1],
                "completion_ids": rows[:, 1:],
                "completion_mask": ones[:, 1:],
                "num_items_in_batch": counted,
            }

    config = DistillationConfig(beta=0.0, **trl_settings(num_steps, batch_size, lr=LR))
    _run_trl(GivenCompletions, config, num_steps, batch_size, length)


def trl_gkd(num_steps: int, batch_size: int, length: int) -> None:
    """TRL's GKDTrainer without on-policy batches."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    config = GKDConfig(beta=0.0, lmbda=0.0, **trl_settings(num_steps, batch_size, lr=LR))
    _run_trl(GKDTrainer, config, num_steps, batch_size, length, data_collator=_collate)


def _run_trl(
    kind: Callable[..., Any], config: Any, num_steps: int, batch_size: int, length: int, **options: Any
) -> None:
    from datasets import Dataset

    stopwatch = Stopwatch()
    row = tokens(length).tolist()
    num_examples = num_steps * batch_size * int(os.environ.get("WORLD_SIZE", 1))
    trainer = kind(
        model=student(),
        teacher_model=teacher(),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * num_examples, "input_ids": [row] * num_examples}),
        processing_class=_tokenizer(),
        callbacks=[watch_trl(stopwatch)],
        **options,
    )
    trainer.train()
    stopwatch.finish(divergence=divergence(trainer.accelerator.unwrap_model(trainer.model), length))


def _collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    rows = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": rows, "labels": rows.clone(), "attention_mask": torch.ones_like(rows)}


def _tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer that TRL asks for; no text goes through it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


CONTENDERS: dict[str, Contender] = {
    "ours": ours,
    "TRL DistillationTrainer": trl_distillation,
    "TRL GKDTrainer": trl_gkd,
    "by hand": by_hand,
}


def compare(*, num_ranks: int, num_steps: int, batch_size: int, length: int, repeats: int) -> Table:
    """Returns the medians of all trainers, and what ours takes of the best of TRL's."""
    numbers = (str(number) for number in (num_steps, batch_size, length))
    arguments = list(numbers)
    commands = {name: ["tests.benchmarks.distill.trainers", name, *arguments] for name in CONTENDERS}
    found = interleave(commands, repeats=repeats, num_ranks=num_ranks, num_threads=max(1, num_cores() // num_ranks))
    # GKDTrainer's gradient is a half on two ranks, which AdamW hides but for its epsilon.
    check_same_work(found, "divergence", tolerance=0.01)
    return table_of(found, title=f"{num_ranks} rank(s), {batch_size} x {length} tokens each, vocabulary {VOCABULARY}")


def table_of(found: dict[str, Numbers], *, title: str) -> Table:
    """Returns a row per trainer, and how ours compares with the best of TRL's."""
    table = Table("", *AIMS, "divergence at the end", title=title)
    for name, numbers in found.items():
        table.add_row(name, *(f"{numbers[key]:.4g}" for key in AIMS), f"{numbers['divergence']:.4f}")
    best = {key: min(found[name][key] for name in TRL) for key in AIMS}
    table.add_row("ours / best of TRL", *(f"{found['ours'][key] / best[key]:.2f}" for key in AIMS), "")
    table.add_row("aim", *(f"{aim}" for aim in AIMS.values()), "")
    return table


if __name__ == "__main__":
    contender, *sizes = sys.argv[1:]
    num_steps, batch_size, length = map(int, sizes)
    CONTENDERS[contender](num_steps, batch_size, length)
