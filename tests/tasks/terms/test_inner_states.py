"""What is refused of terms on inner states before anything is scored; their values are those of test_distill_runs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tasks.distill import DistillTask
from tasks.projection import Projection
from tests.tasks.test_distill import Handle, llama
from trainer.config import ConfigError


def inner_task(bridge: nn.Module, **term) -> DistillTask:
    layers = {"model.layers.0": "model.layers.-1"}
    task = DistillTask(terms={"states": {"function": "hidden_mse", "layers": layers, **term}})
    handles = {"student": llama(0), "teacher": llama(1), "projection": bridge}
    task.models = {name: Handle(name, module, trainable=name != "teacher") for name, module in handles.items()}
    task.trainer = SimpleNamespace(
        tokenizer=None,
        device=torch.device("cpu"),
        train_loader=None,
        validation_loader=None,
        tokenizers=dict.fromkeys(handles),
    )
    return task


@pytest.mark.parametrize(
    ("projection", "term", "words"),
    [
        (Projection(student_size=16, teacher_size=32), {"projection": "projection"}, "takes states of 16 features"),
        (Projection(student_size=32, teacher_size=16), {"projection": "projection"}, "task.terms.states: the student"),
        (Projection(student_size=32, teacher_size=32, count=2), {"projection": "projection"}, "build.count=1"),
        (nn.Linear(32, 32), {"projection": "projection"}, "models.projection is no projection"),
        (
            nn.Linear(1, 1),
            {"layers": {"model.layer.0": "model.layers.0"}},
            "models.student has no module 'model.layer.0'",
        ),
        (nn.Linear(1, 1), {"function": "attention_relations", "heads": 5}, "5 relation heads do not divide"),
    ],
)
def test_states_that_cannot_be_compared_are_refused_before_anything_is_scored(projection, term, words):
    with pytest.raises(ConfigError) as caught:
        inner_task(projection, **term).setup("fit")

    assert words in str(caught.value)
