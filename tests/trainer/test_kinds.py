"""Models that are built as what a task cannot read, refused before anything is built."""

from __future__ import annotations

import pytest

from tests.trainer.test_check import problems_of_task
from trainer.kinds import LOGITS, SCORE, VALUES, find_kind_problems

LM, SEQUENCE, TOKEN = "trainer.models.causal_lm", "trainer.scorers.sequence_scorer", "trainer.scorers.token_scorer"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (LOGITS, [LM], [SEQUENCE, TOKEN, "trainer.encoders.encoder"]),
        (SCORE, [SEQUENCE, TOKEN], [LM, "trainer.encoders.encoder"]),
        (VALUES, [TOKEN], [LM, SEQUENCE, "trainer.encoders.encoder"]),
    ],
)
@pytest.mark.parametrize("end", ["", "_from_config"])
def test_only_builds_that_give_it_are_taken(kind: str, right: list[str], wrong: list[str], end: str) -> None:
    for target in [*right, "my_package.build"]:
        assert find_kind_problems({"judge": kind}, {"judge": target + end}) == []
    for target in wrong:
        (problem,) = find_kind_problems({"judge": kind}, {"judge": target + end})
        assert problem.startswith("models.judge.build is of ") and f"the task reads {kind} of it" in problem


def test_a_model_that_is_not_there_has_no_kind() -> None:
    assert find_kind_problems({"teacher": LOGITS}, {}) == []


CONFIG = "{model_type: llama, hidden_size: 8, num_attention_heads: 2, num_key_value_heads: 2}"


@pytest.mark.parametrize(
    ("task", "model", "build"),
    [
        ("sft", "student", "critic_from_config"),
        ("dpo", "policy", "reward_model_from_config"),
        ("reward", "reward", "causal_lm_from_config"),
        ("gkd", "teacher", "reward_model_from_config"),
        ("grpo", "actor", "reward_model_from_config"),
        ("ppo", "critic", "reward_model_from_config"),
    ],
)
def test_every_task_says_what_it_reads(task: str, model: str, build: str) -> None:
    others = {"gkd": ["student"], "ppo": ["actor"]}.get(task, [])
    overrides = [f"model@models.{name}.build=tiny_llama" for name in others]
    overrides += [f"model@models.{model}.build={build}", f"++models.{model}.build.config={CONFIG}"]

    found = problems_of_task(f"task={task}", "data.tokenizer=embedded:bpe-4k", *overrides)

    assert any(
        problem.startswith(f"models.{model}.build is of {build.removesuffix('_from_config')}") for problem in found
    )


def test_a_reference_that_gives_a_reward_is_built_and_must_give_scores() -> None:
    (problem,) = problems_of_task(
        "task=grpo",
        "model@models.actor.build=tiny_llama",
        "data.tokenizer=embedded:bpe-4k",
        "+task.rewards.own.model=reference",
    )

    assert problem.startswith("models.reference.build is of causal_lm, but the task reads a score per text of it")
