"""One model of a run: frozen, generating, gathered, and the norm that it reports."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.engine_runs import Ranks, make_net, net_data

# Frozen models


@pytest.mark.parametrize("plugin", ["replicate", "zero3"])
def test_frozen_model_stays_in_eval_mode_without_a_graph(ranks: Ranks, plugin: str) -> None:
    for found in ranks("frozen"):
        assert found[f"{plugin} seen"] == (False, True, False)
        assert not found[f"{plugin} graph"]


@pytest.mark.parametrize("plugin", ["replicate", "zero3"])
def test_frozen_weights_do_not_change_and_a_changed_bit_is_reported(ranks: Ranks, plugin: str) -> None:
    assert ranks("frozen")[0][f"{plugin} equal"]
    for found in ranks("frozen"):
        assert "the weights of the frozen model 'teacher' changed" in found[f"{plugin} vandal"]


# Generation and gathering


def test_sharded_models_generate_with_another_plugin_selected_and_different_lengths(ranks: Ranks) -> None:
    found = ranks("generation")

    assert all(rank["equal"] for rank in found)
    assert len({rank["length"] for rank in found}) == ranks.world_size
    assert all(rank["training mode is back"] for rank in found)
    assert all(rank["updates"] == 2 for rank in found)  # a trained one goes on training after it


def test_gathered_weights_do_not_depend_on_the_stage_and_stay_tied(ranks: Ranks) -> None:
    main, *others = ranks("gathering")

    assert main["moved"] > 1e-4
    assert main["difference"] < 1e-6
    assert main["alias"] == [True, True]
    assert main["keys"] == [True, True]
    assert all(found["elsewhere"] == [0, 0] for found in others)


# Stepping


def whole_batch() -> dict[str, Tensor]:
    items = net_data()
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reported_norm_is_that_before_clipping(ranks: Ranks, stage: int, clip: float | None) -> None:
    constant = functools.partial(torch.optim.SGD, lr=0.1)
    net, norms = make_net(), []
    optimizer, batch = constant(net.parameters()), whole_batch()
    for _ in range(3):
        (net(batch["x"]) - batch["y"]).pow(2).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()

    for found in ranks("norms"):
        assert found[f"zero{stage} clip {clip}"] == pytest.approx(norms, rel=1e-5)
