"""Whether whole weights fit, and hooks that are off for a while; tests/tasks/generation has runs on engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from trainer.gathering import _without_hooks, fits_whole, free_bytes, whole_bytes

CPU = torch.device("cpu")


def test_twice_the_whole_model_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(10, 5, dtype=torch.bfloat16)
    net.weight.ds_numel = 1000  # type: ignore[assignment]  # of which this rank holds a piece
    assert whole_bytes(net) == 2 * (1000 + 5)

    for available, fits in ((4019, False), (4020, True)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=available: SimpleNamespace(available=free))
        assert fits_whole(net, device=CPU) is fits


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    assert free_bytes(CPU) == 250


def test_hooks_are_off_inside_and_back_in_their_places_afterwards() -> None:
    net, called = nn.Linear(2, 2), []

    def note(name: str) -> Any:
        return lambda *_: called.append(name)

    handles = [net.register_forward_hook(note(name)) for name in ("first", "theirs", "last")]
    before = net.register_forward_pre_hook(note("before"))

    def disturbed() -> None:
        with _without_hooks([handles[0], handles[2], before]):
            net(torch.zeros(1, 2))
            net.register_forward_hook(note("new"))
            raise KeyError

    with pytest.raises(KeyError):
        disturbed()
    assert called == ["theirs"]
    called.clear()
    net(torch.zeros(1, 2))
    assert called == ["before", "first", "theirs", "last", "new"]
    handles[0].remove()
    before.remove()
    called.clear()
    net(torch.zeros(1, 2))
    assert called == ["theirs", "last", "new"]
