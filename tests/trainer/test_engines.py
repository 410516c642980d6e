"""Engines on one and on two ranks: whose plugin is active, what is sharded, what steps when, and at which rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.ranks import run_ranks
from tests.trainer.engine_runs import LR, Found, Ranks, fit, make_net, net_data, trained, whole_weights
from tests.trainer.test_assets import tiny_llama
from tests.trainer.test_trainer import difference, reset_accelerate
from trainer import MultiModelTrainer
from trainer.schedules import cosine
from trainer.specs import ModelSpec, RunFacts, tell_unreached
from trainer.updates import UpdatePlan

# The guide's own form


def test_guide_files_give_the_engines_they_name(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["engines"] == [("DeepSpeedEngine", 2), ("DeepSpeedEngine", 3)]
        assert found["zero"] == "DeepSpeedZeroOptimizer"
        assert (found["optimizer"], found["schedule"]) == ("AdamW", "WarmupLR")
        assert found["config"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_first_plugin_is_active_after_construction_and_after_the_run(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["first is active"]
        assert found["first is active again"]


def test_active_plugin_within_a_hook_is_that_of_the_model_concerned(ranks: Ranks) -> None:
    hooks = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_after_optimizer_step")
    for found in ranks("windows"):  # the first plugin is "slow"
        expected = {f"{hook} {name}": {name} for hook in hooks for name in ("slow", "fast")}
        everywhere = {hook: {"slow"} for hook in ("setup", "on_train_step_start", "on_train_step_end")}
        assert found["seen"] == expected | everywhere
    for found in ranks("guide"):
        assert set().union(*found["seen"].values()) == {"student"}


def test_a_plugin_is_seen_anew_only_when_its_configuration_has_changed() -> None:
    from accelerate.utils import get_active_deepspeed_plugin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    reset_accelerate()
    stages = {"sharded": 3, "whole": 1}
    engines = MultiModelTrainer(
        {name: {"zero_optimization": {"stage": stage}} for name, stage in stages.items()}, max_steps=1
    ).engines
    views: list[Any] = []

    for name in (*stages, *stages):
        with engines.selected(name):
            assert get_active_deepspeed_plugin(engines.accelerator.state) is engines.plugins[name]
            assert is_deepspeed_zero3_enabled() == (name == "sharded")
            views.append(engines.plugins[name].dschf)
    engines.plugins["whole"].deepspeed_config["zero_optimization"]["stage"] = 3
    with engines.selected("whole"):
        changed = is_deepspeed_zero3_enabled()

    assert [views.index(view) for view in views] == [0, 1, 0, 1]
    assert changed


def test_warmup_of_the_file_is_linear_to_the_tasks_rate(ranks: Ranks) -> None:
    # DeepSpeed's WarmupLR starts at the minimum and takes its first step after the first update: 0, 0, 1/4, 2/4...
    for found in ranks("guide"):
        assert found["rates"] == pytest.approx([0, 0, LR / 4, LR / 2, LR * 3 / 4, LR])


def test_teacher_of_the_guide_is_sharded_and_the_student_whole(ranks: Ranks) -> None:
    for found in ranks("guide"):
        assert found["teacher is sharded"]
        assert found["student is whole"]
        assert found["student bytes"] == found["whole bytes"]
        # 38 tensors, each padded to a multiple of the ranks
        share = found["whole bytes"] / ranks.world_size
        assert share <= found["teacher bytes"] <= share + 38 * 4
        assert found["counts"][0] == found["counts"][1] == found["whole bytes"] // 4


def test_linear_is_not_patched_by_a_sharded_teacher(ranks: Ranks) -> None:
    assert all(found["linear is torch's"] for found in ranks("guide"))


# Building


def test_model_is_sharded_at_birth_by_its_own_plugin_only(ranks: Ranks) -> None:
    whole = [parameter.numel() for parameter in make_net().parameters()]
    for found in ranks("birth"):
        assert found["sharded"] == [0, 0, 0, 0]  # nothing but partitions is left when the builder returns
        assert found["replica"] == found["student"] == whole
        assert found["bytes"]["replica"] == found["bytes"]["student"] == 4 * sum(whole)
        assert found["bytes"]["sharded"] == 4 * sum(whole) / ranks.world_size
        assert found["same answer"] == 0


def test_gguf_file_works_under_zero3(ranks: Ranks) -> None:
    parameters = sum(parameter.numel() for parameter in tiny_llama().parameters())
    for found in ranks("gguf"):
        assert found["difference"] < 1e-5
        assert found["parameters"] == parameters
        assert found["bytes"] <= 4 * parameters / ranks.world_size + 38 * 4


def test_same_seed_gives_the_same_start_under_every_stage(ranks: Ranks) -> None:
    found = ranks("start")[0]
    for stage in (1, 2, 3):
        assert all(torch.equal(found["starts"][stage][key], value) for key, value in found["starts"][0].items())
    assert difference(found["other seed"], found["starts"][0]) > 0.01


def test_transformers_class_starts_from_its_own_distribution_when_sharded_at_birth(ranks: Ranks) -> None:
    # Its constructor initializes at the end, when ZeRO-3 has taken the weights away.
    llamas = ranks("start")[0]["llamas"]

    for name, value in llamas[1].items():
        torch.testing.assert_close(llamas[3][name].std(), value.std(), rtol=0.1, atol=0)
    assert not llamas[3]["model.embed_tokens.weight"][2].any()  # the padding token


def test_frozen_patterns_keep_their_start_and_the_rest_moves(ranks: Ranks) -> None:
    found = ranks("freezing")[0]
    for stage in (0, 1, 2, 3):
        assert found[f"zero{stage}"] == {"0.weight": False, "0.bias": False, "3.weight": True, "3.bias": True}
        assert found[f"zero{stage} counts"] == (8 * 2 + 2, 4 * 8 + 8 + 8 * 2 + 2)


# Stepping


def plain_fit(
    updates: list[dict[str, Tensor]], optimizer: Callable[..., torch.optim.Optimizer], *, clip: float | None = None
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Returns the weights, rates and norms of plain PyTorch: one update for each batch, a cosine over all of them."""
    net = make_net()
    steps = optimizer(net.parameters())
    schedule = CosineAnnealingLR(steps, T_max=len(updates))
    rates, norms = [], []
    for batch in updates:
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip if clip is not None else math.inf)))
        rates.append(steps.param_groups[0]["lr"])
        steps.step()
        steps.zero_grad()
        schedule.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}, rates, norms


def stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def concatenate(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def test_rates_and_weights_of_five_adam_updates_are_plain_torchs(ranks: Ranks) -> None:
    weights, rates, _ = plain_fit([stack(net_data())] * 5, functools.partial(torch.optim.AdamW, lr=LR))

    for found in ranks("schedules"):
        assert found["engines"] == ["DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"]
        assert found["rates"]["student"] == pytest.approx(rates)
        assert found["rates"]["other"] == pytest.approx([rate * 0.5 / LR for rate in rates])
    # Adam divides by the gradient's size: rounding of 1e-7 becomes up to 1e-5 where a gradient is near 0.
    assert difference(ranks("schedules")[0]["weights"], weights) < 1e-5


def test_model_with_a_smaller_accumulation_steps_several_times_per_window(ranks: Ranks) -> None:
    for found in ranks("windows"):
        once = [(step, name) for step in (1, 2, 3) for name in ("fast", "slow", "fast")]
        assert found["updates"] == {"slow": 3, "fast": 6}
        assert sorted(found["steps"]) == sorted(once)
        assert [name for _, name in found["steps"][:3]] == ["fast", "slow", "fast"]
        assert [found["configs"][name]["gradient_accumulation_steps"] for name in ("slow", "fast")] == [4, 2]


@pytest.mark.parametrize(("model", "per_update"), [("slow", 4), ("fast", 2)])
def test_each_models_update_is_the_mean_over_its_own_micro_batches(ranks: Ranks, model: str, per_update: int) -> None:
    found = ranks("windows")
    updates = [
        concatenate([batch for rank in found for batch in rank["batches"][first : first + per_update]])
        for first in range(0, 12, per_update)
    ]
    weights, rates, _ = plain_fit(updates, functools.partial(torch.optim.SGD, lr=0.1))

    assert difference(found[0]["weights"][model], weights) < 1e-6
    assert found[0]["rates"][model] == pytest.approx(rates)  # a cosine over its own number of updates


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_of_the_plugin_trains_a_bf16_model(ranks: Ranks, stage: int) -> None:
    for found in ranks("bf16"):
        assert found[f"zero{stage}"]["dtype"] == torch.bfloat16
        assert found[f"zero{stage}"]["finite"]
    # Two updates of Adam move a weight by about 2 LR.
    assert LR / 2 < ranks("bf16")[0][f"zero{stage}"]["moved"] < 4 * LR


def test_plugin_object_without_an_accumulation_follows_the_run(ranks: Ranks) -> None:
    for found in ranks("plugin objects"):
        assert found == {"accumulation": 4, "clip": 0.5, "stages": [2, 3]}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("fp16", "models.student.dtype=float16 does not exist on a CPU"),
        ("frozen zero2", "is ZeRO-2, but models.teacher is frozen"),
        ("offload", "models.student.optimizer is AdamW, but models.student.plugin offloads the optimizer"),
        ("no optimizer", "models.student is trainable but has no optimizer"),
        ("window", "gradient_accumulation_steps=3 must divide trainer.gradient_accumulation_steps=4"),
        ("batch", "models.student.plugin.train_batch_size=7, but the run's is 16"),
        ("no module", "models.student.build must return a torch.nn.Module, but returned dict"),
        ("all frozen", "models.student is trainable, but none of its parameters requires a gradient"),
        ("no model", "'teacher' has no model"),
    ],
)
def test_run_that_cannot_be_is_refused_with_the_reason(ranks: Ranks, run: str, reason: str) -> None:
    for found in ranks("refusals"):
        assert reason in found[run]


# DeepSpeed's CPU optimizer, compiled at first use


def check_offload(folder: Path) -> Found:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    found: Found = {}
    for name, block in {
        "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "auto"}},
        "zero3_offload": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
            "offload_param": {"device": "cpu", "pin_memory": "auto"},
        },
    }.items():
        optimizer = functools.partial(DeepSpeedCPUAdam, lr=LR, adamw_mode=True, weight_decay=0.01)
        trainer = fit({"student": {"zero_optimization": block}}, {"student": trained(optimizer=optimizer)}, max_steps=5)
        found[name] = (type(trainer.models["student"].optimizer).__name__, whole_weights(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_adam_is_torchs(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(check_offload, tmp_path, folder=tmp_path, world_size=world_size, timeout=600)[0]

    net, batch = make_net(), stack(net_data())
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01)
    for _ in range(5):
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, (kind, weights) in found.items():
        assert kind == "DeepSpeedCPUAdam", name
        assert difference(weights, dict(net.named_parameters())) < 1e-5, name


@pytest.mark.parametrize(
    ("warmup", "spec", "scheduler", "told"),
    [
        (12, {}, None, []),
        (
            13,
            {},
            None,
            ["models.m.scheduler.warmup_steps=13: the run has 12 updates of models.m, so its"],
        ),
        (0.9, {}, None, []),
        (24, {"gradient_accumulation_steps": 2}, None, []),  # two updates in each step
        (7, {"plan": UpdatePlan(update_every=2)}, None, ["models.m.scheduler.warmup_steps=7: the run has 6 updates"]),
        (13, {"trainable": False}, None, []),
        (0, {}, {"params": {"warmup_num_steps": 20}}, ["models.m.plugin.scheduler.params.warmup_num_steps=20: "]),
        (13, {}, {"params": {"warmup_num_steps": "auto"}}, ["models.m.scheduler.warmup_steps=13: "]),
        (13, {}, {"type": "OneCycle", "params": {}}, []),  # which takes the place of the task's
        (
            1,
            {"plan": UpdatePlan(start_step=10)},
            None,
            ["trainer.stop_at_step=9: the run ends before the first update"],
        ),
    ],
)
def test_a_peak_or_a_first_update_that_the_run_does_not_reach_is_told(
    warmup: float,
    spec: dict[str, Any],
    scheduler: dict[str, Any] | None,
    told: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = RunFacts(batch_size=1, accumulation=4, num_steps=12, last_step=9, seed=0)
    spec = {"gradient_accumulation_steps": None, **spec}
    schedule = functools.partial(cosine, total_steps="auto", warmup_steps=warmup)
    models = {"m": ModelSpec(build=nn.Module, scheduler=schedule, **spec)}

    tell_unreached(models, {"m": {"scheduler": scheduler}}, run)

    assert len(caplog.messages) == len(told)
    for message, start in zip(caplog.messages, told, strict=True):
        assert message.startswith(start)
