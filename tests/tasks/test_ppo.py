"""PPO: whole updates of both models against float64, ranks and micro-batches, resume, odd answers, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.ppo import PPOTask
from tasks.text.language import completion_mask
from tests.ranks import run_ranks
from tests.tasks.ppo_runs import (
    LOSS,
    LR,
    SETTINGS,
    STAGES,
    Scripted,
    build,
    by_hand,
    collate,
    judge,
    prompts,
    run,
    run_all,
)
from tests.tasks.sequence_runs import tokenizer
from trainer import Batch, ConfigError, ModelHandle


@pytest.fixture(scope="module", params=[1, 2])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    found = {}
    for size in (1, 2):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        found[size] = run_ranks(run_all, folder / "run", folder=folder, world_size=size)
    return found


def texts_of(found: list[Any], case: str) -> list[list[list[dict[str, Any]]]]:
    """Returns the rollouts of a run, each a list of micro-batches of all ranks together."""
    by_rank = [one[case]["rollouts"] for one in found]
    return [
        [[row for part in parts for row in part] for parts in zip(*rollout, strict=True)]
        for rollout in zip(*by_rank, strict=True)
    ]


def check_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for role in LR:
        start = build(role).state_dict()
        for name, weight in expected[role].items():
            torch.testing.assert_close(found[role][name].double(), weight.double(), atol=5e-6, rtol=0)
        moved = max((start[name] - weight).abs().max().item() for name, weight in expected[role].items())
        assert moved > 0.01  # two thousand times the tolerance


def test_the_models_are_where_they_should_be(runs: dict[int, list[Any]], world_size: int) -> None:
    engines = runs[world_size][0]["mini"]["engines"]

    assert engines == {role: ("DeepSpeedEngine", stage) for role, stage in STAGES.items()}


def test_updates_are_those_of_the_formulas(runs: dict[int, list[Any]], world_size: int) -> None:
    found = runs[world_size]
    texts = texts_of(found, "mini")
    assert [[len(micro) for micro in rollout] for rollout in texts] == [[4, 4], [4, 4]]
    assert len({len(one["answer"]) for rollout in texts for micro in rollout for one in micro}) > 1

    expected = by_hand(texts)

    check_weights(found[0]["mini"]["weights"], expected["weights"])
    steps = found[0]["mini"]["steps"]
    shown = [step["train/actor/kl_weight"] for step in steps]
    assert shown == pytest.approx([value for value in expected["coefficients"] for _ in range(2)])
    assert shown[2] != shown[0]  # it has adapted
    assert min(step["train/actor/clipped"] for step in steps) > 0.1  # both clips were at work
    assert min(step["train/critic/clipped"] for step in steps) > 0.1
    assert found[0]["mini"]["weights"]["reference"].keys() == build("reference").state_dict().keys()


@pytest.mark.parametrize("case", ["mini", "whole", "uneven"])
def test_ranks_change_neither_texts_nor_updates(runs: dict[int, list[Any]], case: str) -> None:
    assert texts_of(runs[1], case) == texts_of(runs[2], case)

    check_weights(runs[2][0][case]["weights"], runs[1][0][case]["weights"])
    for one, two in zip(runs[1][0][case]["steps"], runs[2][0][case]["steps"], strict=True):
        assert two == pytest.approx(one, abs=1e-4)
    for one, two in zip(runs[1][0][case]["validations"], runs[2][0][case]["validations"], strict=True):
        assert two == pytest.approx(one, abs=1e-5)


def test_micro_batches_change_nothing(runs: dict[int, list[Any]]) -> None:
    whole, cut = runs[1][0]["whole"], runs[1][0]["cut"]

    check_weights(cut["weights"], whole["weights"])
    assert cut["steps"][-1]["train/critic/explained_variance"] == pytest.approx(
        whole["steps"][-1]["train/critic/explained_variance"], abs=1e-5
    )


def test_a_filler_counts_for_nothing(runs: dict[int, list[Any]], world_size: int) -> None:
    texts = texts_of(runs[world_size], "uneven")
    assert [[len(micro) for micro in rollout] for rollout in texts] == [[4, 4], [4, 1]]

    check_weights(runs[world_size][0]["uneven"]["weights"], by_hand(texts)["weights"])


def test_answers_of_no_token_and_answers_that_are_all_cut(runs: dict[int, list[Any]]) -> None:
    found, texts = runs[1][0]["scripted"], texts_of(runs[1], "scripted")
    lengths = [len(one["answer"]) for rollout in texts for micro in rollout for one in micro]
    assert lengths.count(0) > 1 and max(lengths) == 3

    check_weights(found["weights"], by_hand(texts, **LOSS)["weights"])  # the KL is in the loss, nothing is whitened

    assert {step["train/actor/ended"] for step in found["steps"]} == {0.0}
    mean = sum(lengths[:8]) / 8
    assert found["steps"][0]["train/actor/answer_tokens"] == pytest.approx(mean)
    assert found["state"]["kl_weight"] == 0.3  # without a target


def test_the_critic_is_measured_on_held_out_answers(runs: dict[int, list[Any]], world_size: int) -> None:
    found = [one["uneven"] for one in runs[world_size]]
    answers = [row for one in found for row in one["held_out"][0]]
    assert sorted(one["index"] for one in answers) == [0, 1, 2, 3, 4]

    judge(answers, {role: build(role).double() for role in STAGES}, prompts(5, seed=1), SETTINGS, 0.3)

    errors, returns = (torch.cat([one[key] for one in answers]) for key in ("raw", "return"))
    numbers = found[0]["validations"][0]
    explained = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert numbers["val/critic/explained_variance"] == pytest.approx(float(explained), abs=1e-5)
    assert numbers["val/critic/value_loss"] == pytest.approx(float(errors.square().mean() / 2), abs=1e-5)
    assert not any("_error" in name or "_return" in name for name in numbers)


def test_an_actor_without_its_adapters_is_the_reference(runs: dict[int, list[Any]], world_size: int) -> None:
    own, twin = (runs[world_size][0][case] for case in ("adapter", "twin"))

    assert set(own["engines"]) == {"actor", "critic"} and set(twin["engines"]) == set(STAGES)
    for role in LR:
        for name, weight in twin["weights"][role].items():
            torch.testing.assert_close(own["weights"][role][name], weight, atol=5e-6, rtol=0)
    for one, two in zip(own["steps"], twin["steps"], strict=True):
        assert one["train/actor/kl"] == pytest.approx(two["train/actor/kl"], abs=1e-6)
    assert own["steps"][0]["train/actor/kl"] == pytest.approx(0, abs=1e-6)  # the adapters are nothing at first
    assert own["steps"][-1]["train/actor/kl"] > 1e-3
    assert own["validations"][-1] == pytest.approx(twin["validations"][-1], abs=1e-5)


def test_a_critic_that_was_exported_wrongly_is_seen(runs: dict[int, list[Any]], world_size: int) -> None:
    for found in runs[world_size]:
        assert "critic scores val/critic/" in found["adapter"]["export"]


def test_a_run_goes_on_between_two_passes_as_if_it_had_not_ended(runs: dict[int, list[Any]], world_size: int) -> None:
    for found in runs[world_size]:
        whole, rest = found["mini"], found["resumed"]
        assert rest["rollouts"] == []  # what was prepared is trained on again
        assert rest["state"] == whole["state"]
        assert rest["steps"] == whole["steps"][3:]
        for role, weights in whole["weights"].items():
            for name, weight in weights.items():
                assert torch.equal(rest["weights"][role][name], weight), f"{role} {name}"


# Without engines ------------------------------------------------------------------------------------------------------


class Handle:
    """What the task sees of a model, without an engine; notes its mode in each forward."""

    def __init__(self, name: str, role: str) -> None:
        self.name, self.module, self.trainable, self.modes = name, build(role), role in LR, []
        self.module.train(self.trainable)

    def __call__(self, **kwargs: Any) -> Any:
        self.modes.append(self.module.training)
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            return self.module(**kwargs)

    def set_training(self, mode: bool) -> None:
        self.module.train(mode)

    evaluating = ModelHandle.evaluating


def sometimes(prompts: list[str], completions: list[str], *, bonus: list[float], **columns: Any) -> list[float | None]:
    """No reward for every third."""
    return [None if given == 0 else 1.0 for given in bonus]


def ready_task(**settings: Any) -> PPOTask:
    task = PPOTask(**{**SETTINGS, "fused": False, **settings})
    task.models = {role: Handle(role, role) for role in STAGES}  # type: ignore[assignment, misc]
    tables: list[Any] = []
    task.trainer = SimpleNamespace(  # type: ignore[assignment]
        tokenizers=dict.fromkeys(STAGES, tokenizer()),
        seed=0,
        global_step=0,
        indices={"": [0, 1, 2, 3]},
        is_main=True,
        is_filler=False,
        sources={},
        device=torch.device("cpu"),
        tables=tables,
        log_table=lambda name, **table: tables.append((name, table)),
    )
    task.setup("fit")
    task.writer = Scripted()
    return task


@torch.no_grad()
def rolled_out(task: PPOTask, rows: list[dict[str, Any]]) -> Batch:
    (batch,) = task.prepare_window([task.prepare_batch(collate(rows))], is_filler=[False])
    return batch


def test_models_are_read_without_dropout_before_they_are_trained() -> None:
    task = ready_task()

    rolled_out(task, prompts(4, seed=0))

    for name in ("actor", "critic"):
        assert task.models[name].modes == [False]  # type: ignore[attr-defined]
        assert task.models[name].module.training


def test_an_answer_without_a_reward_is_learnt_of_by_neither_model() -> None:
    task = ready_task(rewards={"some": {"function": "tests.tasks.test_ppo.sometimes"}})
    rows = prompts(4, seed=0)

    batch = rolled_out(task, rows)

    assert batch["scores"].isnan().tolist() == [True, False, False, True]  # the bonus of the first and fourth is 0
    counted = completion_mask(batch)
    lengths = [sum(row["prompt_input_ids"].tolist()) % 4 for row in rows]
    assert counted.sum(-1).tolist() == [0, *lengths[1:3], 0]
    assert task.count_items(batch) == sum(lengths[1:3]) > 0
    output = task.training_step(batch, 0)
    assert all(torch.isfinite(loss) for loss in output.sums.values())
    total, count = output.metrics["actor/reward"]  # type: ignore[misc]
    assert (float(total), int(count)) == (pytest.approx(2 * (1.0 - 0.7)), 2)


def test_a_window_without_any_token_trains_nothing_and_has_a_graph() -> None:
    task = ready_task(rewards={"none": {"function": "tests.tasks.test_ppo.sometimes"}})
    task.trainer.global_step = 2  # in the first window it is refused
    rows = [prompts(1, seed=0)[0] for _ in range(4)]  # the bonus of all is 0

    batch = rolled_out(task, rows)
    output = task.training_step(batch, 0)

    assert task.count_items(batch) == 0
    for name in LR:
        sum(loss for key, loss in output.sums.items() if key.startswith(name)).backward()  # type: ignore[union-attr]
        gradients = [weight.grad for weight in task.models[name].module.parameters()]
        assert all(gradient is not None and (gradient == 0).all() for gradient in gradients)


def test_a_first_window_without_any_reward_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    task = ready_task(rewards={"none": {"function": "tests.tasks.test_ppo.sometimes"}})
    rows = [prompts(1, seed=0)[0] for _ in range(4)]

    with pytest.raises(ConfigError, match=r"task\.rewards\.none returned None for every answer of the first"):
        rolled_out(task, rows)
    weights = []
    for step, found in ((2, rows), (4, prompts(4, seed=0)), (6, rows), (8, prompts(4, seed=0))):
        task.trainer.global_step = step
        weights.append(float(rolled_out(task, found)["kl_weight"]))

    assert [message.split(":")[0] for message in caplog.messages] == ["step 3"]
    assert weights[1] == weights[0] == 0.3 and weights[2] != 0.3  # there was no KL to adapt to before
    assert weights[3] == weights[2]


def test_the_weight_of_the_kl_stays_where_a_window_is_prepared_anew() -> None:
    task = ready_task()

    def weight_at(step: int) -> float:
        task.trainer.global_step = step
        return float(rolled_out(task, prompts(4, seed=0))["kl_weight"])

    first, second, again, third = (weight_at(step) for step in (0, 2, 3, 4))

    assert first == 0.3 and second == again  # steps 3 and 4 pass over one rollout
    assert second != first and third != second


def test_held_out_answers_stand_beside_those_of_the_first_validation() -> None:
    task = ready_task()

    for _ in range(2):
        task.validation_step(collate(prompts(4, seed=0)), 0)
        task.on_validation_end({})

    ((name, table),) = task.trainer.tables  # type: ignore[attr-defined]
    assert (name, table["columns"]) == ("held_out", ["prompt", "before", "reward before", "now", "reward now"])
    assert [row[0] for row in table["rows"]] == [f"prompt {index}" for index in range(4)]
    assert all(row[1:3] == row[3:] for row in table["rows"])


def test_drawn_answers_are_shown_every_so_often() -> None:
    task = ready_task(samples_every=3)
    shown = []
    for step in (0, 2, 4, 6):  # the first steps of rollouts
        task.trainer.global_step = step
        rolled_out(task, prompts(4, seed=0))
        shown.append(len(task.trainer.tables))  # type: ignore[attr-defined]

    assert shown == [1, 1, 2, 2]  # every 3 steps
    name, table = task.trainer.tables[0]  # type: ignore[attr-defined]
    assert (name, table["columns"], len(table["rows"])) == ("completions", ["prompt", "answer", "reward"], 4)
    assert [table["step"] for _, table in task.trainer.tables] == [1, 5], "those that learn from them"  # type: ignore[attr-defined]


# Refusals -------------------------------------------------------------------------------------------------------------


def test_wrong_values_are_refused_together() -> None:
    with pytest.raises(ConfigError) as refused:
        PPOTask(
            critic="actor",
            epochs=0,
            gamma=1.5,
            lam=True,
            whiten="yes",  # type: ignore[arg-type]
            fused="no",
            missing_end_penalty=-1,
            generation={"temperature": 0},
            loss={"clip_low": 2},
            kl={"target": -1},
            rewards={"brevity": {"words": 1, "weight": "high"}},
            health={"max_kl": -1, "max_alike": 0.5},
        )

    keys = [problem.split("=")[0].split(" ")[0] for problem in refused.value.problems]
    assert keys == [
        "task.actor", "task.epochs", "task.gamma", "task.lam", "task.whiten", "task.missing_end_penalty", "task.fused",
        "task.loss.clip_low", "task.kl.target", "task.generation.temperature", "task.rewards.brevity.weight",
        "task.health.max_alike", "task.health.max_kl",
    ]  # fmt: skip


def test_a_penalty_that_no_float32_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.missing_end_penalty=1e\+39: must be .* that a float32 holds"):
        PPOTask(**{**SETTINGS, "missing_end_penalty": 1e39})


@pytest.mark.parametrize("key", ["generation", "loss", "kl", "rewards"])
@pytest.mark.parametrize("value", ["", 0, False])
def test_what_is_empty_is_no_mapping(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{key}( is |=){value!r}"):
        PPOTask(**{**SETTINGS, key: value})


def test_models_in_the_wrong_place_are_refused() -> None:
    task = PPOTask(**{**SETTINGS, "rewards": {"judge": {"model": "reward"}}})

    found = task.check_models({"actor": False, "reference": True, "reward": True}, stage="fit")

    assert [problem.split(",")[0] for problem in found] == [
        "models.actor.trainable=false",
        "task.critic=critic: models has no critic",
        "models.reference.trainable=true",
        "models.reward.trainable=true",
    ]
    assert task.check_models({"actor": True, "critic": True}, stage="export") == []
    names = ["actor", "critic", "reference", "reward"]
    assert task.models_for("export", names) == ["actor", "critic"]
    assert task.models_for("fit", names) == task.models_for("validate", names) == names
    alone = PPOTask(**{**SETTINGS, "reference": "adapter"})
    assert alone.models_for("fit", names[:3]) == alone.models_for("validate", names) == ["actor", "critic"]
    assert alone.check_models({"actor": True, "critic": True}, stage="fit") == alone.check_adapters(["actor"]) == []
    assert alone.check_adapters(["critic"])[0].startswith("task.reference=adapter: models.actor has no adapters")


def test_a_critic_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"models.critic knows 40 token ids, but its data's tokenizer gives ids up"):
        run(critic_tokens=40)


def test_columns_that_a_reward_needs_are_looked_for() -> None:
    task = PPOTask(rewards={"contains_answer": {}})

    (problem,) = task.check_batch(collate(prompts(2, seed=0)), "data.train")

    assert problem.startswith("task.rewards.contains_answer.function needs the column 'answer'")
    assert task.check_tokenizers({"actor": None}) == [
        "the task reads text, but no model brings a tokenizer; give data.tokenizer=<folder>"
    ]
