import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.callbacks import SampleTable
from trainer.callbacks.samples import pad_left
from trainer.config import ConfigError


class Letters:
    """A tokenizer whose ids are positions in the alphabet; "." ends and nothing pads."""

    alphabet = ".abcdefghijklmnopqrstuvwxyz <>"
    pad_token_id, eos_token_id, chat_template = None, 0, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.alphabet.index(letter) for letter in text]}

    def apply_chat_template(self, turns: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        return "".join(f"<{turn['content']}>" for turn in turns)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.alphabet[token] for token in ids)


class Echo(nn.Module):
    """Says the last letter that it was asked with twice, then ends."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.seen: list[dict[str, Any]] = []

    def generate(self, **kwargs: Any) -> Tensor:
        assert not self.dropout.training
        self.seen.append(kwargs)
        ids = kwargs["input_ids"]
        return torch.cat([ids, ids[:, -1:], ids[:, -1:], torch.zeros_like(ids[:, :1]), ids[:, -1:]], dim=1)


def handle(module: nn.Module, *, trainable: bool) -> Any:
    return SimpleNamespace(name="", module=module, trainable=trainable, generate=getattr(module, "generate", None))


def stand_in(tokenizer: Any = None, **models: Any) -> Any:
    tables: list[Any] = []
    models = models or {
        "student": handle(Echo().train(), trainable=True),
        "teacher": handle(Echo().eval(), trainable=False),
        "reward": handle(nn.Linear(1, 1), trainable=True),
    }
    for name, model in models.items():
        model.name = name
    return SimpleNamespace(
        is_main=True,
        device=torch.device("cpu"),
        global_step=3,
        tokenizers=dict.fromkeys(models, tokenizer or Letters()),
        models=models,
        tables=tables,
        log_table=lambda name, **table: tables.append((name, table)),
    )


def test_models_answer_before_and_after_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table, trainer = SampleTable(prompts=["ab", "a long one"]), stand_in()

    table.setup(trainer, None, "fit")
    table.on_fit_start(trainer, None)
    table.on_fit_end(trainer, None)

    assert table.columns == ["prompt", "teacher", "student before", "student after"]
    assert table.rows == [["ab", "bb", "bb", "bb"], ["a long one", "ee", "ee", "ee"]]
    assert [name for name, _ in trainer.tables] == ["samples", "samples"]
    assert trainer.tables[1][1] == {"columns": table.columns, "rows": table.rows, "step": 3}
    assert caplog.messages[0] == "samples: teacher, student before answer 2 prompts, up to 48 tokens each"


def test_generation_is_greedy_in_evaluation_mode_and_leaves_no_trace() -> None:
    table, trainer = SampleTable(prompts=["a", "abc"], max_new_tokens=7), stand_in()
    student = trainer.models["student"].module
    student.dropout.eval()  # a part that its owner froze

    table.on_fit_start(trainer, None)

    (asked,) = student.seen
    assert asked["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert asked["input_ids"].tolist() == [[0, 0, 1], [1, 2, 3]]
    assert asked["do_sample"] is False
    assert asked["max_new_tokens"] == 7
    assert asked["pad_token_id"] == 0
    assert student.training
    assert not student.dropout.training


def test_the_chat_template_wraps_the_prompt() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = "yes"  # type: ignore[assignment]
    table, trainer = SampleTable(prompts=["a"]), stand_in(tokenizer)

    table.on_fit_start(trainer, None)

    assert trainer.models["teacher"].module.seen[0]["input_ids"].tolist() == [[28, 1, 29]]


def test_a_missing_tokenizer_or_speaker_is_refused_at_setup() -> None:
    trainer = stand_in()
    trainer.tokenizers["teacher"] = None
    with pytest.raises(ConfigError, match=r"needs a tokenizer.*data.tokenizer"):
        SampleTable(prompts=["a"]).setup(trainer, None, "fit")
    with pytest.raises(ConfigError, match="can generate, and none of reward can"):
        SampleTable(prompts=["a"]).setup(stand_in(reward=handle(nn.Linear(1, 1), trainable=True)), None, "fit")
    with pytest.raises(
        ConfigError, match=r"prompts=hello: must be a list of texts(.|\n)*max_new_tokens=0: must be at least"
    ):
        SampleTable(prompts="hello", max_new_tokens=0)
    with pytest.raises(ConfigError, match="must be a list of texts"):
        SampleTable(prompts=[1])
    with pytest.raises(ConfigError, match="prompts is empty"):
        SampleTable(prompts=[])


def test_a_resumed_run_keeps_what_was_said_before_training() -> None:
    first = SampleTable(prompts=["ab"])
    first.on_fit_start(stand_in(), None)
    resumed, trainer = SampleTable(prompts=["ab"]), stand_in()

    resumed.load_state_dict(first.state_dict())
    resumed.on_fit_start(trainer, None)

    assert trainer.models["student"].module.seen == []
    assert resumed.rows == first.rows


def test_other_ranks_generate_but_log_nothing() -> None:
    trainer = stand_in()
    trainer.is_main = False

    SampleTable(prompts=["ab"]).on_fit_start(trainer, None)

    assert trainer.tables == []
    assert len(trainer.models["teacher"].module.seen) == 1


def test_padding_goes_left() -> None:
    assert pad_left([[5], [6, 7]], pad_id=9)["input_ids"].tolist() == [[9, 5], [6, 7]]
