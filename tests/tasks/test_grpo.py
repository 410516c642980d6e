"""GRPO: its updates against plain PyTorch in float64, on several ranks and layouts, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.grpo import GRPOTask
from tests.ranks import run_ranks
from tests.tasks import grpo_runs
from trainer import ConfigError

Found = dict[str, Any]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("grpo")
    return run_ranks(grpo_runs.run_cases, folder, folder=folder, world_size=request.param, timeout=600)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("grpo")
    found: Found = run_ranks(grpo_runs.run_cases, folder, folder=folder, world_size=1, timeout=600)[0]
    return found


def texts(ranks: list[Found], case: str) -> list[dict[tuple[int, int], list[int]]]:
    """Returns by window the answer of each example and sample, whichever rank wrote it."""
    windows: list[dict[tuple[int, int], list[int]]] = []
    for number in range(len(ranks[0][case]["windows"])):
        found: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            for micro in rank[case]["windows"][number]:
                for place, row in enumerate(micro["rows"] if not micro["is_filler"] else []):
                    found[row[0], place % grpo_runs.SAMPLES] = row[2]
        windows.append(found)
    return windows


def assert_same_weights(found: Found, wanted: dict[str, torch.Tensor], *, tolerance: float) -> None:
    start = grpo_runs.llama("small").state_dict()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name].double(), weight.double(), rtol=0, atol=tolerance)
    moved = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    assert moved > 100 * tolerance


@pytest.mark.parametrize("case", [*grpo_runs.CASES, "updates"])
def test_every_update_is_that_of_plain_pytorch_in_double_precision(ranks: list[Found], case: str) -> None:
    settings, updates = (grpo_runs.CASES["passes"], 2) if case == "updates" else (grpo_runs.CASES[case], 1)

    wanted = grpo_runs.reference_run(settings, [rank[case]["windows"] for rank in ranks], updates=updates)

    assert_same_weights(ranks[0][case]["weights"]["actor"], wanted, tolerance=2e-6)
    assert ranks[0][case]["engines"]["actor"][1] == 2
    assert ranks[0]["plain"]["engines"]["reference"][1] == 3


@pytest.mark.parametrize("case", ["plain", "passes", "sequence", "rloo", "dr"])
def test_ranks_change_neither_text_nor_weights(ranks: list[Found], one_rank: Found, case: str) -> None:
    assert texts(ranks, case) == texts([one_rank], case)
    assert_same_weights(ranks[0][case]["weights"]["actor"], one_rank[case]["weights"]["actor"], tolerance=2e-6)


def test_micro_batches_and_the_head_of_the_loss_change_nothing(ranks: list[Found]) -> None:
    plain = ranks[0]["plain"]

    assert plain["tapped"] == ["actor", "reference"] and ranks[0]["untapped"]["tapped"] == []
    for case in ("accumulated", "untapped"):
        assert texts(ranks, case) == texts(ranks, "plain")
        assert_same_weights(ranks[0][case]["weights"]["actor"], plain["weights"]["actor"], tolerance=2e-6)
        assert ranks[0][case]["steps"][-1] == pytest.approx(plain["steps"][-1], rel=1e-4, abs=1e-5)
    windows = [window for rank in ranks for window in rank["accumulated"]["windows"]]
    assert any(micro["is_filler"] for window in windows for micro in window) == (len(ranks) > 1)


def test_a_rollout_has_answers_of_several_lengths_and_rewards(ranks: list[Found]) -> None:
    rows = [row for rank in ranks for window in rank["plain"]["windows"] for micro in window for row in micro["rows"]]

    assert len({len(row[2]) for row in rows}) > 3 and {row[4] for row in rows} == {True, False}
    assert any(math.isnan(row[3][1]) for row in rows) and not any(math.isnan(row[3][0]) for row in rows)


def test_rewards_that_are_alike_or_absent_change_nothing(ranks: list[Found]) -> None:
    start = grpo_runs.llama("small").state_dict()
    for case, first in (("alike", 0), ("unrewarded", 1)):
        found = ranks[0][case]
        assert all(step["train/actor/loss"] == 0 and step["train/actor/alike"] == 1 for step in found["steps"][first:])
    for name, weight in ranks[0]["alike"]["weights"]["actor"].items():
        assert torch.equal(weight, start[name]), name
    assert ranks[0]["alike"]["steps"][0]["train/actor/reward"] == pytest.approx(0.1)
    assert ranks[0]["unrewarded"]["steps"][0]["train/actor/reward"] > 0  # of rank 0 alone
    assert ranks[0]["unrewarded"]["steps"][1]["train/actor/reward"] == 0


def test_windows_without_a_reward_are_refused_or_told_once(ranks: list[Found]) -> None:
    for number, rank in enumerate(ranks):
        (problem,) = rank["nothing"]
        assert problem.startswith("task.rewards.nothing returned None for every answer of the first window")
        assert [message.split(":")[0] for message in rank["unrewarded"]["warned"]] == ["step 2"] * (number == 0)


def test_the_passes_of_a_window_train_on_one_rollout(ranks: list[Found]) -> None:
    found = ranks[0]["passes"]

    assert len(found["steps"]) == 2 * grpo_runs.STEPS and len(found["windows"]) == grpo_runs.STEPS
    first, second = found["steps"][:2]
    assert first["train/actor/moved"] == pytest.approx(0, abs=1e-9) and second["train/actor/moved"] > 1e-6
    assert first["train/actor/reward"] == second["train/actor/reward"]
    # Without a second pass nothing is asked of the actor before its update, and the ratio is 1 exactly.
    assert all(step["train/actor/moved"] == 0 for step in ranks[0]["plain"]["steps"])


def test_a_run_ended_between_two_passes_goes_on_to_the_same_bits(ranks: list[Found]) -> None:
    if len(ranks) == 1:
        pytest.skip("two ranks ended and went on")
    parts = ranks[0]["resumed"]

    assert len(parts["ended"]["windows"]) == 2 and len(parts["rest"]["windows"]) == 1
    for name, weight in ranks[0]["passes"]["weights"]["actor"].items():
        assert torch.equal(parts["rest"]["weights"]["actor"][name], weight), name


def test_a_reward_models_score_is_that_of_the_answers_last_token(ranks: list[Found]) -> None:
    judge = grpo_runs.judge()
    judge.load_state_dict(ranks[0]["judged"]["weights"]["judge"])
    judge.double()
    rows = [row for rank in ranks for window in rank["judged"]["windows"] for micro in window for row in micro["rows"]]

    for row in rows[:12]:
        states = judge.model(input_ids=torch.tensor([row[1] + row[2]])).last_hidden_state[0, -1]
        assert row[3][0] == pytest.approx(judge.score(states).item(), abs=1e-5)
    assert len({row[3][0] for row in rows}) > 12
    assert ranks[0]["judged"]["engines"]["judge"][1] == 3


def test_the_actor_without_its_adapters_is_a_reference(ranks: list[Found]) -> None:
    steps = ranks[0]["adapter"]["steps"]

    assert steps[0]["train/actor/kl"] == pytest.approx(0, abs=1e-9)  # the adapters are nothing at first
    assert steps[-1]["train/actor/kl"] > 1e-6


def test_held_out_answers_are_scored_before_and_after(ranks: list[Found]) -> None:
    before, after = ranks[0]["plain"]["validations"]

    assert {"val/reward", "val/reward/distinct", "val/reward/early", "val/answer_tokens", "val/ended"} <= set(before)
    assert before != after
    assert before["val/reward_low"] < before["val/reward"] < before["val/reward_high"]
    assert before["val/reward/distinct"] > 0


REWARDS = {"brevity": {}}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_completions": 1}, "task.num_completions=1: must be a whole number of at least 2"),
        ({"epochs": 0}, "task.epochs=0"),
        ({"samples_every": 0.5}, "task.samples_every=0.5"),
        ({"actor": ""}, "task.actor is ''"),
        ({"reference": "actor"}, "are both 'actor'"),
        ({"kl": {"weight": 0.1}}, "task.kl.weight=0.1 needs a reference"),
        ({"generation": {"temperature": 0.0}}, "task.generation.temperature=0: answers to learn from are drawn"),
        ({"generation": {"top_q": 1}}, "did you mean top_p?"),
        ({"mask_truncated": "yes"}, "task.mask_truncated='yes'"),
        ({"generation": ""}, "task.generation='': must be a mapping"),
        ({"rewards": 0}, "task.rewards is 0; it must be a mapping"),
        ({"fused": "yes"}, "task.fused='yes'"),
        ({"rewards": {}}, "task.rewards has no reward"),
        ({"health": {"max_kll": 1}}, "did you mean max_kl?"),
        ({"loss": {"ratio": "tokens"}}, "task.loss.ratio='tokens': must be one of token, sequence, product"),
    ],
)
def test_what_is_wrong_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        GRPOTask(**{"rewards": REWARDS, **settings})

    assert any(told in problem for problem in error.value.problems), error.value.problems


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        GRPOTask(epochs=0, generation={"top_p": 2}, rewards={"x": 1}, loss={"clip_low": -1}, kl={"weight": -1})

    assert len(error.value.problems) == 5


def test_models_of_the_wrong_kind_are_refused() -> None:
    task = GRPOTask(rewards={**REWARDS, "helpful": {"model": "judge"}}, reference="reference")

    problems = task.check_models({"actor": False, "reference": True, "judge": True}, stage="fit")

    assert len(problems) == 3 and all("trainable" in problem for problem in problems)
    assert "models has no actor" in task.check_models({"policy": True}, stage="validate")[0]
    assert task.check_models({"actor": False, "judge": False}, stage="validate") == []
    assert GRPOTask(rewards=REWARDS, reference="adapter").check_adapters([])[0].startswith("task.reference=adapter")


def test_a_reference_that_nothing_asks_is_not_built() -> None:
    names = ["actor", "reference", "judge"]
    rewards = {**REWARDS, "helpful": {"model": "judge"}}

    assert GRPOTask(rewards=rewards).models_for("fit", names) == ["actor", "judge"]
    assert GRPOTask(rewards=rewards, reference="reference").models_for("fit", names) == names
    assert GRPOTask(rewards=rewards, reference="reference").models_for("validate", names) == ["actor", "judge"]


def test_a_reward_without_its_column_is_refused() -> None:
    task = GRPOTask(rewards={"exact_answer": {}})

    (problem,) = task.check_batch({"columns": {"prompt": ["Why?"], "solution": ["So."]}}, "data.train")

    assert "needs the column 'answer', and the rows of data.train have only prompt, solution" in problem


@pytest.mark.slow
def test_the_default_run_raises_the_held_out_reward(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    done = subprocess.run([sys.executable, "-m", "trainer", "task=grpo", f"hydra.run.dir={folder}"], check=False)

    assert done.returncode == 0
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["after"]["val/reward"] > summary["before"]["val/reward"] + 0.1
    assert {"held_out.jsonl", "completions.jsonl"} <= {path.name for path in folder.iterdir()}
