"""Preflight: good runs pass unchanged to the last bit, and each mistake is refused or told by name."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from tasks.teaching.preflight import CHECKS, Preflight, marked_text
from tasks.text.tokenization import template_difference, text_difference
from tests.ranks import run_ranks
from tests.tasks.preflight_runs import (
    OFF,
    TERMS,
    Checked,
    Found,
    data,
    fit,
    load_teacher,
    make_teacher,
    noisy_llama,
    refusal,
    run_stages,
    spec,
)
from tests.tasks.task_runs import llama, make_texts, shared_texts
from trainer import IGNORED, ConfigError, ModelSpec
from trainer.data.example import Example

COMPLETIONS = {"kl": {"function": "forward_kl"}}  # the mask that is there without a word


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request: pytest.FixtureRequest, place: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("runs")
    return run_ranks(run_stages, place, folder=folder, world_size=request.param)


@pytest.fixture
def good(place: Path) -> ModelSpec:
    return spec(functools.partial(load_teacher, place), trainable=False)


@pytest.mark.parametrize("stage", range(4))
def test_a_run_with_preflight_is_bit_equal_to_one_without(runs: list[Found], stage: int) -> None:
    for found in runs:
        checked, plain = found[f"stage {stage}"]

        assert checked["engine"] == ("DeepSpeedEngine", stage, 3)
        assert checked["steps"] == plain["steps"] != []
        assert checked["validations"] == plain["validations"]
        assert len(plain["validations"]) == (2 if stage in (1, 3) else 0)
        assert checked["draws"] == plain["draws"]
        assert checked["weights"].keys() == plain["weights"].keys()
        for name, weight in plain["weights"].items():
            assert torch.equal(weight, checked["weights"][name]), name


def test_ranks_that_differ_are_told_what_differs(runs: list[Found]) -> None:
    if len(runs) == 1:
        pytest.skip("one rank")
    for found in runs:
        (terms,), (length,) = found["terms"], found["length"]
        assert "the ranks differ in branch of the task" in terms
        assert "reverse_kl" in terms and "on rank 1" in terms
        assert "examples of data.train: 12 on rank 0; 13 on rank 1" in length
        assert found["half"] == []  # what one rank has not, the other has
        assert "none of the " in found["none"][0] and len(found["none"]) == 1


def test_options_are_checks_and_switches() -> None:
    with pytest.raises(ConfigError) as refused:
        Preflight({"teacher_is_traind": False, "masks": "no"})  # type: ignore[dict-item]

    assert "did you mean teacher_is_trained?" in refused.value.problems[0]
    assert "true or false" in refused.value.problems[1]
    for options in (False, 0, [], ["masks"], "masks"):
        with pytest.raises(ConfigError) as refused:
            Preflight(options)  # type: ignore[arg-type]
        assert f"task.preflight is {options!r}; it must be a mapping of checks to true or false" in str(refused.value)
    assert Preflight().names == Preflight({}).names == list(CHECKS)
    assert Preflight({"masks": False}).names == [name for name in CHECKS if name != "masks"]


def zero_llama() -> nn.Module:
    model = llama("teacher")
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return model


def random_llama() -> nn.Module:
    return llama("random")


def nan_llama() -> nn.Module:
    model = llama("teacher")
    nn.init.constant_(model.lm_head.weight, float("nan"))
    return model


@pytest.mark.parametrize("build", [zero_llama, random_llama, nan_llama])
def test_a_teacher_that_knows_nothing_is_refused(build: Any) -> None:
    problems = refusal(options={}, teacher=spec(build, trainable=False))

    assert len(problems) == 1
    assert "models.teacher knows no more than chance" in problems[0]
    assert "that of a uniform guess 4.11" in problems[0]  # ln 61
    assert "task.preflight.teacher_is_trained=false" in problems[0]


def test_the_cross_entropy_is_the_teachers_own(place: Path, good: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    fit({}, teacher=good, texts=data(batch_size=12))

    batch = data().collate([data().train[index] for index in range(12)])  # type: ignore[index]
    with torch.no_grad():
        logits = load_teacher(place).double()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    entropies = -logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    expected = entropies[batch["attention_mask"][:, 1:] != 0]
    said = next(line for line in caplog.messages if "teacher_is_trained" in line)
    assert f"cross-entropy {expected.mean():.2f} nats" in said and f"on {len(expected)} tokens" in said


def test_a_check_is_switched_off_by_its_name() -> None:
    teacher = spec(random_llama, trainable=False)

    assert refusal(options={"teacher_is_trained": False}, teacher=teacher) == []


def test_the_teacher_as_student_is_refused(place: Path, good: ModelSpec) -> None:
    same = refusal(options={}, teacher=good, student=spec(functools.partial(load_teacher, place)))
    copied = refusal(options={}, teacher=good, student=spec(functools.partial(llama, "x"), init_from="teacher"))

    assert len(same) == 1 and "predict the same on all" in same[0]
    assert "give models.student.build or models.teacher.build another model" in same[0]
    assert len(copied) == 1 and "drop models.student.init_from=teacher" in copied[0]


def test_an_adapted_student_is_refused_on_the_teachers_base_and_trained_on_another(
    place: Path, good: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lora = {"r": 4, "target_modules": "all-linear"}

    same = refusal(options={}, teacher=good, student=spec(functools.partial(load_teacher, place), lora=lora))
    assert len(same) == 1 and "adapters start at zero" in same[0]

    other = fit({}, teacher=good, student=spec(noisy_llama, lora=lora))
    first, last = (other["steps"][index]["train/student/forward_kl"] for index in (0, -1))
    assert first > 0 and first != last
    # All 7 linear layers of 2 blocks have two matrices; B is zero at the start, but in the graph.
    assert any("28 of 28 trained weights of models.student get a gradient" in line for line in caplog.messages)


def blank(texts: list[Example]) -> list[Example]:
    return [Example(input_ids=text.input_ids, labels=np.full_like(text.labels, IGNORED)) for text in texts]


def test_examples_without_a_trained_token_are_refused(good: ModelSpec) -> None:
    problems = refusal(
        options={},
        teacher=good,
        task=Checked({}, terms=COMPLETIONS),
        texts=data(blank(shared_texts())),
    )

    assert len(problems) == 1 and "is trained on (mask completion)" in problems[0]


def test_few_trained_tokens_are_told(good: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    texts = blank(make_texts(60, seed=0))
    texts[7].labels[1] = texts[7].input_ids[1]

    fit({}, teacher=good, task=Checked({}, terms=COMPLETIONS), texts=data(texts, batch_size=30))

    assert any("only 0." in line and "tokens are trained on" in line for line in caplog.messages)


def test_the_first_window_with_a_trained_token_is_the_sample(good: ModelSpec) -> None:
    texts = blank(make_texts(24, seed=0))
    for text in texts[:6]:  # of 4 an update
        text.labels[1:] = text.input_ids[1:]

    task = Checked({"teacher_is_trained": False}, terms=COMPLETIONS)
    assert refusal(options={}, teacher=good, task=task, texts=data(texts)) == []


def word_tokenizer(words: str, *, template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)


WORDS = " ".join(f"w{index}" for index in range(60))


def test_tokenizers_that_read_a_text_differently_are_refused(good: ModelSpec) -> None:
    task = Checked({}, terms=TERMS)
    swapped = " ".join(reversed(WORDS.split()))
    task.tokenizers = {"student": word_tokenizer(WORDS), "teacher": word_tokenizer(swapped)}

    problems = refusal(options={}, teacher=good, task=task)

    assert len(problems) == 1 and "becomes, from its token" in problems[0]
    assert re.search(r"\['w(\d+)' (\d+).* in models.student and \['w\1' (?!\2\b)\d+.* in models.teacher", problems[0])


def test_the_first_difference_of_a_text_is_named() -> None:
    left, right = word_tokenizer(WORDS), word_tokenizer(WORDS.replace("w7 w8", "w8 w7"))

    said = text_difference("w1 w2 w7 w3", left, right, ("models.student", "models.teacher"))

    assert said == (
        "the text 'w1 w2 w7 w3' becomes, from its token 2 on, ['w7' 8, 'w3' 4] in models.student and "
        "['w7' 9, 'w3' 4] in models.teacher"
    )
    assert text_difference("w1 w2", left, right, ("a", "b")) is None


def test_chat_templates_that_differ_are_told_apart() -> None:
    template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}"
    left, same = (word_tokenizer(WORDS, template=template) for _ in range(2))
    right, none = word_tokenizer(WORDS, template=template.replace("w1", "w2")), word_tokenizer(WORDS)

    assert template_difference("w3", left, same, ("a", "b")) is None
    assert template_difference("w3", left, none, ("a", "b")) is None
    said = template_difference("w3", left, right, ("a", "b"))
    assert said is not None and said.startswith("through the chat template") and "'w1' 2" in said and "'w2' 3" in said


def test_trained_tokens_are_marked() -> None:
    assert marked_text([4, 5, 6, 7], [False, True, True, False], None) == "4 [[5 6]] 7"
    assert marked_text([1, 2, 3], [False, False, True], word_tokenizer("a b c")) == "a b[[c]]"
    long = marked_text(list(range(500)), [index >= 300 for index in range(500)], None)
    assert long.startswith("... 252 ") and " 299 [[300 " in long and long.endswith("347]] ...")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_example_in_the_log_marks_what_the_labels_mark(
    good: ModelSpec, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    caplog.set_level(logging.INFO)
    texts = [
        Example(input_ids=np.arange(5, 5 + n, dtype=np.int32), labels=np.full(n, IGNORED, np.int32)) for n in (9, 4)
    ]
    for text in texts:
        text.labels[2:] = text.input_ids[2:]
    given = data(texts * 6, batch_size=6)
    given.collate.padding_side = side  # type: ignore[attr-defined]

    task = Checked({"teacher_is_trained": False}, terms=COMPLETIONS)
    fit({}, teacher=good, task=task, texts=given)

    line = next(line for line in caplog.messages if "preflight: masks" in line)
    assert line.endswith(("5 6 [[7 8 9 10 11 12 13]]", "5 6 [[7 8]]"))
    assert "81.8% of 66 tokens" in line  # 7 + 2 of 8 + 3 predictions


class Detached(Checked):
    """Returns a loss of another model's weights: what forgets the student."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.detaches:
            output.shares = {key: loss.detach().requires_grad_() for key, loss in output.shares.items()}
        return output


def test_a_student_without_a_gradient_is_refused_before_the_first_update(good: ModelSpec) -> None:
    task = Detached({}, terms=TERMS)
    task.detaches = True

    problems = refusal(options={}, teacher=good, task=task)

    assert len(problems) == 1 and "models.student gets no gradient" in problems[0]
    assert task.trainer.global_step == 0


def test_what_is_off_costs_nothing(good: ModelSpec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    fit(OFF, teacher=good)

    assert [line for line in caplog.messages if line.startswith("preflight: ") and "checks in" not in line] == []
