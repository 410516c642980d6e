"""Rewards by a model that reads other tokens than those that were written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.rewards import Answers, Rewards, models
from tasks.rewards.models import ModelScorer
from tasks.rewards.reading import Reward
from tasks.text.sequences import Exchange
from tests.tasks.tiny_tokenizers import TEMPLATE, make_tokenizer

CPU = torch.device("cpu")
SOURCE = make_tokenizer(["a b"], template=TEMPLATE)
TARGET = make_tokenizer(["c a"], special=("<pad>", "<end>", "<user>", "<bot>", "<sys>", "<more>"), template=TEMPLATE)


def exchange(prompt: str, answer: str, *, is_ended: bool = True) -> Exchange:
    asked = SOURCE(f"<user>{prompt}<bot>")["input_ids"]
    return Exchange(prompt=asked, answer=SOURCE(answer + "<end>" * is_ended)["input_ids"], column=len(asked))


def answers(raw: Any = "why") -> Answers:
    exchanges = [exchange("why", "cab"), exchange("why", "ca", is_ended=False)]
    return Answers(
        prompts=["why"] * 2, completions=["cab", "ca"], exchanges=exchanges, raw_prompts=[raw] * 2, columns={}
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model was given, as text of its own tokens."""
    seen: list[str] = []

    def scores(model: Any, batch: dict[str, Tensor]) -> Tensor:
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            seen.append(model.tokenizer.decode(row[mask != 0]))
        return batch["attention_mask"].sum(-1).float()

    monkeypatch.setattr(models, "sequence_scores", scores)
    return seen


def scorer(target: Any) -> ModelScorer:
    model: Any = SimpleNamespace(tokenizer=target)
    return ModelScorer(model, source=SOURCE, target=target, ends={int(SOURCE.eos_token_id)}, device=CPU)


def test_the_model_reads_the_same_words_in_its_own_tokens(read: list[str]) -> None:
    found = scorer(TARGET)(answers())

    assert read == ["<user>why<bot>cab<end>", "<user>why<bot>ca"]
    # "ca" is one token of its own, and the answer that was cut has no end token.
    assert found.tolist() == [5 + 2 + 1, 5 + 1]


def test_messages_go_through_its_own_chat_template(read: list[str]) -> None:
    scorer(TARGET)(answers([{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]))

    assert read[0] == "<sys>be brief<user>why<bot>cab<end>"


def test_a_model_of_the_same_tokens_reads_them_as_they_are(read: list[str]) -> None:
    given = answers("not looked at")

    found = scorer(SOURCE)(given)

    assert found.tolist() == [len(one.prompt) + len(one.answer) for one in given.exchanges]


def test_a_models_reward_is_one_of_the_components(read: list[str]) -> None:
    rewards = Rewards(
        {
            "helpful": Reward(name="helpful", model="judge", weight=0.5),
            "one": Reward(name="one", function=lambda **_: [1.0, 1.0]),
        }
    )
    trainer = SimpleNamespace(tokenizers={"actor": SOURCE, "judge": TARGET}, device=CPU)
    handles = {name: SimpleNamespace(module=torch.nn.Identity(), tokenizer=TARGET) for name in ("actor", "judge")}
    task: Any = SimpleNamespace(trainer=trainer, models=handles)

    rewards.setup(task, writer="actor")
    values = rewards.score(answers(), device=CPU)

    assert rewards.total(values, answers()).tolist() == [0.5 * 8 + 1, 0.5 * 6 + 1]
    (problem,) = rewards.check_tokenizers({"actor": SOURCE, "judge": None}, writer="actor")
    assert problem.startswith("models.judge gives a reward")
    (problem,) = rewards.check_tokenizers({"actor": None, "judge": TARGET}, writer="actor")
    assert problem.startswith("the task reads text, but no model brings a tokenizer")
