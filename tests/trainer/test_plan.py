"""The plan: what each model's column says, and that it is readable in 80 columns."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from trainer.handle import ModelHandle
from trainer.plan import FIELDS, plan_column, plan_table, plan_text
from trainer.updates import UpdatePlan


def model(**fields: Any) -> ModelHandle:
    values = {
        "name": "student",
        "trainable": True,
        "stage": 2,
        "config": {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "num_parameters": 106_200_000,
        "num_trainable": 106_200_000,
        "dtype": torch.bfloat16,
        "accumulation": 4,
        "plan": UpdatePlan(update_every=2),
        "optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        "schedule": "cosine",
        "local_bytes": lambda: 212_400_000,
    }
    return cast(ModelHandle, SimpleNamespace(**{**values, **fields}))


def cells(handle: ModelHandle) -> dict[str, str]:
    return dict(zip(FIELDS, plan_column(handle, batch_size=3), strict=True))


def test_trained_model_shows_how_it_is_stepped() -> None:
    assert cells(model()) == {
        "role": "trained",
        "plugin": "ZeRO-2",
        "offload": "optimizer on cpu",
        "parameters": "106.2M",
        "this rank's share": "212 MB",
        "dtype": "bfloat16",
        "micro-batch": "3",
        "accumulation": "4",
        "updates": "every 2 steps",
        "clipping": "1.0",
        "optimizer": "SGD",
        "schedule": "cosine",
    }


def test_frozen_replica_has_no_steps() -> None:
    shown = cells(model(trainable=False, stage=None, config=None, optimizer=None, num_trainable=0))

    assert (shown["role"], shown["plugin"], shown["offload"]) == ("frozen", "replicate", "-")
    assert {shown[field] for field in ("accumulation", "updates", "clipping", "optimizer", "schedule")} == {"-"}


def test_partly_frozen_model_shows_what_is_trained() -> None:
    assert cells(model(num_trainable=1_500))["parameters"] == "106.2M (1.5k trained)"


def test_plan_of_two_models_fits_a_narrow_terminal() -> None:
    trainer = SimpleNamespace(
        max_steps=28,
        world_size=2,
        device=torch.device("cpu"),
        models={"student": model(), "teacher": model(trainable=False, stage=3, num_trainable=0)},
    )

    text = plan_text(plan_table(cast(Any, trainer), batch_size=3))

    assert "28 steps on 2 ranks, cpu" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "no training on 2 ranks" in plan_text(plan_table(cast(Any, trainer), batch_size=3, trains=False))
