"""What only the objects themselves can tell of a configuration, said before a model is built."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer.build import build_data
from trainer.config import ConfigError, DataConfig

NODE = {"_target_": "builtins.list"}


@pytest.mark.parametrize(
    ("mode", "train", "validation", "expected"),
    [
        ("fit", NODE, "held_out.jsonl", "must be of one kind"),
        ("fit", "train.jsonl", NODE, "must be of one kind"),
        ("validate", NODE, None, "data.validation is missing"),
    ],
)
def test_sources_that_do_not_fit_are_refused(mode: str, train: Any, validation: Any, expected: str) -> None:
    data = OmegaConf.structured(DataConfig(train=train, validation=validation))

    with pytest.raises(ConfigError, match=expected):
        build(data, mode=mode)


def build(data: Any, *, mode: str) -> Any:
    cfg = OmegaConf.create({"mode": mode, "models": {}, "data": data})
    return build_data(cfg, "data", cfg.data, [])


def test_own_datasets_are_taken_as_they_are() -> None:
    data = OmegaConf.structured(DataConfig(train=NODE, batch_size=3))

    built = build(data, mode="fit")

    assert (built.train, built.validation, built.batch_size) == ([], None, 3)
