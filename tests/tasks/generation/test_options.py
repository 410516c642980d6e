"""What a configuration may say of how text is written, and what is refused."""

from typing import Any

import pytest

from tasks.generation import GenerationOptions, ServerOptions, greedy, read_options
from trainer import ConfigError

KNOWN = "max_new_tokens, temperature, top_p, top_k, min_p, stop, server"


def test_keys_that_are_left_out_have_the_defaults() -> None:
    assert read_options({}) == GenerationOptions()
    read = read_options({"max_new_tokens": 8, "stop": ["\n", "User:"], "temperature": 0, "server": None})
    assert read == GenerationOptions(max_new_tokens=8, temperature=0, stop=("\n", "User:"))
    assert read_options({"stop": None}).stop == ()


def test_all_problems_are_told_at_once_with_key_value_and_rule() -> None:
    wrong: dict[str, Any] = {
        "max_new_tokens": 0,
        "temperature": -1,
        "top_p": 0.0,
        "top_k": 1.5,
        "min_p": 1.0,
        "stop": "\n",
        "temprature": 1.0,
        "server": {"url": "http://host"},
    }

    with pytest.raises(ConfigError) as refused:
        read_options(wrong, key="task.writing")

    assert refused.value.problems == [
        f"task.writing.temprature is unknown, only {KNOWN}; did you mean temperature?",
        "task.writing.max_new_tokens=0: must be a whole number of at least 1",
        "task.writing.temperature=-1: must be a finite number of at least 0; 0 is greedy",
        "task.writing.top_p=0.0: must be a number above 0, at most 1; 1 draws from all tokens",
        "task.writing.top_k=1.5: must be a whole number of at least 0; 0 draws from all tokens",
        "task.writing.min_p=1.0: must be a number of at least 0, below 1; 0 draws from all tokens",
        "task.writing.stop='\\n': must be a list of texts that are not empty, such as ['\\n\\n']",
        "task.writing.server.model is missing",
    ]


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), "1", None, [1]])
@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "top_p", "top_k", "min_p"])
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"task\.generation\.{name}="):
        read_options({name: value})


@pytest.mark.parametrize("value", [[""], [1], 3, {}, {"a": 1}])
def test_what_is_no_list_of_texts_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a list of texts"):
        read_options({"stop": value})


def test_what_is_no_mapping_is_refused() -> None:
    wrong: Any = None
    with pytest.raises(ConfigError, match=r"task\.generation=None: must be a mapping"):
        read_options(wrong)


def test_greedy_keeps_the_length_and_the_stops() -> None:
    options = GenerationOptions(max_new_tokens=8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("x",))

    assert greedy(options) == GenerationOptions(max_new_tokens=8, temperature=0, stop=("x",))


def test_a_server_is_read_with_the_rest() -> None:
    at = {"url": "http://host", "model": "m"}

    assert read_options({"server": at}).server == ServerOptions(url="http://host", model="m")
    for name, value in (("top_k", 3), ("min_p", 0.1)):
        with pytest.raises(ConfigError, match=r"task\.generation\.top_k and .* are not in OpenAI's protocol"):
            read_options({"server": {**at, "dialect": "openai"}, name: value})
        assert read_options({"server": at, name: value}).server is not None
