"""What a cache is of: the parts of its key, where they come from, and how two keys differ."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from tasks.text.vocabulary import num_ids
from tasks.values import is_number, is_whole
from trainer import ConfigError, ModelHandle, MultiModelTrainer, did_you_mean, digest_fixed, identify_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_PARTS = ("top_k", "temperatures", "mask", "dtype", "vocabulary", "teacher")  # those that task.cache may ask for
RECORDED_MASKS = ("completion", "all")  # validation is about completions: a cache of prompts alone would fail there
_MAX_DIGITS = 16  # of a digest in a message


@dataclass(kw_only=True, frozen=True)
class CacheOptions:
    """`task.cache`: what is recorded, or what a recorded cache must be; None there: as it was recorded.

    Args:
        path: The cache's folder; None: no cache.
        top_k: The most likely so many tokens are stored.
        temperatures: Those whose normaliser is stored.
        mask: "completion" or "all": the positions that are stored.
        vocabulary: The first so many logits count; None: all of the teacher's.
        dtype: Of the teacher's weights, such as "bfloat16"; the recording's is that of models.<teacher>.dtype.
        teacher: Its name; the recording's is that of models.<teacher>.build.name.
        shard_megabytes: The size at which a file is closed.
    """

    path: str | None = None
    top_k: int | None = None
    temperatures: tuple[float, ...] | None = None
    mask: str | None = None
    vocabulary: int | None = None
    dtype: str | None = None
    teacher: str | None = None
    shard_megabytes: float = 64.0

    def asked(self) -> dict[str, Any]:
        """Returns the parts of the key that are asked for."""
        return {part: value for part in ROW_PARTS if (value := getattr(self, part)) is not None}


@dataclass(kw_only=True, frozen=True)
class Reading:
    """What a term of the loss needs of a cache: the positions of its mask and, if it compares with the teacher, more.

    Args:
        temperature: At which it reads the teacher; None: not at all.
        top_k: How many of the most likely tokens; None: as many as there are.
    """

    mask: str
    temperature: float | None
    top_k: int | None = None


@dataclass(kw_only=True, frozen=True)
class CacheKey:
    """All that the content of a cache depends on.

    Args:
        teacher: The name that it was built from, for people; its class where it has none.
        weights: Digest of all its weights, the same for any sharding.
        config: Digest of its transformers configuration, None of a module that has none.
        tokenizer: Digest of its tokens, their ids and its special tokens.
        template: Digest of the chat template.
        data: By set of examples, how many and a digest of some.
    """

    teacher: str
    weights: str | None
    config: str | None
    tokenizer: str | None
    template: str | None
    data: dict[str, dict[str, Any]]
    dtype: str
    vocabulary: int
    top_k: int
    temperatures: tuple[float, ...]
    mask: str

    def as_json(self) -> dict[str, Any]:
        """Returns the parts as they are written."""
        return dataclasses.asdict(self) | {"temperatures": list(self.temperatures)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CacheKey:
        """Returns the key that was written; raises KeyError, TypeError or ValueError where that is none."""
        for part, is_right in _PARTS:
            if not is_right(content[part]):
                raise ValueError(f"key.{part} is {content[part]!r}")
        key = cls(**{**content, "temperatures": tuple(float(value) for value in content["temperatures"])})
        if key.top_k > key.vocabulary:
            raise ValueError(f"key.top_k is {key.top_k}, of {key.vocabulary} tokens")
        return key

    def digest(self) -> str:
        """Returns the sha256 of all parts."""
        return _digest(self.as_json())

    def differences(self, expected: Mapping[str, Any]) -> list[str]:
        """Returns each part that is not as expected, with both values.

        Args:
            expected: Any of the parts; of `temperatures` each must be there, of `data` each set must be the same.
        """
        found = []
        for part, value in expected.items():
            own = getattr(self, part)
            if part == "temperatures":
                if not set(value) <= set(own):
                    found.append(f"temperatures: the cache has {_shown(own)}, this run has {_shown(value)}")
            elif part == "data":
                found += [
                    f"{key}: the cache has {_shown(own.get(key))}, this run has {_shown(value.get(key))}"
                    for key in dict.fromkeys([*own, *value])
                    if own.get(key) != value.get(key)
                ]
            elif own != value:
                found.append(f"{part}: the cache has {_shown(own)}, this run has {_shown(value)}")
        return found


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"{value['examples']} examples ({_shown(value['digest'])})"
    if isinstance(value, list | tuple):
        return ", ".join(f"{item:g}" for item in value)
    text = str(value)
    return f"{text[:_MAX_DIGITS]}..." if len(text) == hashlib.sha256().digest_size * 2 else text


# Where the parts come from -------------------------------------------------------------------------------------------


def data_parts(trainer: MultiModelTrainer) -> dict[str, Any]:
    """Returns the parts that the examples decide, which every run has."""
    tokenizer = trainer.tokenizer
    template = None if tokenizer is None else tokenizer.chat_template
    return {
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
        "template": None if template is None else _digest(template),
        "data": identify_sources(trainer.sources),
    }


def teacher_parts(trainer: MultiModelTrainer, teacher: ModelHandle) -> dict[str, Any]:
    """Returns the parts that the teacher decides; every rank must call it."""
    build = trainer.specs[teacher.name].build
    name = build.keywords.get("name") if isinstance(build, functools.partial) else None
    config = getattr(teacher.module, "config", None)
    known = config.to_dict() if isinstance(config, PreTrainedConfig) else None
    return {
        "teacher": str(name or type(teacher.module).__name__),
        "weights": digest_fixed(teacher),
        "config": None if known is None else _digest(_plain_config(known)),
        "dtype": str(teacher.dtype).removeprefix("torch."),
    }


def check_tokens(trainer: MultiModelTrainer, teacher: ModelHandle) -> None:
    """Raises ConfigError for a teacher with other token ids than the data's: a row is found and scored by its ids."""
    own, of_data = trainer.tokenizers[teacher.name], trainer.tokenizer
    if own is not None and of_data is not None and own.get_vocab() != of_data.get_vocab():
        raise ConfigError(
            f"task.cache.path is given, but the tokens of models.{teacher.name} ({len(own)}) are not those of the data "
            f"({len(of_data)}), and a cache knows one set of ids; drop task.cache.path: a live teacher's are translated"
        )


def find_token_problems(trainer: MultiModelTrainer, *, vocabulary: int, largest: int) -> list[str]:
    """Returns what is wrong with a vocabulary that lacks tokens of the data: their log-probability would be made up.

    Args:
        largest: Id of a right next token, of all examples.
    """
    tokenizer = trainer.tokenizer
    size = 0 if tokenizer is None else num_ids(tokenizer)
    if size > vocabulary:
        return [_too_few(vocabulary, f"the tokenizer of the data has {size} ids", size)]
    if largest >= vocabulary:
        return [_too_few(vocabulary, f"the examples have tokens up to id {largest}", largest + 1)]
    return []


def _too_few(vocabulary: int, found: str, needed: int) -> str:
    return (
        f"task.cache.vocabulary={vocabulary}: {found}; record with at least {needed}, or with null for all of the "
        "teacher's logits, under another task.cache.path"
    )


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    # Which file it was read from, by which release and into which dtype: no part of the model.
    ignored = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    return {key: value for key, value in config.items() if key not in ignored}


def make_key(trainer: MultiModelTrainer, teacher: ModelHandle, options: CacheOptions, *, vocabulary: int) -> CacheKey:
    """Returns the key of what a recording with these options holds; every rank must call it."""
    assert options.top_k is not None and options.temperatures is not None and options.mask is not None
    return CacheKey(
        **teacher_parts(trainer, teacher),
        **data_parts(trainer),
        vocabulary=vocabulary,
        top_k=min(options.top_k, vocabulary),
        temperatures=tuple(sorted({1.0, *options.temperatures})),
        mask=options.mask,
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a tokenizer's tokens with their ids, and of its special tokens."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _digest([sorted(tokenizer.get_vocab().items()), special])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# What a user gives ---------------------------------------------------------------------------------------------------


def parse_options(given: Any) -> CacheOptions:
    """Returns `task.cache`, a mapping or None, or raises one ConfigError with everything that is wrong in it."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"task.cache is {given!r}; it must be a mapping such as {{path: outputs/teacher-cache}}")
    given = dict(given or {})
    problems = []
    names = [field.name for field in fields(CacheOptions)]
    for name in (name for name in given if name not in names):
        problems.append(f"task.cache.{name}: there is no such key{did_you_mean(str(name), names)}")
    for name, rule, is_right in _RULES:
        value = given.get(name)
        if value is not None and not is_right(value):
            problems.append(f"task.cache.{name}={value}: {rule}")
    mask = given.get("mask")
    if mask is not None and mask not in RECORDED_MASKS:
        hint = did_you_mean(str(mask), RECORDED_MASKS)
        problems.append(f"task.cache.mask={mask}: must be one of {', '.join(RECORDED_MASKS)}{hint}")
    if problems:
        raise ConfigError(*problems)
    if given.get("temperatures") is not None:
        given["temperatures"] = tuple(float(value) for value in given["temperatures"])
    return CacheOptions(**given)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 1


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_temperatures(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_positive(item) for item in value)


_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("path", "it must be a folder's name", _is_name),
    ("dtype", "it must be a dtype's name, such as bfloat16", _is_name),
    ("teacher", "it must be a name, that of models.<teacher>.build.name in the recording", _is_name),
    ("top_k", "it must be a whole number of at least 1", _is_count),
    ("vocabulary", "it must be a whole number of at least 1", _is_count),
    ("shard_megabytes", "it must be a number above 0", _is_positive),
    ("temperatures", "it must be a list of numbers above 0, such as [1.0,2.0]", _are_temperatures),
)


def _is_digest(value: Any) -> bool:
    return value is None or _is_name(value)


def _are_sources(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(source, dict) and isinstance(source.get("examples"), int) and _is_digest(source["digest"])
        for source in value.values()
    )


_PARTS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("teacher", _is_name),
    *((part, _is_digest) for part in ("weights", "config", "tokenizer", "template")),
    ("data", _are_sources),
    ("dtype", _is_name),
    ("vocabulary", _is_count),
    ("top_k", _is_count),
    ("temperatures", lambda value: _are_temperatures(value) and 1 in value and sorted(set(value)) == list(value)),
    ("mask", lambda value: isinstance(value, str) and value in RECORDED_MASKS),
)
