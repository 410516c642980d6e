"""The key of a cache, part by part, and what `task.cache` may hold."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.teacher_cache.key import CacheKey, check_tokens, parse_options, tokenizer_digest
from tests.tasks.teacher_cache.cache_runs import make_key
from trainer import ConfigError
from trainer.data import load_tokenizer

DATA = {"data.train": {"examples": 3, "digest": "a"}, "data.validation": {"examples": 1, "digest": "b"}}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("teacher", "org/other", "teacher: the cache has org/large, this run has org/other"),
        ("weights", "f" * 64, f"weights: the cache has {'0' * 16}..., this run has {'f' * 16}..."),
        ("config", "c", "config: the cache has none, this run has c"),
        ("tokenizer", "t", "tokenizer: the cache has none, this run has t"),
        ("template", "t", "template: the cache has none, this run has t"),
        ("dtype", "bfloat16", "dtype: the cache has float32, this run has bfloat16"),
        ("vocabulary", 60, "vocabulary: the cache has 61, this run has 60"),
        ("top_k", 64, "top_k: the cache has 5, this run has 64"),
        ("temperatures", (2.0,), "temperatures: the cache has 1, this run has 2"),
        ("mask", "all", "mask: the cache has completion, this run has all"),
        (
            "data",
            {**DATA, "data.train": {"examples": 4, "digest": "a"}},
            "data.train: the cache has 3 examples (a), this run has 4 examples (a)",
        ),
        (
            "data",
            {"data.train": DATA["data.train"]},
            "data.validation: the cache has 1 examples (b), this run has none",
        ),
    ],
)
def test_each_part_that_differs_is_named_with_both_values(part: str, value: Any, message: str) -> None:
    key = make_key(data=DATA)

    assert key.differences({part: value}) == [message]
    assert key.differences({part: getattr(key, part)}) == []


def test_key_comes_back_from_json() -> None:
    key = make_key(data=DATA, temperatures=(1.0, 2.0))

    assert CacheKey.from_json(json.loads(json.dumps(key.as_json()))) == key


def test_more_temperatures_than_needed_are_no_difference() -> None:
    assert make_key(temperatures=(1.0, 2.0)).differences({"temperatures": (2.0,)}) == []


def test_tokenizers_are_told_apart_by_tokens_and_special_tokens() -> None:
    tokenizer = load_tokenizer("embedded:bpe-4k")
    digest = tokenizer_digest(tokenizer)
    assert digest == tokenizer_digest(load_tokenizer("embedded:bpe-4k"))

    tokenizer.add_tokens(["unheard-of"])
    larger = tokenizer_digest(tokenizer)
    tokenizer.pad_token = "unheard-of"

    assert len({digest, larger, tokenizer_digest(tokenizer)}) == 3


def test_teacher_with_other_token_ids_than_the_data_is_refused() -> None:
    teacher: Any = SimpleNamespace(name="teacher")
    own, of_data = ({"a": 1, "b": 2}, {"a": 2, "b": 1})
    tokenizers = [_Tokens(own), _Tokens(of_data), _Tokens(dict(own))]

    def check(left: Any, right: Any) -> None:
        trainer: Any = SimpleNamespace(tokenizers={"teacher": left}, tokenizer=right)
        check_tokens(trainer, teacher)

    check(tokenizers[0], tokenizers[2])
    check(None, tokenizers[0])
    with pytest.raises(ConfigError, match=r"the tokens of models.teacher \(2\) are not those of the data \(2\)"):
        check(tokenizers[0], tokenizers[1])


class _Tokens(dict[str, int]):
    def get_vocab(self) -> dict[str, int]:
        return self


def test_options_are_refused_all_at_once_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_options(
            {"topk": 3, "top_k": 0, "temperatures": [0.0], "mask": "completions", "path": "", "vocabulary": True}
        )

    text = "\n".join(refused.value.problems)
    assert "task.cache.topk: there is no such key; did you mean top_k?" in text
    assert "task.cache.mask=completions: must be one of completion, all; did you mean completion?" in text
    for key in ("top_k=0", "temperatures=[0.0]", "path=", "vocabulary=True"):
        assert f"task.cache.{key}: it must be" in text


def test_no_options_are_no_cache() -> None:
    assert parse_options(None).path is None
    assert parse_options({"path": None, "top_k": 64}).asked() == {"top_k": 64}


@pytest.mark.parametrize("given", [False, 0, "x", [], ["path"]])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.cache is .*; it must be a mapping such as \{path: "):
        parse_options(given)


def test_names_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_options({"dtype": ["float32"], "teacher": {"a": 1}})

    dtype, teacher = refused.value.problems
    assert dtype.startswith("task.cache.dtype=['float32']: it must be a dtype's name")
    assert teacher.startswith("task.cache.teacher={'a': 1}: it must be a name")
