"""DeepSpeed configurations: how they are read, what is refused and why, what every `auto` becomes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from trainer.config import ConfigError
from trainer.plugins import (
    Facts,
    check_plugin,
    check_plugins,
    check_values,
    dtype_of,
    log_rewrites,
    read_plugin,
    resolve,
    stage_of,
)

KEY = "models.student.plugin"
SEED = Path(__file__).parents[1] / "seed"
PRESETS = Path(__file__).parents[2] / "conf" / "plugin"


def facts(**changes: Any) -> Facts:
    values = {
        "micro_batch": 4,
        "accumulation": 2,
        "world_size": 3,
        "dtype": torch.float32,
        "trainable": True,
        "max_grad_norm": 0.5,
        "num_updates": 40,
        "optimizer": {"lr": 3e-4, "weight_decay": 0.1},
        "scheduler": {"warmup_steps": 0.25},
        "hidden_size": 64,
    }
    return Facts(**{**values, **changes})


def zero(stage: int, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **block}}


def check(config: dict[str, Any], *, trainable: bool = True, optimizer: str | None = "AdamW") -> list[str]:
    return check_plugin("student", config, trainable=trainable, optimizer=optimizer)


def autos_in(value: Any) -> bool:
    return value == "auto" or (isinstance(value, dict) and any(autos_in(child) for child in value.values()))


# Reading


def test_comments_and_trailing_commas_are_read_as_the_plain_file() -> None:
    assert read_plugin(KEY, SEED / "zero2_commas.json") == json.loads((SEED / "zero2_config.json").read_text())


def test_a_dict_is_copied() -> None:
    given = zero(2)

    read_plugin(KEY, given)["zero_optimization"]["stage"] = 3

    assert given == zero(2)


def test_keys_beside_path_override_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**zero(2, overlap_comm=True), "gradient_clipping": 1.0}))

    config = read_plugin(
        KEY, {"path": str(tmp_path / "ds.json"), "gradient_clipping": 2.0, **zero(1), "bf16": {"enabled": True}}
    )

    assert config == {**zero(1, overlap_comm=True), "gradient_clipping": 2.0, "bf16": {"enabled": True}}


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}\.path=ds_confg\.json is no file"):
        read_plugin(KEY, {"path": "ds_confg.json"})


def test_broken_json_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  "zero_optimization": {\n    "stage": 2\n  "bf16": {"enabled": "auto"}\n}')

    with pytest.raises(ConfigError, match=r"ds\.json is no valid DeepSpeed JSON: .*line [345]"):
        read_plugin(KEY, file)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')

    with pytest.raises(ConfigError, match="key 'stage' stands twice"):
        read_plugin(KEY, file)


def test_a_file_that_holds_no_object_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("[1, 2]")

    with pytest.raises(ConfigError, match="must hold a JSON object, but holds a list"):
        read_plugin(KEY, file)


# Keys and types


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**zero(2), "gradient_cliping": 1.0}, "gradient_cliping is no DeepSpeed key.*did you mean gradient_clipping"),
        (zero(2, overlap_com=True), "zero_optimization.overlap_com is no DeepSpeed key.*did you mean overlap_comm"),
        (zero(2, offload_optimizer={"devise": "cpu"}), "zero_optimization.offload_optimizer.devise is no DeepSpeed"),
        (zero(3, stage3_prefetch_bucket="auto", sub_group=1), "zero_optimization.sub_group is no DeepSpeed key"),
        ({**zero(2), "bf16": {"enable": True}}, "bf16.enable is no DeepSpeed key.*did you mean enabled"),
        ({**zero(2), "gradient_clipping": "1.0"}, "gradient_clipping='1.0' must be int or float, but is str"),
        ({**zero(2), "train_batch_size": True}, "train_batch_size=True must be int, but is bool"),
        ({**zero(2), "prescale_gradients": 1}, "prescale_gradients=1 must be bool, but is int"),
        (zero(2, reduce_bucket_size="big"), "zero_optimization.reduce_bucket_size='big'"),
        (zero(4), "zero_optimization.stage=4"),
        ({"zero_optimization": 2}, "zero_optimization=2 must be a mapping"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage=auto cannot be resolved.*write 0, 1, 2 or"),
        ({**zero(2), "optimizer": "AdamW"}, "optimizer='AdamW' must be a mapping with 'type' and 'params'"),
        ({**zero(2), "elasticity": {"enabled": True}}, "elasticity is not supported: it changes the batch size"),
        ({**zero(2), "managed_gradient_accumulation": False}, "the trainer owns the accumulation boundary"),
    ],
)
def test_wrong_keys_and_types_are_refused_by_name(config: dict[str, Any], problem: str) -> None:
    problems = check(config)

    assert len(problems) == 1
    assert problems[0].startswith(f"{KEY}.")
    assert_matches(problem, problems[0])


def assert_matches(pattern: str, text: str) -> None:
    import re

    assert re.search(pattern, text), text


def test_all_problems_of_a_plugin_come_at_once() -> None:
    assert len(check({**zero(2, overlap_com=True, stag=1), "gradient_cliping": 1, "bf16": {"enabled": "yess"}})) == 4


def test_a_missing_plugin_says_what_to_choose() -> None:
    assert_matches(r"models\.student\.plugin is missing; choose one: plugin@", check({})[0])


# Illegal combinations


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_model_under_a_stage_for_optimizers_is_refused(stage: int) -> None:
    (problem,) = check(zero(stage), trainable=False, optimizer=None)

    assert_matches(f"is ZeRO-{stage}, but models.student is frozen: .*zero3_inference .*replicate", problem)


def test_trained_model_without_an_engine_is_refused() -> None:
    (problem,) = check({"replicate": True})

    assert_matches("replicate has no engine, but models.student is trained", problem)
    assert check({"replicate": True}, trainable=False) == []


def test_key_beside_replicate_is_refused() -> None:
    (problem,) = check({"replicate": True, **zero(3)}, trainable=False)

    assert_matches("zero_optimization has no effect beside replicate", problem)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_offload_with_an_optimizer_of_the_gpu_is_refused(optimizer: str) -> None:
    offload = zero(2, offload_optimizer={"device": "cpu"})

    (problem,) = check(offload, optimizer=optimizer)

    assert_matches(f"models.student.optimizer is {optimizer}, but .* offloads the optimizer .*cpu_adamw", problem)
    assert check(offload, optimizer="DeepSpeedCPUAdam") == []
    assert check({**offload, "zero_force_ds_cpu_optimizer": False}, optimizer=optimizer) == []
    assert check({**offload, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, optimizer=optimizer) == []


def test_offloaded_weights_need_stage_3() -> None:
    (problem,) = check(zero(2, offload_param={"device": "cpu"}))

    assert_matches("offload_param needs stage 3, but the stage is 2", problem)


def test_offloaded_optimizer_needs_a_sharded_one() -> None:
    problems = check(zero(0, offload_optimizer={"device": "cpu"}), optimizer="DeepSpeedCPUAdam")

    assert_matches("offload_optimizer needs stage 1, 2 or 3, but the stage is 0", problems[0])


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_what_both_a_file_and_the_command_line_choose_is_refused(part: str) -> None:
    models = {
        "student": {
            "plugin": {"path": str(SEED / "zero2_config.json")},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        }
    }

    assert check_plugins(models, ["trainer.max_steps=3"]) == []
    (problem,) = check_plugins(models, [f"{part}@models.student.{part}=other"])
    assert_matches(f"{part}@models.student.{part}=other and the '{part}' block .* both choose the {part}", problem)


# Every `auto`


@pytest.mark.parametrize("name", ["zero2_config.json", "zero2_commas.json"])
def test_student_file_of_the_guide_resolves_from_the_run(name: str) -> None:
    resolved = resolve(KEY, read_plugin(KEY, SEED / name), facts(accumulation=1))

    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["train_batch_size"] == 4 * 1 * 3
    assert resolved["gradient_accumulation_steps"] == 1
    assert resolved["gradient_clipping"] == 0.5
    assert resolved["bf16"] == {"enabled": False}
    assert resolved["optimizer"]["params"] == {
        "lr": 3e-4, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": True
    }  # fmt: skip
    assert resolved["scheduler"]["params"] == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "warmup_type": "linear"
    }  # fmt: skip
    assert resolved["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert not autos_in(resolved)


def test_teacher_file_of_the_guide_resolves_from_the_model() -> None:
    config = read_plugin(KEY, SEED / "zero3_config.json")

    resolved = resolve(KEY, config, facts(trainable=False, dtype=torch.bfloat16))

    block = resolved["zero_optimization"]
    assert resolved["bf16"] == {"enabled": True}
    assert block["reduce_bucket_size"] == 64 * 64
    assert block["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert block["stage3_param_persistence_threshold"] == 10 * 64
    # DeepSpeed's own defaults, by leaving them out
    assert not {"stage3_max_live_parameters", "stage3_max_reuse_distance"} & set(block)
    assert not autos_in(resolved)


@pytest.mark.parametrize("block", ["scheduler.params.cycle_max_lr", "steps_per_print", "aio.block_size"])
def test_auto_that_nothing_says_the_value_of_is_refused_by_name(block: str) -> None:
    config: dict[str, Any] = zero(2)
    *path, last = block.split(".")
    node = config
    for name in path:
        node = node.setdefault(name, {})
    node[last] = "auto"
    if "scheduler" in config:
        config["scheduler"]["type"] = "OneCycle"

    with pytest.raises(ConfigError, match=rf"{KEY}\.{block}=auto cannot be resolved"):
        resolve(KEY, config, facts())
    assert_matches(f"{block}=auto cannot be resolved", check(config)[0])


def test_auto_within_a_list_is_refused() -> None:
    config = {**zero(2), "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": ["auto", 0.9]}}}

    assert_matches(r"optimizer.params.betas=\['auto', 0.9\]", check(config)[0])


def test_learning_rate_that_neither_file_nor_task_gives_is_refused() -> None:
    config = {**zero(2), "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}

    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr=auto cannot be resolved"):
        resolve(KEY, config, facts(optimizer={}))


def test_warmup_goes_up_to_the_rate_that_the_file_gives_its_optimizer() -> None:
    config = read_plugin(KEY, SEED / "zero2_config.json")
    config["optimizer"]["params"]["lr"] = 7e-5

    resolved = resolve(KEY, config, facts(accumulation=1))

    assert resolved["scheduler"]["params"]["warmup_max_lr"] == 7e-5


@pytest.mark.parametrize(("warmup", "updates"), [(0.25, 10), (7, 7), (0, 1), (0.001, 1)])
def test_warmup_is_counted_in_updates_or_as_a_share_of_them(warmup: float, updates: int) -> None:
    assert facts(scheduler={"warmup_steps": warmup}).warmup_updates() == updates


def test_warmup_is_linear_unless_the_file_says_otherwise() -> None:
    for given, expected in (({}, "linear"), ({"warmup_type": "auto"}, "linear"), ({"warmup_type": "log"}, "log")):
        config = {**zero(2), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, **given}}}
        assert resolve(KEY, config, facts())["scheduler"]["params"]["warmup_type"] == expected


# Batch keys, clipping, precision


@pytest.mark.parametrize(
    ("literal", "run"),
    [
        ({"train_batch_size": 8}, "the run's is 24"),
        ({"train_micro_batch_size_per_gpu": 1}, "the run's is 4"),
        ({"gradient_accumulation_steps": 16}, "the run's is 2"),
    ],
)
def test_literal_batch_key_of_a_trained_model_must_be_the_runs(literal: dict[str, int], run: str) -> None:
    (name,) = literal

    with pytest.raises(ConfigError, match=rf"{KEY}\.{name}={literal[name]}, but {run}.*write auto"):
        resolve(KEY, {**zero(2), **literal}, facts())


def test_equal_literal_batch_keys_are_fine() -> None:
    literal = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}

    assert resolve(KEY, {**zero(2), **literal}, facts()).items() >= literal.items()


def test_literal_batch_key_of_a_frozen_model_is_rewritten_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    config = read_plugin(KEY, SEED / "zero3_config.json")
    frozen = facts(trainable=False)

    with caplog.at_level(logging.INFO, logger="trainer.plugins"):
        log_rewrites(KEY, config, frozen)

    assert config["train_micro_batch_size_per_gpu"] == 1
    assert resolve(KEY, config, frozen)["train_micro_batch_size_per_gpu"] == 4
    assert caplog.messages == [
        f"{KEY}.train_micro_batch_size_per_gpu=1 is set to 4: the model is frozen and follows the run"
    ]


def test_optimizer_of_a_frozen_model_is_left_out_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    config = {**zero(3), "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    frozen = facts(trainable=False, optimizer={})

    with caplog.at_level(logging.INFO, logger="trainer.plugins"):
        log_rewrites(KEY, config, frozen)

    assert "optimizer" not in resolve(KEY, config, frozen)
    assert caplog.messages == [f"{KEY}.optimizer is left out: the model is frozen"]


@pytest.mark.parametrize(
    ("given", "max_grad_norm", "written"),
    [({}, None, 0.0), ({}, 0.5, 0.5), ({"gradient_clipping": "auto"}, 0.5, 0.5), ({"gradient_clipping": 2}, 0.5, 2)],
)
def test_clipping_is_always_written(given: dict[str, Any], max_grad_norm: float | None, written: float) -> None:
    # Left out, DeepSpeed clips at 1.0.
    assert resolve(KEY, {**zero(2), **given}, facts(max_grad_norm=max_grad_norm))["gradient_clipping"] == written


def test_clipping_of_a_file_that_wins_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainer.plugins"):
        log_rewrites(KEY, {**zero(2), "gradient_clipping": 2.0}, facts(max_grad_norm=0.5))

    assert caplog.messages == [f"{KEY}.gradient_clipping=2.0 wins over max_grad_norm=0.5"]


@pytest.mark.parametrize("given", [{}, {"memory_efficient_linear": True}])
def test_linear_of_other_models_is_never_patched(given: dict[str, Any]) -> None:
    assert resolve(KEY, zero(3, **given), facts())["zero_optimization"]["memory_efficient_linear"] is False


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ({"bf16": {"enabled": True}}, torch.float32),
        ({"bf16": {"enabled": False}}, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.bfloat16),
    ],
)
def test_precision_that_contradicts_the_model_is_refused(block: dict[str, Any], dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"enabled=(true|false), but the model's dtype is .*models\.student\.dtype"):
        resolve(KEY, {**zero(2), **block}, facts(dtype=dtype))


def test_precision_that_a_plugin_fixes_is_told() -> None:
    assert dtype_of({"bf16": {"enabled": True}}) == torch.bfloat16
    assert dtype_of({"fp16": {"enabled": True}, "bf16": {"enabled": False}}) == torch.float16
    assert dtype_of({"bf16": {"enabled": False}}) == torch.float32
    assert dtype_of({"bf16": {"enabled": "auto"}}) is None
    assert dtype_of(zero(3)) is None


def test_empty_blocks_of_yaml_count_as_absent() -> None:
    config = {"zero_optimization": None, "optimizer": None, "bf16": None}

    assert check(config) == []
    assert resolve(KEY, config, facts())["zero_optimization"]["stage"] == 0


# Presets


WITH_ENGINE = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_inference", "zero3_offload"]


def preset(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return config


def test_presets_are_these() -> None:
    assert sorted(path.stem for path in PRESETS.glob("*.yaml")) == sorted(["file", "replicate", *WITH_ENGINE])


@pytest.mark.parametrize("trainable", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", WITH_ENGINE)
def test_preset_resolves_to_what_deepspeed_accepts(name: str, trainable: bool) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config, optimizer = preset(name), "DeepSpeedCPUAdam" if "offload" in name else "AdamW"
    if not trainable and stage_of(config) != 3:
        assert check(config, trainable=False) != []
        return
    assert check(config, trainable=trainable, optimizer=optimizer) == []

    resolved = resolve(KEY, config, facts(trainable=trainable, world_size=1))

    assert not autos_in(resolved)
    accepted = DeepSpeedConfig(resolved)
    assert accepted.train_batch_size == 4 * 2
    assert accepted.gradient_clipping == 0.5
    assert accepted.zero_config.stage == stage_of(config)
    assert accepted.zero_config.memory_efficient_linear is False


def test_replicate_is_for_frozen_models() -> None:
    assert check(preset("replicate"), trainable=False) == []
    assert check(preset("replicate")) != []


def test_every_preset_says_how_to_use_it() -> None:
    for file in PRESETS.glob("*.yaml"):
        assert file.read_text().startswith("# plugin@models."), file


@pytest.mark.parametrize(
    ("config", "on_gpu", "torch_adam"),
    [
        ({"zero_optimization": {"stage": 2}}, False, True),
        ({"zero_optimization": {"stage": 2}}, True, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, False, None),
    ],
)
def test_adam_block_compiles_no_gpu_kernel_on_a_cpu(config: dict[str, Any], on_gpu: bool, torch_adam: Any) -> None:
    given = {**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}

    params = resolve(KEY, given, facts(on_gpu=on_gpu))["optimizer"]["params"]

    assert params.get("torch_adam") is torch_adam


def test_zero0_in_float16_is_refused_since_its_loss_would_not_be_scaled() -> None:
    (problem,) = check_values(KEY, zero(0), facts(dtype=torch.float16))

    assert "ZeRO-0 cannot train in float16" in problem and "use zero1" in problem
    assert check_values(KEY, zero(1), facts(dtype=torch.float16)) == []
    assert check_values(KEY, zero(0), facts(dtype=torch.bfloat16)) == []
    assert check_values(KEY, zero(0), facts(dtype=torch.float16, trainable=False)) == []


def test_ranks_that_share_rows_and_a_file_that_holds_nothing_are_refused(tmp_path):
    (tmp_path / "empty.json").write_text("{}")

    (shared,) = check_plugin("student", {"sequence_parallel_size": 2}, trainable=True, optimizer="AdamW")
    (empty,) = check_plugin("student", {"path": str(tmp_path / "empty.json")}, trainable=True, optimizer="AdamW")

    assert shared.startswith("models.student.plugin.sequence_parallel_size=2 is not supported")
    assert empty.startswith(f"models.student.plugin.path={tmp_path}/empty.json holds nothing; ")
