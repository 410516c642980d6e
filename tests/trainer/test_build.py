"""What only the objects themselves can tell of a configuration, said before a model is built."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.tasks.tiny_tokenizers import SPECIAL, make_tokenizer
from trainer.build import build_data, build_tokenizer
from trainer.config import ConfigError, DataConfig
from trainer.data.preferences import PreferenceRows
from trainer.data.sources import TrainingData
from trainer.run import _title

NODE = {"_target_": "builtins.list"}
NUMBERS: Any = [{"x": 1}]


class Unnamed:
    """Reads rows, and says no more than it must."""

    def __init__(self) -> None:
        pairs = PreferenceRows()
        self.prepare, self.build, self.collator = pairs.prepare, pairs.build, pairs.collator


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
    return build_data(cfg, "data", cfg.data, [], built=[], tokenizers={})


def test_only_models_that_the_mode_builds_are_said_to_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f'{{"text": "number {number} of many"}}\n' for number in range(8)))
    data = OmegaConf.structured(DataConfig(train=str(file), tokenizer="embedded:bpe-4k", validation_fraction=0.5))
    cfg = OmegaConf.create({"mode": "cache_teacher", "models": {}, "data": data})

    with caplog.at_level("INFO", logger="trainer"):
        build_data(cfg, "data", cfg.data, ["student", "teacher"], built=["teacher"], tokenizers={})

    assert f"data.train: {file}, read by teacher\n" in caplog.text


def test_own_datasets_are_taken_as_they_are() -> None:
    data = OmegaConf.structured(DataConfig(train=NODE, batch_size=3))

    built = build(data, mode="fit")

    assert (built.train, built.validation, built.batch_size) == ([], None, 3)


@pytest.mark.parametrize(
    ("rows", "row", "noun"),
    [
        (None, {"completion": "yes"}, "text"),
        ("trainer.data.preferences.PreferenceRows", {"chosen": "yes", "rejected": "no"}, "pairs"),
        ("trainer.data.prompts.PromptRows", {}, "prompts"),
        (f"{__name__}.Unnamed", {"chosen": "yes", "rejected": "no"}, "examples"),
    ],
)
def test_what_is_held_out_is_called_what_it_is(tmp_path: Path, rows: str | None, row: Any, noun: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"is it {number}", **row}) + "\n" for number in range(8)))
    given = DataConfig(train=str(file), tokenizer="embedded:bpe-4k", rows=rows and {"_target_": rows})

    found = build(OmegaConf.structured(given), mode="fit")

    assert found.noun == noun
    own, nothing = TrainingData(validation=NUMBERS), TrainingData()
    assert _title({"": found}) == _title({"": found, "critic": nothing}) == f"held-out {noun}"
    assert _title({"": found, "critic": own}) == "held-out examples"


def test_held_out_rows_are_the_same_for_every_seed(tmp_path: Any) -> None:
    """So that a spread over seeds is one of training, and not of what is scored."""
    rows = [f'{{"text": "number {number} of many"}}' for number in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))

    def held_out(seed: int, **changes: Any) -> list[list[int]]:
        options = DataConfig(train=str(tmp_path / "train.jsonl"), tokenizer="embedded:bpe-4k", **changes)
        cfg = OmegaConf.create({"mode": "fit", "models": {}, "data": OmegaConf.structured(options), "seed": seed})
        validation: Any = build_data(cfg, "data", cfg.data, [], built=[], tokenizers={}).validation
        return [item["input_ids"].tolist() for item in validation]

    assert held_out(0) == held_out(1) == held_out(0, split_seed=0)
    assert held_out(0) != held_out(0, split_seed=1)


def test_models_that_share_token_ids_must_agree_unless_the_task_translates() -> None:
    own, other = make_tokenizer(), make_tokenizer(special=SPECIAL[::-1])
    options = OmegaConf.structured(DataConfig(train="train.jsonl"))
    tokenizers = {"teacher": other, "student": own}

    with pytest.raises(ConfigError, match="'<sys>' is id 0 in teacher and id 4 in student"):
        build_tokenizer(options, tokenizers)

    # The data are read in the tokens of a model that shares them, else of the first that brings any.
    assert build_tokenizer(options, tokenizers, own_tokens=["teacher"]) is own
    assert build_tokenizer(options, {"teacher": other}, own_tokens=["teacher"]) is other
    assert build_tokenizer(options, {}) is None
