"""Sequence-level distillation: its update against plain PyTorch, what is learnt of an answer, ranks, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.distill_sequence import DistillSequenceTask
from tasks.text.language import completion_mask
from tests.ranks import run_ranks
from tests.tasks.sequence_runs import DRAWN, reference_run, run_text_tasks
from tests.tasks.task_runs import PAD, llama
from tests.tasks.tiny_tokenizers import TEMPLATE, WORDY, make_tokenizer
from trainer import IGNORED
from trainer.config import ConfigError

END = 1


class Scripted(nn.Module):
    """A teacher that writes what it is told to; its logits are those of a real model."""

    def __init__(self, rows: list[list[int]]) -> None:
        super().__init__()
        self.rows, self.asked, self.model = rows, [], llama("teacher")

    def forward(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)


class Handle:
    """What the task sees of a model, without an engine."""

    name = "teacher"

    def __init__(self, module: nn.Module, *, trainable: bool) -> None:
        self.module, self.trainable = module, trainable

    def __call__(self, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            return self.module(**kwargs)

    def generate(self, **options: Any) -> Tensor:
        asked, rows = options["input_ids"], self.module.rows
        self.module.asked.append(asked.tolist())
        width = max(map(len, rows))
        written = torch.tensor([row + [options["pad_token_id"]] * (width - len(row)) for row in rows])
        return torch.cat([asked, written[: len(asked)]], dim=1)


def ready_task(
    rows: list[list[int]], *, source: Any = None, target: Any = None, examples: int = 2, **options: Any
) -> Any:
    task = DistillSequenceTask(**options)
    source = source or make_tokenizer()
    tables: list[Any] = []
    task.models = {  # type: ignore[assignment]
        "student": Handle(llama("small"), trainable=True),
        "teacher": Handle(Scripted(rows), trainable=False),
    }
    task.trainer = SimpleNamespace(  # type: ignore[assignment]
        tokenizers={"student": source, "teacher": target or source},
        is_main=True,
        global_step=0,
        seed=0,
        indices={"": range(examples)},
        device=torch.device("cpu"),
        tables=tables,
        log_table=lambda name, **table: tables.append((name, table)),
    )
    assert task.check_tokenizers(task.trainer.tokenizers) == []
    task.setup("fit")
    return task


def batch_of(rows: list[list[int]], labels: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    pad = [width - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([row + [PAD] * n for row, n in zip(rows, pad, strict=True)]),
        "labels": torch.tensor([row + [IGNORED] * n for row, n in zip(labels, pad, strict=True)]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * n for row, n in zip(rows, pad, strict=True)]),
    }


TWO = ([[7, 8, 9, 9, 9], [6, 9]], [[IGNORED, IGNORED, 9, 9, 9], [IGNORED, 9]])


def test_the_teachers_text_takes_the_place_of_the_answers() -> None:
    task = ready_task([[20, 21, END], [22, 23, 24, 25]])

    batch = task.prepare_batch(batch_of(*TWO))

    assert task.models["teacher"].module.asked == [[[7, 8], [PAD, 6]]]
    assert batch["input_ids"].tolist() == [[7, 8, 20, 21, END], [6, 22, 23, 24, 25]]
    # The end token is learnt once, and only where the teacher wrote it.
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 20, 21, END], [IGNORED, 22, 23, 24, 25]]
    assert task.count_items(batch) == 7


def test_padding_after_an_end_is_never_learnt() -> None:
    task = ready_task([[END], [22, 23, 24, END]])

    batch = task.prepare_batch(batch_of(*TWO))

    assert batch["input_ids"].tolist() == [[7, 8, END, PAD, PAD], [6, 22, 23, 24, END]]
    assert batch["labels"][0].tolist() == [IGNORED, IGNORED, END, IGNORED, IGNORED]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]
    assert task.count_items(batch) == 1 + 4


def test_loss_is_the_cross_entropy_of_the_written_tokens() -> None:
    task = ready_task([[20, 21, END], [22, 23, 24, 25]])
    batch = task.prepare_batch(batch_of(*TWO))

    output = task.training_step(batch, 0)

    student = task.models["student"].module.double()
    expected = torch.zeros((), dtype=torch.float64)
    for prompt, answer in (([7, 8], [20, 21, END]), ([6], [22, 23, 24, 25])):
        log_q = student(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for index, token in enumerate(answer):
            expected = expected - log_q[len(prompt) - 1 + index, token]
    assert output.sums["student/cross_entropy"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert output.metrics["student/answer_tokens"] == (7, 2)


def test_a_micro_batch_without_a_prompt_still_generates_and_counts_nothing() -> None:
    task = ready_task([[20, 21, END]], examples=1)

    batch = task.prepare_batch(batch_of([[7, 8]], [[IGNORED, IGNORED]]))

    assert len(task.models["teacher"].module.asked) == 1
    assert task.count_items(batch) == 0
    loss = task.training_step(batch, 0).sums["student/cross_entropy"]
    loss.backward()
    assert loss.item() == 0
    gradients = [weight.grad for weight in task.models["student"].module.parameters()]
    assert all(gradient is not None and (gradient == 0).all() for gradient in gradients)


def test_another_tokenizer_reads_and_writes_text() -> None:
    source, target = make_tokenizer(["t h", "th e"], template=TEMPLATE), make_tokenizer(["c a"], template=WORDY)
    told = target(" a cat.<end>")["input_ids"]
    task = ready_task([told], source=source, target=target, examples=1)
    text = "<user>the<bot>the<end>"
    tokens = source(text)["input_ids"]
    labels = [IGNORED] * 3 + tokens[3:]

    batch = task.prepare_batch(batch_of([tokens], [labels]))

    assert target.decode(task.models["teacher"].module.asked[0][0]) == "be kind\nuser: the\nassistant: "
    assert batch["input_ids"].tolist() == [source("<user>the<bot> a cat.<end>")["input_ids"]]
    assert source.decode(batch["labels"][0][completion_mask(batch)[0].nonzero()[0] + 1 :]) == " a cat.<end>"
    scores = task.validation_step(batch_of([tokens], [labels]), 0)
    assert set(scores) == {"cross_entropy", "teacher_cross_entropy"}  # the teacher's tokens are of another kind


def test_held_out_text_is_written_once_greedily_and_scored_for_both() -> None:
    task = ready_task([[20, 21, END], [22, 23, 24, 25]], temperature=1.0)
    given = batch_of(*TWO)

    with torch.no_grad():
        first, again = (task.validation_step(given, 0) for _ in range(2))

    assert len(task.models["teacher"].module.asked) == 1
    assert {name: (float(total), count) for name, (total, count) in first.items()} == {
        name: (float(total), count) for name, (total, count) in again.items()
    }
    assert {name: count for name, (_, count) in first.items()} == {
        "cross_entropy": 4,
        "teacher_cross_entropy": 7,
        "reference/cross_entropy": 4,
        "reference/teacher_cross_entropy": 7,
    }
    teacher = task.models["teacher"].module.model
    log_p = teacher(input_ids=torch.tensor([[7, 8, 9, 9, 9]])).logits[0].log_softmax(-1)
    other = teacher(input_ids=torch.tensor([[6, 9]])).logits[0].log_softmax(-1)
    expected = -(log_p[1, 9] + log_p[2, 9] + log_p[3, 9] + other[0, 9])
    assert float(first["reference/cross_entropy"][0]) == pytest.approx(expected.item(), rel=1e-5)


def test_a_written_sample_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    source = make_tokenizer()
    task = ready_task([source("ab<end>")["input_ids"], source("cab")["input_ids"]], source=source)

    with caplog.at_level("INFO"):
        task.prepare_batch(batch_of(*TWO))
        task.prepare_batch(batch_of(*TWO))

    ((name, table),) = task.trainer.tables
    assert (name, table["columns"]) == ("teacher_answers", ["prompt", "answer"])
    assert [row[1] for row in table["rows"]] == ["ab", "cab"]
    assert len([record for record in caplog.records if "wrote 'ab'" in record.message]) == 1


def test_wrong_values_are_refused_together() -> None:
    with pytest.raises(ConfigError) as refused:
        DistillSequenceTask(max_new_tokens=0, temperature=-1.0, top_p=1.5)

    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "task.max_new_tokens=0",
        "task.temperature=-1.0",
        "task.top_p=1.5",
    ]
    wrong: Any = {"student": ["a"], "teacher": {"a": 1}, "max_new_tokens": "x", "temperature": "x", "top_p": 10**400}
    with pytest.raises(ConfigError) as refused:
        DistillSequenceTask(**wrong)
    assert [problem[:28] for problem in refused.value.problems] == [
        "task.student is ['a']; it mu",
        "task.teacher is {'a': 1}; it",
        "task.max_new_tokens='x': mus",
        "task.temperature='x': must b",
        "task.top_p=10000000000000000",
    ]
    with pytest.raises(ConfigError, match="name two models"):
        DistillSequenceTask(student="a", teacher="a")


def test_models_and_data_that_do_not_fit_are_refused() -> None:
    task = DistillSequenceTask()

    assert task.check_models({"student": True, "teacher": True}, stage="fit") == [
        "models.teacher.trainable=true, but task.teacher is frozen; set it to false"
    ]
    assert task.check_models({"student": False, "teacher": False}, stage="validate") == []
    assert "models has no teacher" in task.check_models({"student": True}, stage="fit")[0]
    assert "no model brings a tokenizer" in task.check_tokenizers({"student": None, "teacher": None})[0]
    packed = {**batch_of(*TWO), "position_ids": torch.zeros(2, 5)}
    assert task.check_batch(batch_of(*TWO), "data.train") == []
    assert task.check_batch(packed, "data.train")[0].startswith("data.train: a row holds several examples")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("text")
    return run_ranks(run_text_tasks, folder, folder=folder, world_size=2)


def test_update_on_two_ranks_with_a_sharded_teacher_is_that_of_plain_pytorch(ranks: list[dict[str, Any]]) -> None:
    weights, lengths, scores = reference_run()

    found = ranks[0]["greedy"]

    assert found["engines"]["teacher"] == ("DeepSpeedEngine", 3)
    assert len(set(lengths[0])) > 2  # answers end at different lengths, and one row has none
    assert 0 in lengths[0] + lengths[1]
    for name, value in found["weights"]["student"].items():
        assert torch.allclose(value.double(), weights[name], atol=1e-6), name
    measured = [validation["val/teacher_cross_entropy"] for validation in found["validations"]]
    assert measured == pytest.approx(scores, rel=1e-5)
    tokens = [step["train/student/answer_tokens"] for step in found["steps"]]
    assert tokens == pytest.approx([sum(row) / len(row) for row in lengths])


def test_drawn_text_follows_from_seed_step_and_example_whatever_the_ranks(ranks: list[dict[str, Any]]) -> None:
    weights, lengths, _ = reference_run(DRAWN)

    found = ranks[0]["drawn"]

    for name, value in found["weights"]["student"].items():
        assert torch.allclose(value.double(), weights[name], atol=1e-6), name
    tokens = [step["train/student/answer_tokens"] for step in found["steps"]]
    assert tokens == pytest.approx([sum(row) / len(row) for row in lengths])
    greedy = ranks[0]["greedy"]["steps"][0]["train/student/cross_entropy"]
    assert found["steps"][0]["train/student/cross_entropy"] != greedy


def test_other_tokenizers_run_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    steps = ranks[0]["unaligned"]["steps"]
    assert len(steps) == 2
    assert all(math.isfinite(step["train/student/universal_logit_distance"]) for step in steps)
    assert steps == ranks[1]["unaligned"]["steps"]
