from types import SimpleNamespace
from typing import Any, cast

import torch

from tasks.policy.scored_answers import Rollout


def test_the_parts_of_a_score_are_told_right_below_it() -> None:
    exchanges = [SimpleNamespace(answer=[1, 2]), SimpleNamespace(answer=[1, 2, 3, 4])]
    rollout = Rollout(
        batch={},
        answers=cast(Any, SimpleNamespace(exchanges=exchanges)),
        is_ended=torch.tensor([True, False]),
        components=torch.tensor([[1.0, 0.0], [0.0, 0.5]]),
        scores=torch.tensor([1.0, 0.5]),
    )

    found = rollout.metrics(["right", "brevity"], model="actor")

    names = ["reward", "reward/right", "reward/brevity", "answer_tokens", "ended"]
    assert list(found) == [f"actor/{name}" for name in names]
    assert [float(total / count) for total, count in found.values()] == [0.75, 0.5, 0.25, 3.0, 0.5]
