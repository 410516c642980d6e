"""Keys, types, blocks and classes of a DeepSpeed configuration against those that DeepSpeed has."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.plugin_keys import check_keys

KEY = "models.student.plugin"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"optimizer": {"type": "AdamV"}}, ".optimizer.type=AdamV: DeepSpeed has no such optimizer; did you mean Adam"),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, ".optimizer.params.lrr: there is no such parameter"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}}, ".optimizer.params.betas: there is no such"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4x"}}}, ".optimizer.params.lr='1e-4x' must be a finite"),
        ({"optimizer": {"type": "AdamW", "params": 5}}, ".optimizer.params=5 must be a mapping"),
        ({"optimizer": {"params": {}}}, ".optimizer={'params': {}} must be a mapping with 'type'"),
        (
            {"scheduler": {"type": "WarmupLr"}},
            ".scheduler.type=WarmupLr: DeepSpeed has no such scheduler; did you mean",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"steps": 1}}}, ".scheduler.params.steps: there is no such"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, ".warmup_num_steps=-1 must be"),
        ({"comms_logger": 5}, ".comms_logger=5 must be a mapping"),
        ({"flops_profiler": True}, ".flops_profiler=True must be a mapping"),
        ({"tensorboard": {"enabled": "maybe"}}, ".tensorboard.enabled='maybe': Input should be a valid boolean"),
        ({"wandb": {"projekt": "x"}}, ".wandb.projekt is no DeepSpeed key; did you mean project?"),
        ({"gradient_clipping": -1.0}, ".gradient_clipping=-1.0 must be a finite number of at least 0"),
    ],
)
def test_what_deepspeed_would_ignore_or_fail_on_is_named(config: dict[str, Any], problem: str) -> None:
    (found,) = check_keys(KEY, config)

    assert found.startswith(KEY)
    assert problem in found


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "eps": 1e-8, "weight_decay": "auto"}}},
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        {"optimizer": {"type": "Lamb", "params": {"max_coeff": 10.0}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": 0}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        {"scheduler": {"type": "WarmupLR", "params": None}, "gradient_clipping": "auto"},
    ],
)
def test_what_deepspeed_takes_is_no_problem(config: dict[str, Any]) -> None:
    assert check_keys(KEY, config) == []
