"""The reward task: its update and its metrics against plain PyTorch, its loss against TRL's, and its table."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from tasks.reward import COLUMNS, NUM_SHOWN, RewardTask, pairwise_losses
from tests.ranks import run_ranks
from tests.tasks.reward_runs import (
    CUTS,
    ROWS,
    held_out_pairs,
    make_pairs,
    reference_run,
    run_reward,
    save_language_model,
    scores_of_tokens,
    start_model,
)
from tests.tasks.task_runs import PAD, llama
from tests.tasks.tiny_tokenizers import make_tokenizer
from tests.test_examples import records, run
from trainer import ConfigError
from trainer.data.preferences import PreferenceCollator
from trainer.scorers import sequence_scorer, token_scorer


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder with the language model and the exports, and what each rank found."""
    folder = tmp_path_factory.mktemp("reward")
    save_language_model(folder / "lm")
    return folder, run_ranks(run_reward, folder, folder=folder, world_size=request.param)


def test_the_update_is_that_of_the_mean_over_the_pairs_of_the_global_batch(
    runs: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, (main, *_) = runs
    weights, losses, _ = reference_run(folder / "lm")
    start = start_model(folder / "lm", sequence_scorer, "reward").state_dict()

    for name, found in main.items():
        engine, stage = found["engines"]["reward"]
        assert engine == "DeepSpeedEngine" and f"zero{stage}" == name
        assert [step["train/reward/loss"] for step in found["steps"]] == pytest.approx(losses, abs=1e-5)
        for key, value in found["weights"]["reward"].items():
            torch.testing.assert_close(value.double(), weights[key], atol=1e-5, rtol=1e-4, msg=f"{name}: {key}")
    assert (weights["score.weight"] - start["score.weight"]).abs().max() > 1e-3, "the head learns"


def test_held_out_scores_are_those_of_all_pairs_on_any_ranks(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (main, *_) = runs
    _, _, expected = reference_run(folder / "lm")

    for name, found in main.items():
        assert len(found["validations"]) == 2
        for measured, wanted in zip(found["validations"], expected, strict=True):
            assert measured == pytest.approx(wanted, abs=1e-5), name


def test_scores_are_those_of_the_last_real_token_whichever_side_is_padded(
    runs: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, ranks = runs
    critic = start_model(folder / "lm", token_scorer, "critic")
    values = [scores_of_tokens(critic, torch.tensor(row)).detach() for row in ROWS]

    for found in (found for rank in ranks for found in rank.values()):
        reward = start_model(folder / "lm", sequence_scorer, "reward")
        reward.load_state_dict(ranks[0][f"zero{found['engines']['reward'][1]}"]["weights"]["reward"])
        texts = torch.stack([scores_of_tokens(reward, torch.tensor(row))[-1] for row in ROWS]).detach()
        for side in ("right", "left"):
            torch.testing.assert_close(found[f"texts {side}"].double(), texts, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[f"tokens {side}"].double(), torch.cat(values), atol=1e-5, rtol=1e-4)
            last = torch.stack([row[-1] for row in values])
            torch.testing.assert_close(found[f"critic as texts {side}"].double(), last, atol=1e-5, rtol=1e-4)


def test_the_export_is_a_model_of_transformers_that_scores_alike(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (main, *_) = runs

    for name in CUTS[1 if "zero0" in main else 2]:
        loaded = AutoModelForSequenceClassification.from_pretrained(folder / f"export-{name}")
        assert type(loaded) is LlamaForSequenceClassification and loaded.config.num_labels == 1
        texts = [scores_of_tokens(loaded, torch.tensor(row))[-1] for row in ROWS]
        torch.testing.assert_close(torch.stack(texts), main[name]["texts right"], atol=1e-5, rtol=1e-4)
        rescored = main[name]["rescored"]
        assert rescored["val/accuracy"] == pytest.approx(main[name]["validations"][-1]["val/accuracy"], abs=0.5)


def test_a_users_pairs_train_a_model_by_the_command_line(tmp_path: Path) -> None:
    """Two steps: a split by prompt of the file, scores before and after, the table of pairs, the export."""
    rows = [
        {"prompt": f"Is {index // 2} even?", "chosen": "yes" if index % 4 < 2 else "no", "rejected": f"maybe {index}"}
        for index in range(20)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    arguments = ["task=reward", "model@models.reward.build=reward_model_from_config"]
    arguments += ["data.tokenizer=embedded:bpe-4k"]
    config = "model_type:llama,vocab_size:4096,hidden_size:32,intermediate_size:64,num_hidden_layers:1"
    config += ",num_attention_heads:4,num_key_value_heads:4,pad_token_id:0,bos_token_id:1,eos_token_id:2"
    arguments += [f"models.reward.build.config={{{config}}}"]
    arguments += ["data.train=pairs.jsonl", "trainer.max_steps=2", "trainer.log_every=1", "logger=jsonl"]

    result = run(["-m", "trainer", *arguments, "hydra.run.dir=run"], folder=tmp_path)

    assert result.returncode == 0, result.stderr[-4000:]
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["global_step"]) == ("completed", 2)
    names = {"accuracy", "accuracy_low", "accuracy_high", "pairwise_loss", "margin", "mean_score", "brier_score"}
    assert summary["before"].keys() == summary["after"].keys() == {f"val/{n}" for n in (*names, "calibration_error")}
    assert summary["before"]["val/pairwise_loss"] != summary["after"]["val/pairwise_loss"]
    assert {"train/reward/pairwise_loss", "train/reward/centering"} <= set(records(folder)[1])
    table = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(table) == 2 * 4 and {row["step"] for row in table} == {0, 2}, "two of ten prompts are held out"
    assert all("even?" in row["prompt"] and "maybe" in row["rejected"] for row in table)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / "export" / "reward")
    assert loaded.score.out_features == 1


# The loss beside that of TRL


class Handle:
    """What the task sees of a model, without an engine."""

    name, trainable, has_ended = "reward", True, False

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def ready_task(module: Any, **options: Any) -> Any:
    task = RewardTask(**options)
    task.models = {"reward": Handle(module)}  # type: ignore[dict-item]
    tables: list[Any] = []
    task.trainer = SimpleNamespace(  # type: ignore[assignment]
        is_filler=False,
        device=torch.device("cpu"),
        is_main=True,
        global_step=3,
        tokenizers={"reward": make_tokenizer()},
        log_table=lambda name, **table: tables.append((name, table)),
    )
    return task, tables


@pytest.mark.parametrize("coefficient", [0.0, 0.03])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_loss_is_that_of_trl(tmp_path: Path, coefficient: float, with_margin: bool) -> None:
    from trl import RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    module = start_model(save_language_model(tmp_path), sequence_scorer, "reward").float()
    pairs = [
        {key: value + 1 if key.endswith("input_ids") else value for key, value in pair.items()}  # no pad inside: TRL
        for pair in make_pairs(7, seed=4, with_margin=with_margin)
    ]
    theirs: Any = object.__new__(RewardTrainer)
    theirs.model, theirs.args = module, SimpleNamespace(center_rewards_coefficient=coefficient or None)
    theirs._metrics, theirs._total_train_tokens, theirs._tp_size = defaultdict(lambda: defaultdict(list)), 0, 1
    theirs.accelerator = SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    rows = [
        {f"{side}_ids": pair[f"{side}_input_ids"].tolist() for side in ("chosen", "rejected")}
        | ({"margin": float(pair["margin"])} if with_margin else {})
        for pair in pairs
    ]
    module.eval().zero_grad()
    expected = theirs.compute_loss(module, DataCollatorForPreference(pad_token_id=PAD)(rows))
    expected.backward()
    gradient = module.score.weight.grad.clone()
    module.zero_grad()

    task, _ = ready_task(module, centering=coefficient)
    output = task.training_step(PreferenceCollator(PAD)(pairs), 0)
    loss = torch.stack(list(output.sums.values())).sum() / len(pairs)
    loss.backward()

    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(module.score.weight.grad, gradient, atol=1e-5, rtol=1e-5)
    metrics = {name: value[0] / value[1] for name, value in output.metrics.items()}
    for ours, name in (("accuracy", "accuracy"), ("margin", "margin"), ("mean_score", "mean_reward")):
        assert float(metrics[f"reward/{ours}"]) == pytest.approx(theirs._metrics["eval"][name][0], abs=1e-5)


def test_a_pair_costs_what_the_formula_says() -> None:
    chosen, rejected = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0])

    plain = pairwise_losses(chosen, rejected)
    with_margin = pairwise_losses(chosen, rejected, margin=torch.tensor([1.0, 0.0]))

    assert plain.tolist() == pytest.approx([math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(3.0))])
    assert with_margin.tolist() == pytest.approx([math.log(1 + math.exp(0.5)), math.log(1 + math.exp(3.0))])


def test_the_table_holds_the_pairs_told_apart_best_and_worst(tmp_path: Path) -> None:
    module = start_model(save_language_model(tmp_path), sequence_scorer, "reward").float()
    pairs = make_pairs(20, seed=2, with_margin=False)
    task, tables = ready_task(module)
    collate = PreferenceCollator(PAD)

    with torch.no_grad():
        for index in range(0, 20, 5):
            task.validation_step(collate(pairs[index : index + 5]), index // 5)
    task.trainer.is_filler = True
    with torch.no_grad():
        task.validation_step(collate(pairs[:5]), 4)
    derived = task.derive_metrics({"accuracy": 0.5, "gap0/_of_bin": 0.25, "gap1/_of_bin": -0.25})
    task.on_validation_end({f"val/{name}": value for name, value in {"accuracy": 0.5, **derived}.items()})

    assert derived["calibration_error"] == 0.5 and task._num_pairs == 20, "a filler counts for nothing"
    ((name, table),) = tables
    assert (name, table["columns"], table["step"]) == ("pairs", COLUMNS, 3)
    margins = [
        float(scores_of_tokens(module, pair["chosen_input_ids"])[-1])
        - float(scores_of_tokens(module, pair["rejected_input_ids"])[-1])
        for pair in pairs
    ]
    ordered = sorted(margins, reverse=True)
    shown = [float(row[0]) for row in table["rows"]]
    assert shown == pytest.approx(ordered[:NUM_SHOWN] + ordered[-NUM_SHOWN:], abs=0.006)
    best, tokenizer = pairs[margins.index(max(margins))], make_tokenizer()
    answer = best["chosen_labels"] != -100
    assert table["rows"][0][1] == tokenizer.decode(best["chosen_input_ids"][~answer], skip_special_tokens=True)
    assert table["rows"][0][2] == tokenizer.decode(best["chosen_input_ids"][answer], skip_special_tokens=True)


def test_one_model_is_asked_for_and_the_coefficient_is_a_number() -> None:
    with pytest.raises(ConfigError) as caught:
        RewardTask(reward="", centering=-1.0)
    assert caught.value.problems == [
        "task.reward is ''; it must be the name of a model",
        "task.centering=-1.0: must be a finite number of at least 0; 0: no penalty",
    ]
    task = RewardTask()
    assert task.check_models({"student": True}, stage="fit") == [
        "task.reward=reward: models has no reward, only student"
    ]
    assert "trainable=false" in task.check_models({"reward": False}, stage="fit")[0]
    assert task.check_models({"reward": False}, stage="validate") == []


def test_a_model_without_one_score_per_text_is_refused() -> None:
    task, _ = ready_task(llama("small"))

    with pytest.raises(ConfigError, match=r"one score per text is needed: model@models\.reward\.build=reward_model"):
        task.training_step(PreferenceCollator(PAD)(held_out_pairs()), 0)
