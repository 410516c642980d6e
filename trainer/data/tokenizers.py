"""Loads a tokenizer, and compares the vocabularies of models that are to share token ids."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from trainer import assets
from trainer.config import ConfigError


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a name; without a pad token it pads with its end token.

    Args:
        name: A folder, a hub name, a .gguf file, or `embedded:<asset>`.
    """
    path = assets.resolve_tokenizer(name) if name.startswith(assets.PREFIX) else Path(name).expanduser()
    try:
        with _quiet_transformers():
            # Without trust_remote_code=False, transformers asks on the terminal whether to run a tokenizer's own code.
            if path.suffix == ".gguf":
                tokenizer = AutoTokenizer.from_pretrained(
                    str(path.parent), gguf_file=path.name, trust_remote_code=False
                )
            else:
                source = str(path) if path.exists() else name
                tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no tokenizer at {name} ({first_line}); give data.tokenizer a folder with tokenizer.json, or a hub name"
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer {name} has neither a pad token nor an end token; one of them is needed")
        tokenizer.pad_token = tokenizer.eos_token
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def end_tokens(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids that end an answer, for the model or for the tokenizer."""
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ids = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    return {int(token) for token in ids if token is not None}


def check_tokenizer(key: str, name: str | None) -> list[str]:
    """Returns the problem of a tokenizer's name, as far as that can be told without the network."""
    if name is None:
        return []
    if name.startswith(assets.PREFIX):
        problem = assets.find_tokenizer_problem(name)
        return [f"{key}={name}: {problem}"] if problem else []
    path = Path(name).expanduser()
    if name.startswith(("/", ".", "~")) and not path.exists():
        return [f"{key}={name}: there is no such folder; give one with tokenizer.json, a hub name or embedded:<asset>"]
    return []


def find_vocabulary_problem(name: str, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Returns the problem of a model that has no row for some of its tokenizer's token ids."""
    config = getattr(module, "config", None)
    if tokenizer is None or not isinstance(config, PreTrainedConfig):
        return []
    size, largest = getattr(config.get_text_config(), "vocab_size", None), max(tokenizer.get_vocab().values())
    if not isinstance(size, int) or largest < size:
        return []
    numbers = f"models.{name} knows {size} token ids, but its data's tokenizer gives ids up to {largest}"
    return [f"{numbers}; choose the tokenizer that belongs to the model, or a build with a larger vocab_size"]


def check_same_vocabulary(names: dict[str, PreTrainedTokenizerBase]) -> list[str]:
    """Returns what differs between the first tokenizer's token ids and each other's; keys are the models' names."""
    (first, tokenizer), *others = names.items()
    vocabulary = tokenizer.get_vocab()
    problems = []
    for name, other in others:
        difference = _find_difference(vocabulary, other.get_vocab())
        if difference:
            token, left, right = difference
            problems.append(
                f"models.{first} ({len(vocabulary)} tokens) and models.{name} ({len(other.get_vocab())} tokens) have "
                f"different vocabularies: token {token!r} is {left} in {first} and {right} in {name}; "
                "they must share token ids, so give models of one family"
            )
    return problems


def _find_difference(left: dict[str, int], right: dict[str, int]) -> tuple[str, str, str] | None:
    """Returns the token with the lowest id that is not the same on both sides, and what it is there."""
    different = [token for token in left.keys() | right.keys() if left.get(token) != right.get(token)]
    if not different:
        return None
    token = min(different, key=lambda token: (left.get(token, len(left)), right.get(token, len(right)), token))
    return token, *(f"id {ids[token]}" if token in ids else "absent" for ids in (left, right))  # type: ignore[return-value]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
