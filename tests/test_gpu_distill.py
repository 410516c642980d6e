"""Distillation on a GPU: the fused loss in bfloat16, and teachers that are there only while they are asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head
from tasks.losses import FUNCTIONS
from trainer.handle import ModelHandle
from trainer.updates import UpdatePlan

ROWS, WIDTH, VOCABULARY = 300, 64, 1000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tiles_give_the_loss_and_the_gradients_of_float64(name: str, dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, others = (
        torch.randn(size, generator=draw).to(dtype) for size in ((ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, VOCABULARY))
    )
    weight, labels = weight / 8, torch.randint(VOCABULARY, (ROWS,), generator=draw)

    def run(device: str, dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
        states, head = (value.to(device, dtype, copy=True).requires_grad_() for value in (hidden, weight))

        def loss(logits: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
            teacher = others[part].to(device, logits.dtype)
            values = FUNCTIONS[name](logits, teacher, labels[part].to(device), temperature=1.0)
            return values.sum(), values.detach().sum().reshape(1)

        total, _ = fused_loss(states, Head(weight=head), loss, tile_rows=rows)
        total.backward()  # type: ignore[no-untyped-call]
        assert states.grad is not None and head.grad is not None
        return [value.detach().double().cpu() for value in (total, states.grad, head.grad)]

    # bfloat16 has 8 bits, which round logits of size 1 by 0.004 each; float32 sums of 1,000 tokens keep 1e-5.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for ours, exact in zip(run(device, dtype, 128), run("cpu", torch.float64, ROWS), strict=True):
        assert float((ours - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_a_teacher_visits_the_device_only_while_it_is_asked(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    handle = ModelHandle("teacher", **frozen(module))

    for _ in range(2):
        with handle.resident(torch.device(device)):
            found = handle(torch.ones(2, 4, device=device))
            assert {value.device.type for value in (*module.parameters(), *module.buffers())} == {device}
        assert found.device.type == device
        assert {value.device.type for value in (*module.parameters(), *module.buffers())} == {"cpu"}

    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def frozen(module: nn.Module) -> dict[str, Any]:
    return {
        "engine": module,
        "module": module,
        "trainable": False,
        "config": None,
        "accumulation": 1,
        "plan": UpdatePlan(),
        "optimizer": None,
        "scheduler": None,
        "schedule": "constant",
        "select": None,
    }
