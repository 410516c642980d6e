from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.callbacks import ModelSummary
from trainer.callbacks.model_summary import num_elements


def test_every_model_is_printed_down_to_the_depth(capsys: pytest.CaptureFixture[str]) -> None:
    block = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).to(torch.bfloat16))
    block[1].requires_grad_(False)
    student = nn.ModuleDict({"block": block})
    trainer: Any = SimpleNamespace(is_main=True, models={"student": SimpleNamespace(module=student)})

    ModelSummary(max_depth=1).setup(trainer, None, "fit")

    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "Sequential" in line)
    assert "41" in row
    assert "16" in row
    assert "bfloat16, float32" in row
    assert "student: ModuleDict" in lines[0]
    assert not any("Linear" in line for line in lines)


def test_a_shared_weight_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.Linear(10, 10, bias=False)
    trainer: Any = SimpleNamespace(is_main=True, models={"tied": SimpleNamespace(module=nn.Sequential(layer, layer))})

    ModelSummary(max_depth=0).setup(trainer, None, "fit")

    assert " 100 " in capsys.readouterr().out


def test_a_sharded_parameter_has_its_true_size() -> None:
    sharded = nn.Parameter(torch.empty(0))
    sharded.ds_numel = 123  # as ZeRO-3 leaves it

    assert num_elements(sharded) == 123


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(is_main=False, models={"student": SimpleNamespace(module=nn.Linear(1, 1))})

    ModelSummary().setup(trainer, None, "fit")

    assert capsys.readouterr().out == ""
