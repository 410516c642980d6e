"""A tokenizer is loaded ready to pad, and models that share token ids really do."""

import pytest

from trainer.config import ConfigError
from trainer.data import check_same_vocabulary, load_tokenizer


def test_pad_token_is_set_to_the_end_token_only_when_absent(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "padded")
    with_own_pad = load_tokenizer(str(tmp_path / "padded"))
    with_own_pad.pad_token = "<|start|>"
    with_own_pad.save_pretrained(tmp_path / "own")
    with_own_pad.pad_token = None
    with_own_pad.save_pretrained(tmp_path / "none")

    assert load_tokenizer(str(tmp_path / "own")).pad_token == "<|start|>"
    assert load_tokenizer(str(tmp_path / "none")).pad_token == "<|end|>"


def test_missing_tokenizer_is_one_line_that_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(ConfigError, match=r"no tokenizer at .*; give data\.tokenizer a folder") as error:
        load_tokenizer(str(tmp_path))

    assert "\n" not in str(error.value)


def test_same_vocabularies_have_no_problem(tokenizer, plain_tokenizer):
    assert check_same_vocabulary({"student": tokenizer, "teacher": plain_tokenizer}) == []


def test_different_vocabularies_are_named_with_sizes_and_the_first_difference(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    larger = load_tokenizer(str(tmp_path))
    larger.add_tokens(["<|new|>"])

    (problem,) = check_same_vocabulary({"student": tokenizer, "teacher": larger})

    assert "models.student (400 tokens)" in problem
    assert "models.teacher (401 tokens)" in problem
    assert "token '<|new|>' is absent in student and id 400 in teacher" in problem
