"""Universal logit distillation: its loss against float64, pairs and counts, and scores that can be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.distill_unaligned import DistillUnalignedTask
from tests.tasks.task_runs import PAD, VOCABULARY, llama
from tests.tasks.tiny_tokenizers import TEMPLATE, WORDY, make_tokenizer
from trainer import IGNORED
from trainer.config import ConfigError

# Tokens of the student and of the teacher differ in number and in id, and their answers in length.
TEXTS = [("the cat", "on the mat."), ("in", "a cat"), ("why?", "on"), ("then", "")]


class Handle:
    """What the task sees of a model, without an engine."""

    def __init__(self, module: nn.Module, *, trainable: bool) -> None:
        self.module, self.trainable = module, trainable

    def __call__(self, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            return self.module(**kwargs)


def ready_task(**options: Any) -> Any:
    task = DistillUnalignedTask(**options)
    source = make_tokenizer(["t h", "th e"], template=TEMPLATE)
    target = make_tokenizer(["a t", "o n"], special=("<end>", "<pad>"), template=WORDY)
    task.models = {  # type: ignore[assignment]
        "student": Handle(llama("small"), trainable=True),
        "teacher": Handle(llama("large"), trainable=False),
    }
    task.trainer = SimpleNamespace(tokenizers={"student": source, "teacher": target})  # type: ignore[assignment]
    assert task.check_tokenizers(task.trainer.tokenizers) == []
    task.setup("fit")
    return task


def rows_of(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each text in a tokenizer's tokens; the last has no answer."""
    rows = []
    for question, answer in TEXTS:
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))["input_ids"]
        rows.append((prompt, tokenizer(answer + "<end>")["input_ids"] if answer else []))
    return rows


def batch_for(task: Any) -> dict[str, Tensor]:
    rows = rows_of(task.source)
    width = max(len(prompt + answer) for prompt, answer in rows)

    def table(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    return {
        "input_ids": table([prompt + answer for prompt, answer in rows], PAD),
        "labels": table([[IGNORED] * len(prompt) + answer for prompt, answer in rows], IGNORED),
        "attention_mask": table([[1] * len(prompt + answer) for prompt, answer in rows], 0),
    }


def answer_logits(module: nn.Module, tokenizer: Any) -> list[Tensor]:
    """What predicts each answer's tokens: one row at a time, unpadded, in float64."""
    logits = []
    for prompt, answer in rows_of(tokenizer):
        whole = module(input_ids=torch.tensor([prompt + answer])).logits[0]
        logits.append(whole[len(prompt) - 1 : len(prompt) - 1 + len(answer)])
    return logits


def expected_sums(task: Any, *, temperature: float) -> tuple[Tensor, Tensor]:
    """The cross-entropy over labels and the distance over pairs, summed."""
    entropy = distance = torch.zeros((), dtype=torch.float64)
    student, teacher = task.models["student"].module.double(), task.models["teacher"].module.double()
    given = answer_logits(teacher, task.target)
    for own, other, (_, answer) in zip(answer_logits(student, task.source), given, rows_of(task.source), strict=True):
        for row, token in zip(own, answer, strict=True):
            entropy = entropy - row.log_softmax(-1)[token]
        for left, right in zip(own, other, strict=False):  # the i-th with the i-th, to the end of the shorter
            # The student has 58 tokens, the teacher 55; other rows of their heads are none.
            q = (left[:58] / temperature).softmax(-1).sort(descending=True).values
            p = (right[:55] / temperature).softmax(-1).sort(descending=True).values
            distance = distance + (q - torch.cat([p, torch.zeros(3)])).abs().sum()
    return entropy, distance


def test_loss_and_gradient_are_those_of_float64() -> None:
    task = ready_task(weight=1.5, ce_weight=0.5, temperature=2.0)
    batch = task.prepare_batch(batch_for(task))
    student = task.models["student"].module

    output = task.training_step(batch, 0)
    sum(output.sums.values()).backward()

    found = {name: weight.grad.double() for name, weight in student.named_parameters()}
    student.zero_grad()
    entropy, distance = expected_sums(task, temperature=2.0)
    (0.5 * entropy + 1.5 * distance).backward()
    assert output.sums["student/cross_entropy"].item() == pytest.approx(0.5 * entropy.item(), rel=1e-5)
    assert output.sums["student/universal_logit_distance"].item() == pytest.approx(1.5 * distance.item(), rel=1e-5)
    assert float(output.metrics["student/universal_logit_distance"][0]) == pytest.approx(distance.item(), rel=1e-5)
    for name, weight in student.named_parameters():
        assert torch.allclose(found[name], weight.grad, atol=1e-4), name


def test_each_part_is_counted_by_its_own_tokens() -> None:
    task = ready_task()
    own, theirs = ([len(answer) for _, answer in rows_of(side)] for side in (task.source, task.target))
    assert own != theirs

    counts = task.count_items(task.prepare_batch(batch_for(task)))

    assert {name: int(count) for name, count in counts.items()} == {
        "student/cross_entropy": sum(own),
        "student/universal_logit_distance": sum(map(min, own, theirs)),
    }


def test_teacher_reads_the_same_text_in_its_own_template() -> None:
    task = ready_task()

    theirs = task.prepare_batch(batch_for(task))["teacher"]

    rows = zip(theirs["input_ids"], theirs["attention_mask"], strict=True)
    assert [task.target.decode(row[mask == 1]) for row, mask in rows][:2] == [
        "be kind\nuser: the cat\nassistant: on the mat.<end>",
        "be kind\nuser: in\nassistant: a cat<end>",
    ]
    assert [int(label) for label in theirs["labels"][1] if label != IGNORED] == task.target("a cat<end>")["input_ids"]


def test_a_micro_batch_without_an_answer_counts_nothing_and_keeps_its_graph() -> None:
    task = ready_task()
    batch = task.prepare_batch({name: value[-1:] for name, value in batch_for(task).items()})

    loss = sum(task.training_step(batch, 0).sums.values())
    loss.backward()

    assert [int(count) for count in task.count_items(batch).values()] == [0, 0]
    assert loss.item() == 0
    assert all((weight.grad == 0).all() for weight in task.models["student"].module.parameters())


def test_scores_of_both_are_per_character_of_the_same_text() -> None:
    task = ready_task()
    batch = batch_for(task)

    with torch.no_grad():
        scores = task.validation_step(batch, 0)

    characters = sum(len(answer) for _, answer in TEXTS)
    assert scores["nats_per_character"][1] == scores["reference/nats_per_character"][1] == characters
    assert float(scores["nats_per_character"][0]) == pytest.approx(float(scores["cross_entropy"][0]))
    teacher = task.models["teacher"].module
    expected = -sum(
        row.log_softmax(-1)[token]
        for rows, (_, answer) in zip(answer_logits(teacher, task.target), rows_of(task.target), strict=True)
        for row, token in zip(rows, answer, strict=True)
    )
    assert float(scores["reference/nats_per_character"][0]) == pytest.approx(expected.item(), rel=1e-5)
    assert list(task.count_items(batch)) == ["student/cross_entropy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1.0}, r"task\.weight=-1\.0"),
        ({"ce_weight": float("inf")}, r"task\.ce_weight=inf"),
        ({"temperature": 0.0}, r"task\.temperature=0\.0"),
        ({"weight": 0.0, "ce_weight": 0.0}, "nothing would be trained"),
        ({"student": "a", "teacher": "a"}, "name two models"),
        ({"student": ["a"]}, r"task\.student is \['a'\]; it must be the name of a model"),
        ({"teacher": {"a": 1}}, r"task\.teacher is {'a': 1}; it must be the name of a model"),
        ({"temperature": "x"}, r"task\.temperature='x': must be a finite number above 0"),
        ({"weight": None}, r"task\.weight=None: must be a finite number of at least 0"),
        ({"ce_weight": 10**400}, r"task\.ce_weight=1000"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillUnalignedTask(**options)


def test_packed_rows_and_missing_tokenizers_are_refused() -> None:
    task = ready_task()

    packed = {**batch_for(task), "position_ids": torch.zeros(4, 5)}
    assert task.check_batch(batch_for(task), "data.train") == []
    assert task.check_batch(packed, "data.train")[0].startswith("data.train: a row holds several examples")
    assert "no model brings a tokenizer" in task.check_tokenizers({"student": None, "teacher": None})[0]
    assert VOCABULARY > 58  # the heads have rows without a token
