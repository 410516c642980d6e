"""Which model starts from which; the copies themselves are in test_routing.py, on real engines."""

import pytest
import torch
from torch import nn

from tests.tasks.task_runs import llama
from trainer.adapters import add_lora
from trainer.start_weights import build_order, copy_start_weights, find_origin_problems


def test_a_model_is_built_after_the_one_that_it_starts_from() -> None:
    origins = {"reference": "policy", "copy": "reference", "policy": None, "critic": None}

    order = build_order(origins)

    assert sorted(order) == sorted(origins)
    assert order.index("policy") < order.index("reference") < order.index("copy")
    assert order.index("critic") < order.index("reference")  # the rest keeps the configuration's order


@pytest.mark.parametrize(
    ("origins", "problems"),
    [
        ({"a": None, "b": "a"}, []),
        ({"a": None, "b": "policy"}, ["models.b.init_from=policy: models has no policy; others are: a"]),
        ({"a": "a"}, ["models.a.init_from=a: a starts from a itself, in a circle"]),
        (
            {"a": "b", "b": "a"},
            ["models.a.init_from=b: b starts from a itself", "models.b.init_from=a: a starts from b itself"],
        ),
    ],
)
def test_an_origin_that_cannot_be_is_refused(origins: dict[str, str | None], problems: list[str]) -> None:
    found = find_origin_problems(origins)
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))


def test_a_model_with_adapters_gives_the_weights_of_its_base() -> None:
    settings = {"r": 2, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["norm"]}
    base, other = llama("small"), llama("other")
    adapted = add_lora("policy", llama("small"), settings=settings, seed=0)

    copied: nn.Module = copy_start_weights(other, adapted, name="reference", origin="policy")

    for (name, found), (_, expected) in zip(copied.named_parameters(), base.named_parameters(), strict=True):
        assert torch.equal(found, expected), name
