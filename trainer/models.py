"""Builders of models that `models.<name>.build` names, and the checks of such a node before anything is allocated."""

import difflib
import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import torch
import transformers
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from trainer import assets
from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life
from trainer.quantization import quantization_config, settle_layout

log = logging.getLogger("trainer.models")

Loaded = TypeVar("Loaded")

_SEQUENCES, _TOKENS = transformers.AutoModelForSequenceClassification, transformers.AutoModelForTokenClassification
_PRETRAINED = {  # each with the class that makes the model
    "trainer.models.causal_lm": AutoModelForCausalLM,
    "trainer.encoders.encoder": AutoModel,
    "trainer.scorers.sequence_scorer": _SEQUENCES,
    "trainer.scorers.token_scorer": _TOKENS,
}
_FROM_CONFIGS = {f"{target}_from_config": kind for target, kind in _PRETRAINED.items()}
_KNOWN = {  # what each class makes, and the configs that transformers has for that
    AutoModelForCausalLM: ("language model", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    AutoModel: ("model", transformers.MODEL_MAPPING),
    _SEQUENCES: ("model with a score per text", transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    _TOKENS: ("model with a score per token", transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
}
_LOAD_ERRORS = (OSError, ValueError, ImportError, KeyError, SafetensorError, UnpicklingError)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def causal_lm(
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Returns a pretrained language model.

    Args:
        name: A hub name, a folder, a .gguf file, or `embedded:<asset>`.
        quantization: "int8" or "nf4" for a frozen model whose linear layers shall take 8 or 4 bits a weight.
    """
    return load_pretrained(
        AutoModelForCausalLM,
        name,
        dtype=dtype,
        attn_implementation=attn_implementation,
        gradient_checkpointing=gradient_checkpointing,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
    )


def causal_lm_from_config(
    config: str | Mapping[str, Any],
    *,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Returns a language model with random start weights.

    Args:
        config: A folder or hub name whose config is taken, or a mapping with `model_type`.
    """
    return build_from_config(
        AutoModelForCausalLM,
        config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        gradient_checkpointing=gradient_checkpointing,
    )


def load_pretrained(
    kind: type[_BaseAutoModelClass],
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    gradient_checkpointing: bool,
    trust_remote_code: bool,
    quantization: str | None = None,
) -> PreTrainedModel:
    """Returns the model of a name that one of transformers' Auto classes makes, from disk where it is there."""
    model, loading = load_reported(
        kind,
        name,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
    )
    tell_loading(name, loading)
    if quantization is not None:
        settle_layout(name, model)
    return set_checkpointing(model, gradient_checkpointing)


def load_reported(
    kind: type[_BaseAutoModelClass],
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool,
    quantization: str | None = None,
    adapt: Callable[[PretrainedConfig], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns the same, and which weights the checkpoint did not give; see `tell_loading`.

    Args:
        adapt: Changes the config before the model is made.
    """
    source = _local_source(name)
    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = quantization_config(quantization, dtype)
    if adapt is not None:
        options["config"] = load_config(name, key="name", trust_remote_code=trust_remote_code)
        adapt(options["config"])

    def load(local_files_only: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
        loaded: Any = kind.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
            output_loading_info=True,
            **options,
        )
        return cast(tuple[PreTrainedModel, dict[str, Any]], loaded)

    try:
        with sign_of_life(f"loading {name}"):
            return _load(source, load)
    except _LOAD_ERRORS as error:
        raise ConfigError(f"build.name={name}: {_why_not_loaded(source, error)}") from error


def build_from_config(
    kind: type[_BaseAutoModelClass],
    config: str | Mapping[str, Any],
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    gradient_checkpointing: bool,
    adapt: Callable[[PretrainedConfig], None] | None = None,
) -> PreTrainedModel:
    """Returns the model, with random start weights, that one of transformers' Auto classes makes of a config."""
    settings = load_config(config) if isinstance(config, str) else AutoConfig.for_model(**dict(config))
    if adapt is not None:
        adapt(settings)
    with _quiet():
        model: PreTrainedModel = kind.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=dtype, attn_implementation=attn_implementation
        )
    return set_checkpointing(model, gradient_checkpointing)


def tokenizer_name(build: Mapping[str, Any]) -> str | None:
    """Returns the folder or hub name of the tokenizer that belongs to a build node, if one does."""
    target, source = build.get("_target_"), None
    if target in _PRETRAINED:
        source = _local_source(build["name"])
    elif target in _FROM_CONFIGS and isinstance(build["config"], str):
        source = _local_source(build["config"])
    if source is None or not Path(source).is_dir():
        return source
    return source if any((Path(source) / file).exists() for file in _TOKENIZER_FILES) else None


def check_build(key: str, build: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with a build node, without weights, a download or a conversion.

    Args:
        key: Where the node stands, such as models.student.build.
    """
    target = build.get("_target_")
    if target in _PRETRAINED:
        name = build.get("name")
        return _check_name(
            f"{key}.name", name, trust_remote_code=build.get("trust_remote_code", False)
        ) or _check_weights(f"{key}.name", str(name))
    if target in _FROM_CONFIGS and isinstance(build.get("config"), Mapping):
        what, known = _KNOWN[_FROM_CONFIGS[target]]
        return _check_settings(f"{key}.config", build["config"], what=what, known=known)
    if target in _FROM_CONFIGS:
        return _check_name(f"{key}.config", build.get("config"), trust_remote_code=False)
    return []


def empty_model(build: Mapping[str, Any]) -> nn.Module | None:
    """Returns the transformers model of a build node without its weights; None where only building it tells."""
    target = str(build.get("_target_"))
    source = build.get("name") if target in _PRETRAINED else build.get("config") if target in _FROM_CONFIGS else None
    if source is None or str(source).startswith(assets.PREFIX) or str(source).endswith(".gguf"):
        return None
    remote = bool(build.get("trust_remote_code", False))
    kind = {**_PRETRAINED, **_FROM_CONFIGS}[target]
    try:
        if isinstance(source, str):
            place = _local_source(source)
            config = _load(place, partial(_auto_config, place, trust_remote_code=remote))
        else:
            config = AutoConfig.for_model(**dict(source))
        with _quiet(), torch.device("meta"):
            model: nn.Module = kind.from_config(config, trust_remote_code=remote)  # type: ignore[no-untyped-call]
    except _LOAD_ERRORS:
        return None
    return model


def _local_source(name: str) -> str:
    """Returns the folder that stands for an embedded asset or a .gguf file; another name as it is."""
    if name.startswith(assets.PREFIX):
        return str(assets.resolve(name))
    if name.endswith(".gguf"):
        return str(assets.convert_user_gguf(Path(name).expanduser()))
    return str(Path(name).expanduser()) if name.startswith("~") else name


def load_config(name: str, *, key: str = "config", trust_remote_code: bool = False) -> PretrainedConfig:
    """Returns the config of a name that leads to a model; `key` is where the name stands."""
    source = _local_source(name)
    try:
        return _load(source, partial(_auto_config, source, trust_remote_code=trust_remote_code))
    except _LOAD_ERRORS as error:
        raise ConfigError(f"build.{key}={name}: {_why_not_loaded(source, error)}") from error


def _auto_config(source: str, local_files_only: bool, *, trust_remote_code: bool) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(
        source, local_files_only=local_files_only, trust_remote_code=trust_remote_code
    )
    return config


def _load(source: str, load: Callable[[bool], Loaded]) -> Loaded:
    """Returns what `load(local_files_only)` gives for a folder, else for the hub's cache, else for the hub."""
    with _quiet():
        if Path(source).is_dir():
            return load(True)
        try:
            return load(True)
        except OSError:  # not in the cache, or not all of it
            _ask_hub(source)
        return load(False)


def _ask_hub(name: str) -> None:
    """Raises OSError unless the hub knows the model and shows it to this user.

    It is one request, while `from_pretrained` repeats a failing one for some 20 seconds.
    """
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the HTTP library, which differs between versions of the hub's client
        raise OSError(_first_line(error)) from error


def set_checkpointing(model: PreTrainedModel, wanted: bool) -> PreTrainedModel:
    """Returns the model, which keeps no activations where that is wanted, and computes them again."""
    if wanted:
        with _quiet():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[no-untyped-call]
        model.config.use_cache = False
    return model


def tell_loading(name: str, loading: Mapping[str, Any]) -> None:
    """Says which weights the checkpoint did not give; the library's own report of it is long and comes with others."""
    for kind, meaning in (
        ("missing_keys", "are not in the checkpoint and start at random"),
        ("unexpected_keys", "are in the checkpoint but not in the model, and are ignored"),
    ):
        if keys := sorted(loading.get(kind) or ()):
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            log.warning("%s: %s%s %s", name, ", ".join(keys[:3]), more, meaning)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps progress bars and warnings of libraries off the terminal; errors are raised as ever."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub_log = logging.getLogger("huggingface_hub")
    hub_level = hub_log.level
    hub_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub_log.setLevel(hub_level)
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_name(key: str, name: object, *, trust_remote_code: bool) -> list[str]:
    """Returns the problem, if any, of a name that should lead to a model."""
    if not isinstance(name, str) or name in ("", "???"):
        return [f"{key} is missing; give a hub name, a folder, a .gguf file or {assets.PREFIX}<asset>"]
    if name.startswith(assets.PREFIX):
        problem = assets.find_problem(name)
    elif name.endswith(".gguf"):
        problem = _gguf_problem(Path(name).expanduser())
    elif Path(name).expanduser().is_dir():
        problem = _folder_problem(Path(name).expanduser())
    elif Path(name).is_file():
        problem = "is a file; give the folder of a model or a .gguf file"
    elif _looks_like_path(name):
        problem = f"this folder does not exist{_nearest_path(Path(name).expanduser())}"
    else:
        problem = _hub_problem(name, trust_remote_code=trust_remote_code)
    return [f"{key}={name}: {problem}"] if problem else []


def _gguf_problem(file: Path) -> str | None:
    if not file.is_file():
        return f"this .gguf file does not exist{_nearest_path(file)}"
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            return "is no GGUF file (it does not start with the letters GGUF); download it again"
    if importlib.util.find_spec("gguf") is None:
        return "a .gguf file needs the Python package gguf, which is missing; `pip install gguf`"
    return None


def _folder_problem(folder: Path) -> str | None:
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        return None
    inside = sorted(file.parent for file in [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    hint = f"; nearest: {inside[0]}" if inside else "; a folder written by save_pretrained has one"
    return f"this folder has no config.json{hint}"


def _check_weights(key: str, name: str) -> list[str]:
    """Returns the problem of a folder without whole weights; of each file only the header is read."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    for index in sorted(folder.glob("*.index.json")):
        if problem := _index_problem(index):
            return [f"{key}={name}: {problem}"]
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            return [f"{key}={name}: {file.name} is broken ({_first_line(error)}); copy or download it again"]
    if not any(file.suffix in (".safetensors", ".bin", ".json") for file in folder.glob("*model*")):
        return [f"{key}={name}: this folder has no weights, such as the model.safetensors that save_pretrained writes"]
    return []


def _index_problem(index: Path) -> str | None:
    """Returns why an index of weights is not to be followed: transformers would, also out of the folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{index.name} is broken ({_first_line(error)}); copy or download it again"
    outside = sorted(str(name) for name in names if Path(str(name)).name != name)
    return f"{index.name} names {outside[0]}, which is not in the folder; correct it" if outside else None


def _looks_like_path(name: str) -> bool:
    """Returns whether a name cannot be a hub name, which is `model` or `organisation/model`."""
    return re.fullmatch(r"\w[\w.\-]*(/\w[\w.\-]*)?", name) is None


def _nearest_path(path: Path) -> str:
    """Returns the part of a message that says what is there instead."""
    parent = path.parent
    if not parent.is_dir():
        return f", nor does the folder {parent}"
    nearest = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    return f"; nearest: {parent / nearest[0]}" if nearest else ""


def _hub_problem(name: str, *, trust_remote_code: bool) -> str | None:
    """Returns why the hub's model cannot be had, as far as its config tells."""
    try:
        _load(name, partial(_auto_config, name, trust_remote_code=trust_remote_code))
    except _LOAD_ERRORS as error:
        return _why_not_loaded(name, error)
    return None


def _why_not_loaded(source: str, error: Exception) -> str:
    """Returns a library's error in one line, with what was tried and what to do."""
    if Path(source).exists():
        return f"could not be loaded from this folder: {_first_line(error)}"
    if not isinstance(error, OSError):
        return _first_line(error)
    return (
        f"no such folder, not in the hub's cache, and the hub gave none ({_first_line(error)}); "
        f"give a local folder, fill the cache (HF_HOME) where there is a network, or correct the name"
    )


def _check_settings(
    key: str, settings: Mapping[str, Any], *, what: str, known: Iterable[type[PretrainedConfig]]
) -> list[str]:
    """Returns the problems of a mapping that describes a model: an unknown type, settings that its type lacks."""
    model_type = settings.get("model_type")
    types = sorted(config.model_type for config in known)
    if model_type not in types:
        nearest = difflib.get_close_matches(str(model_type), types, n=1, cutoff=0.0)[0]
        return [f"{key}.model_type={model_type} is no {what} that transformers knows; nearest: {nearest}"]
    # transformers keeps a misspelt setting silently, and the model gets the default.
    default = AutoConfig.for_model(model_type)
    allowed = {*default.to_dict(), *default.attribute_map, *dir(default)} - {"model_type"}
    problems = []
    for name in settings:
        if name != "model_type" and name not in allowed:
            nearest = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.0)[0]
            problems.append(f"{key}.{name} is no setting of {model_type}; nearest: {nearest}")
    return problems


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
