"""On-policy distillation: its update against plain PyTorch, who writes when, what is counted, the cache, refusals."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from tasks.generation import Written
from tasks.gkd import GKDTask
from tasks.losses import generalised_jsd
from tests.ranks import run_ranks
from tests.tasks import gkd_runs
from tests.tasks.gkd_runs import AUTHORS, CASES, reference
from tests.tasks.sequence_runs import tokenizer
from tests.tasks.task_runs import PAD, VOCABULARY, llama
from tests.tasks.test_distill import Handle
from tests.tasks.tiny_tokenizers import make_tokenizer
from trainer import IGNORED
from trainer.config import ConfigError

KL = {"forward_kl": {}}
PROMPTS = [[7, 8], [6], [9, 10, 11]]


# On real engines ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {authors: reference(authors) for authors in AUTHORS}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gkd")
    return run_ranks(gkd_runs.run_cases, folder, folder=folder, world_size=request.param, timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_weights_after_three_steps_are_those_of_plain_pytorch(name, ranks, references):
    authors, stage, teacher_stage, _ = CASES[name]
    found = ranks[0][name]

    assert found["engines"] == {
        "student": ("DeepSpeedEngine", stage),
        "teacher": ("LlamaForCausalLM", None) if teacher_stage is None else ("DeepSpeedEngine", teacher_stage),
    }
    expected = references[authors]["weights"]
    distances = {
        key: float((found["weights"]["student"][key].double() - value).abs().max()) for key, value in expected.items()
    }
    # float32 against float64 after 3 SGD steps of size 0.02: rounding is a few 1e-7
    assert {key: distance for key, distance in distances.items() if not distance < 1e-6} == {}


@pytest.mark.parametrize("name", CASES)
def test_metrics_of_steps_and_of_own_text_are_those_of_plain_pytorch(name, ranks, references):
    expected, found = references[CASES[name][0]], ranks[0][name]

    for step, terms, lengths, author in zip(
        found["steps"], expected["terms"], expected["lengths"], AUTHORS[CASES[name][0]][1], strict=True
    ):
        assert {term: step[f"train/student/{term}"] for term in terms} == pytest.approx(terms, rel=1e-5)
        assert step["train/student/on_policy"] == (author == "student")
        if author != "data":
            assert step["train/student/answer_tokens"] == pytest.approx(sum(lengths) / len(lengths))
            ended = step["train/student/ended"] * len(lengths)
            assert sum(length < gkd_runs.OPTIONS.max_new_tokens for length in lengths) <= round(ended) <= len(lengths)
        assert ("train/student/answer_tokens" in step) == (author != "data")
        assert step["perf/generation_time"] >= 0
    scores = [validation["val/on_policy/forward_kl"] for validation in found["validations"]]
    assert scores == pytest.approx(expected["own"], rel=1e-5)


def test_answers_have_several_lengths_and_some_rows_none(references):
    lengths = references["own"]["lengths"]

    assert len({length for step in lengths for length in step}) > 2
    assert any(len(step) < gkd_runs.WINDOW for step in lengths)  # a prompt is empty: of a row at a time, a whole batch
    assert references["own"]["terms"] != references["mixed"]["terms"]


def test_every_rank_reports_the_same(ranks):
    for name in CASES:
        for rank in ranks[1:]:
            for ours, first in zip(rank[name]["steps"], ranks[0][name]["steps"], strict=True):
                shared = {key: value for key, value in first.items() if key.startswith("train/")}
                assert {key: ours[key] for key in shared} == shared


def test_a_run_that_was_ended_goes_on_to_the_same_weights(ranks):
    whole, parts = ranks[0]["resumed"]["whole"], ranks[0]["resumed"]["parts"]

    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_a_cache_is_read_in_the_steps_on_the_data_and_the_teacher_asked_in_the_others(ranks, references):
    found = ranks[0]["cached"]

    assert set(found["forwards"]["teacher"]) == {1, 3} and set(found["forwards"]["student"]) == {1, 2, 3}
    for step, terms in zip(found["steps"], references["mixed"]["terms"], strict=True):
        # All 61 tokens were stored, in float16
        assert {term: step[f"train/student/{term}"] for term in terms} == pytest.approx(terms, rel=2e-3)
    expected = references["mixed"]["weights"]
    distances = [
        float((found["weights"]["student"][key].double() - value).abs().max()) for key, value in expected.items()
    ]
    assert max(distances) < 1e-4
    assert found["validations"][0]["val/on_policy/forward_kl"] == pytest.approx(references["mixed"]["own"][0], rel=1e-5)


# Without engines ------------------------------------------------------------------------------------------------------


class Script:
    """Writes what it is told to."""

    def __init__(self, *answers: list[int], is_ended: bool = True) -> None:
        self.answers, self.is_ended, self.asked = list(answers), is_ended, []

    def write(self, prompts, *, seeds, options) -> Written:
        self.asked.append((prompts, seeds, options))
        return Written(answers=self.answers[: len(prompts)], is_ended=[self.is_ended] * len(prompts))


def ready_task(
    *answers: list[int], terms: Any = KL, vocabulary: int = VOCABULARY, sources: Any = (), **options: Any
) -> Any:
    task = GKDTask(terms=terms, **{"lmbda": 1.0, **options})
    tables: list[Any] = []
    teacher = llama("padded" if vocabulary > VOCABULARY else "large")
    task.models = {
        "student": Handle("student", llama("small"), trainable=True),
        "teacher": Handle("teacher", teacher, trainable=False),
        "second": Handle("second", llama("third"), trainable=False),
    }
    task.trainer = SimpleNamespace(
        tokenizers=dict.fromkeys(task.models, tokenizer()),
        tokenizer=tokenizer(),
        global_step=0,
        seed=0,
        log_every=10,
        is_main=True,
        is_log_step=True,
        sources={},
        indices={"": [0, 1, 2]},
        device=torch.device("cpu"),
        loss_weight=lambda key: torch.tensor(1.0),
        train_loader=SimpleNamespace(row_sources=sources),
        validation_loader=None,
        tables=tables,
        log_table=lambda name, **table: tables.append((name, table)),
    )
    task.setup("fit")
    task.writers = dict.fromkeys(task.writers, Script(*answers))
    return task


def batch_of(answers: list[list[int]]) -> dict[str, Tensor]:
    rows = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    width = max(map(len, rows))
    labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return {
        "input_ids": torch.tensor([row + [PAD] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


@torch.no_grad()
def answer_kl(
    task: Any, prompt: list[int], answer: list[int], *, teacher: str = "teacher", temperature: float = 1.0
) -> float:
    """Returns T^2 KL(teacher || student), summed over the tokens of an answer, in float64."""
    p, q = (
        (task.models[name].module.double()(input_ids=torch.tensor([prompt + answer])).logits[0] / temperature).softmax(
            -1
        )
        for name in (teacher, "student")
    )
    values = temperature**2 * (p * (p / q).log()).sum(-1)
    return float(values[len(prompt) - 1 : -1].sum())


def test_tokens_are_counted_after_the_student_wrote_them():
    data = batch_of([[20] * 12, [21] * 12, [22] * 12])
    task = ready_task([30] * 20, [31] * 22, [32] * 22)

    written = task.prepare_batch(data)

    assert (data["labels"] != IGNORED).sum() == 36
    assert task.count_items(written) == {"student/forward_kl": 64}
    assert written["input_ids"][1].tolist() == [6, *[31] * 22, PAD, PAD]
    assert task.training_step(written, 0).metrics["student/forward_kl"][1] == 64


def test_the_loss_is_of_the_written_tokens_at_its_own_temperature():
    task = ready_task(
        [30, 31], [32], [33, 34, 35],
        terms={"forward_kl": {"temperature": 2.0}},
        generation={"temperature": 0.7, "max_new_tokens": 5},
    )  # fmt: skip
    written = task.prepare_batch(batch_of([[20], [21], [22]]))

    total, count = task.training_step(written, 0).metrics["student/forward_kl"]

    ((_, seeds, options),) = task.writers["student"].asked
    assert (options.temperature, options.max_new_tokens) == (0.7, 5) and len(set(seeds)) == 3
    rows = zip(PROMPTS, task.writers["student"].answers, strict=True)
    expected = sum(answer_kl(task, prompt, answer, temperature=2.0) for prompt, answer in rows)
    assert (float(total), int(count)) == (pytest.approx(expected, rel=1e-5), 6)


def test_who_writes_follows_from_seed_and_step_alone():
    task = ready_task(lmbda=0.3)
    drawn = [task.is_on_policy(step) for step in range(1, 4001)]

    for module in (random, np.random):
        module.seed(5)
    torch.manual_seed(5)
    again = [task.is_on_policy(step) for step in range(1, 4001)]

    assert drawn == again
    assert np.mean(drawn) == pytest.approx(0.3, abs=3 * (0.3 * 0.7 / 4000) ** 0.5)
    task.trainer.seed = 1
    assert [task.is_on_policy(step) for step in range(1, 4001)] != drawn
    assert not any(ready_task(lmbda=0.0).is_on_policy(step) for step in range(1, 200))
    assert all(ready_task(lmbda=1.0).is_on_policy(step) for step in range(1, 200))


def test_a_schedule_moves_the_share():
    task = ready_task(lmbda={"start": 0.0, "end": 1.0, "steps": 2000})

    early, late = ([task.is_on_policy(step) for step in steps] for steps in (range(1, 1001), range(1001, 2001)))

    assert np.mean(early) == pytest.approx(0.25, abs=0.05) and np.mean(late) == pytest.approx(0.75, abs=0.05)


def test_the_other_steps_learn_from_the_data_as_it_is_or_from_the_teachers_text():
    data = batch_of([[20], [21], [22]])
    off, teacher = ready_task([30], lmbda=0.0), ready_task([30], [31], [32], lmbda=0.0, off_policy="teacher")
    student = teacher.writers["student"] = Script()

    assert off.prepare_batch(data) is data and off.writers["student"].asked == []
    assert off.training_step(data, 0).metrics["student/on_policy"] == (0.0, 1.0)
    written = teacher.prepare_batch(data)
    assert written["labels"][written["labels"] != IGNORED].tolist() == [30, 31, 32] and student.asked == []
    assert teacher.training_step(written, 0).metrics["student/on_policy"] == (0.0, 1.0)


def test_the_sources_of_rows_stay_with_them():
    data = batch_of([[20], [21], [22]])
    data["source"] = torch.where(data["attention_mask"] != 0, torch.tensor([[1], [0], [2]]), -1)

    written = ready_task([30, 31], [32, 33, 34], []).prepare_batch(data)

    assert written["source"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, -1]]


def test_each_row_that_was_written_has_the_teacher_of_its_source():
    data = batch_of([[20], [21], [22]])
    data["source"] = torch.where(data["attention_mask"] != 0, torch.tensor([[0], [1], [0]]), -1)
    teachers = {"teacher": 1.0, "second": 1.0}
    task = ready_task(
        [30, 31], [32], [33, 34],
        sources=["a", "b"], combine="routes", teacher=teachers, routes={"a": "teacher", "*": "second"},
    )  # fmt: skip

    total, _ = task.training_step(task.prepare_batch(data), 0).metrics["student/forward_kl"]

    expected = 0.0
    for prompt, answer, name in zip(
        PROMPTS, task.writers["student"].answers, ("teacher", "second", "teacher"), strict=True
    ):
        expected += answer_kl(task, prompt, answer, teacher=name)
    assert float(total) == pytest.approx(expected, rel=1e-5)


def test_an_answer_ends_before_a_row_of_a_padded_head_that_is_no_token():
    task = ready_task([30, 63, 31], [63], [32], vocabulary=64)

    written = task.prepare_batch(batch_of([[20], [21], [22]]))

    assert task.vocabulary == VOCABULARY
    assert written["labels"][written["labels"] != IGNORED].tolist() == [30, 32]
    assert (written["num_answers"], written["num_ended"]) == (3, 1)


def test_without_any_prompt_the_student_is_asked_and_nothing_counts():
    data = {name: value[:, :1] for name, value in batch_of([[20], [21], [22]]).items()}
    task = ready_task([], [], [])

    written = task.prepare_batch(data)
    output = task.training_step(written, 0)
    output.shares["student"].backward()

    assert task.writers["student"].asked[0][0] == [[], [], []]
    assert task.count_items(written) == {"student/forward_kl": 0} and written["num_answers"] == 0
    assert output.shares["student"] == 0
    gradients = [weight.grad for weight in task.models["student"].module.parameters()]
    assert all(gradient is not None and (gradient == 0).all() for gradient in gradients)


def test_answers_are_shown_beside_those_of_the_data():
    data = batch_of([[37], [38], [39]])
    task = ready_task([40, 36], [41], [42])

    task.validation_step(data, 0)
    task.validation_step(data, 1)
    task.prepare_batch(data)
    task.prepare_batch(data)  # a second micro-batch of the same step

    (own, table), (draws, drawn) = task.trainer.tables
    assert (own, draws) == ("student_answers", "student_draws")
    assert table["columns"] == ["prompt", "answer", "answer of the data"]
    assert [row[1:] for row in table["rows"]] == [["d", "a"], ["e", "b"], ["f", "c"]]
    assert drawn["step"] == table["step"] + 1, "of the step that learns from them"


def test_validation_is_of_greedy_text():
    task = ready_task([30, 31], [31, 32], [32, 33], generation={"temperature": 0.7})

    metrics = task.validation_step(batch_of([[20, 21], [21, 22], [22, 23]]), 0)

    ((_, seeds, options),) = task.writers["student"].asked
    assert seeds is None and options.temperature == 0
    assert metrics["on_policy/forward_kl"][1] == metrics["on_policy/answer_tokens"][0] == 6
    assert metrics["on_policy/answer_tokens"][1] == metrics["on_policy/ended"][1] == 3
    assert metrics["reference/on_policy/forward_kl"][0] == 0
    assert metrics["forward_kl"][0] != metrics["on_policy/forward_kl"][0]


def test_answers_that_grow_without_an_end_are_warned_of_once(caplog: pytest.LogCaptureFixture):
    def run(task: Any, lengths: list[float]) -> list[str]:
        caplog.clear()
        for length in lengths:
            task.trainer.global_step += 1
            task.on_train_step_end({"train/student/answer_tokens": length, "train/student/ended": 0.5})
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    task, other = (ready_task([40], [41], [42], health={"steps": 2, "max_length": 2.0}) for _ in range(2))
    assert run(task, [8.0, 8.0, 15.0]) == []
    other.load_state_dict(task.state_dict())
    other.trainer.global_step = task.trainer.global_step

    (told,) = run(other, [20.0, 30.0])

    assert told.startswith("step 4: answers rose from 8 to 17.5 tokens") and "task.health.max_length=2" in told


# The teacher cache ----------------------------------------------------------------------------------------------------


def test_a_cache_serves_the_steps_on_the_data_and_needs_the_teacher_for_the_others():
    task = GKDTask(terms=KL, cache={"path": "there-is-none"}, lmbda=0.5)
    problems = task.check_models({"student": True}, stage="fit")

    assert [problem for problem in problems if "task/teacher=live" in problem and "task.lmbda=0" in problem]
    assert not [p for p in task.check_models({"student": True, "teacher": False}, stage="fit") if "lmbda" in p]
    assert not [p for p in task.check_models({"student": True}, stage="validate") if "lmbda" in p]
    without = GKDTask(terms=KL, cache={"path": "there-is-none"}, lmbda=0.0)
    assert not [p for p in without.check_models({"student": True}, stage="fit") if "lmbda" in p]
    always = GKDTask(terms=KL, cache={"path": "there-is-none"}, lmbda=1.0)
    assert "no step reads it" in always.check_models({"student": True, "teacher": False}, stage="fit")[-1]


# What is refused ------------------------------------------------------------------------------------------------------


def test_wrong_values_are_refused_together():
    with pytest.raises(ConfigError) as refused:
        GKDTask(
            terms={"kl": {"function": "forward_kll"}},
            lmbda=1.5,
            off_policy="self",
            generation={"top_p": 0, "x": 1},
            health={"max_kl": 1.0},
        )

    keys = (
        "task.lmbda is 1.5",
        "task.off_policy is 'self'",
        "task.generation.x",
        "task.generation.top_p",
        "task.health.max_kl is no key of it",
        "task.terms.kl",
    )
    assert len(refused.value.problems) == len(keys)
    for key, problem in zip(keys, refused.value.problems, strict=True):
        assert problem.startswith(key)
    for wrong in ("often", {"start": 0, "end": 2, "steps": 3}, True, -0.1):
        with pytest.raises(ConfigError, match=r"task\.lmbda"):
            GKDTask(terms=KL, lmbda=wrong)


def test_a_teacher_that_cannot_write_is_refused():
    with pytest.raises(ConfigError) as refused:
        GKDTask(
            terms=KL, teacher={"a": 1, "b": 1}, off_policy="teacher", keep_teachers="host", cache={"path": "folder"}
        )

    assert [problem.startswith("task.off_policy=teacher") for problem in refused.value.problems] == [True] * 3


def test_models_of_other_tokens_are_refused():
    task = GKDTask(terms=KL)
    own, more = make_tokenizer(), make_tokenizer(["t h"])

    assert task.check_tokenizers({"student": own, "teacher": make_tokenizer()}) == []
    assert "distill_sequence" in task.check_tokenizers({"student": own, "teacher": more})[0]
    assert "set data.tokenizer" in task.check_tokenizers({"student": None, "teacher": None})[0]
    assert task.check_tokenizers({"teacher": own}) == []  # mode=cache_teacher builds no student


# As a user runs it ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_run_brings_the_student_closer_on_both_kinds_of_text(tmp_path):
    """Real teacher, real text; measured 1.64 -> 1.02 on the data's answers and 1.39 -> 0.83 on the student's own."""
    command = [sys.executable, "-m", "trainer", "task=gkd", "logger=jsonl", f"hydra.run.dir={tmp_path / 'run'}"]

    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=1800)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    for metric in ("val/forward_kl", "val/on_policy/forward_kl", "val/on_policy/reverse_kl"):
        assert summary["after"][metric] < 0.8 * summary["before"][metric], metric
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {record["train/student/on_policy"] for record in records if "train/loss" in record} == {0.0, 1.0}


# TRL ------------------------------------------------------------------------------------------------------------------


def test_trl_divides_by_other_numbers_than_the_tokens_of_the_loss():
    """The lines of TRL 1.16.0 in float64, on two ranks of which each has its own rows; its divergence is ours."""
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(2, 40, size, generator=generator, dtype=torch.float64) for size in (8, VOCABULARY))
    weight = torch.randn(8, VOCABULARY, generator=generator, dtype=torch.float64)
    written, labelled = (24, 40), (12, 24)  # tokens that each rank's student wrote, and those of the data's answers

    def gradient(num_items: int, *, world_size: int) -> Tensor:
        """The mean over ranks of each rank's sum / num_items: what DDP and DeepSpeed make of it."""
        total = torch.zeros_like(weight)
        for rank, count in enumerate(written):
            leaf = weight.clone().requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(
                (hidden[rank, :count] @ leaf)[None],
                teacher[rank, :count][None],
                labels=torch.ones(1, count, dtype=torch.long),
                beta=0.5,
                num_items_in_batch=torch.tensor(num_items),
            )
            loss.backward()
            assert leaf.grad is not None
            total += leaf.grad / world_size
        return total

    leaf = weight.clone().requires_grad_()
    rows = [(hidden[rank, :count] @ leaf, teacher[rank, :count]) for rank, count in enumerate(written)]
    losses = torch.cat([generalised_jsd(z, w, beta=0.5) for z, w in rows])
    losses.mean().backward()  # the mean over the 64 tokens of both ranks

    off_policy, on_policy = gradient(sum(written), world_size=2), gradient(sum(labelled), world_size=2)
    torch.testing.assert_close(off_policy, 0.5 * leaf.grad, rtol=1e-5, atol=1e-8)  # ours computes in float32
    torch.testing.assert_close(on_policy, 0.5 * 64 / 36 * leaf.grad, rtol=1e-5, atol=1e-8)


def test_packed_rows_are_refused_before_a_model_is_built() -> None:
    row = torch.zeros(1, 4, dtype=torch.long)
    task = GKDTask(terms={"forward_kl": {"function": "forward_kl"}})

    assert task.check_batch({"input_ids": row, "labels": row}, "data.train") == []
    (problem,) = task.check_batch({"input_ids": row, "labels": row, "position_ids": row}, "data.train")
    assert problem.startswith("data.train: a row holds several examples") and "data.packing=false" in problem
