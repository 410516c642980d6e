"""Builders of models that `models.<name>.build` names, and what can be known of a model without its weights."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
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
PRETRAINED = {  # each with the class that makes the model
    "trainer.models.causal_lm": AutoModelForCausalLM,
    "trainer.encoders.encoder": AutoModel,
    "trainer.scorers.sequence_scorer": _SEQUENCES,
    "trainer.scorers.token_scorer": _TOKENS,
}
FROM_CONFIGS = {f"{target}_from_config": kind for target, kind in PRETRAINED.items()}
LOAD_ERRORS = (OSError, ValueError, ImportError, KeyError, SafetensorError, UnpicklingError, StrictDataclassError)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class BuildKeys(TypedDict, total=False):
    """Keys of every build of a transformers model; `build_from_config` has their defaults."""

    attn_implementation: str | None
    gradient_checkpointing: bool


class LoadKeys(BuildKeys, total=False):
    """Those of builds that read weights; `load_reported` has their defaults."""

    trust_remote_code: bool


def causal_lm(
    name: str, *, dtype: torch.dtype, quantization: str | None = None, **keys: Unpack[LoadKeys]
) -> PreTrainedModel:
    """Returns a pretrained language model.

    Args:
        name: A hub name, a folder, a .gguf file, or `embedded:<asset>`.
        quantization: "int8" or "nf4" for a frozen model whose linear layers shall take 8 or 4 bits a weight.
    """
    return load_pretrained(AutoModelForCausalLM, name, dtype=dtype, quantization=quantization, **keys)


def causal_lm_from_config(
    config: str | Mapping[str, Any], *, dtype: torch.dtype, **keys: Unpack[BuildKeys]
) -> PreTrainedModel:
    """Returns a language model with random start weights.

    Args:
        config: A folder or hub name whose config is taken, or a mapping with `model_type`.
    """
    return build_from_config(AutoModelForCausalLM, config, dtype=dtype, **keys)


def load_pretrained(
    kind: type[_BaseAutoModelClass],
    name: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    **keys: Unpack[LoadKeys],
) -> PreTrainedModel:
    """Returns the model of a name that one of transformers' Auto classes makes, from disk where it is there."""
    model, loading = load_reported(kind, name, dtype=dtype, quantization=quantization, **keys)
    tell_loading(name, loading)
    if quantization is not None:
        settle_layout(name, model)
    return model


def load_reported(
    kind: type[_BaseAutoModelClass],
    name: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = "sdpa",
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
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
            model, loading = _load(source, load)
    except LOAD_ERRORS as error:
        raise ConfigError(f"build.name={name}: {_why_not_loaded(source, error)}") from error
    return _set_checkpointing(model, gradient_checkpointing), loading


def build_from_config(
    kind: type[_BaseAutoModelClass],
    config: str | Mapping[str, Any],
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = "sdpa",
    gradient_checkpointing: bool = False,
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
    return _set_checkpointing(model, gradient_checkpointing)


def tokenizer_name(build: Mapping[str, Any]) -> str | None:
    """Returns the folder or hub name of the tokenizer that belongs to a build node, if one does."""
    target, source = build.get("_target_"), None
    if target in PRETRAINED:
        source = _local_source(build["name"])
    elif target in FROM_CONFIGS and isinstance(build["config"], str):
        source = _local_source(build["config"])
    if source is None or not Path(source).is_dir():
        return source
    return source if any((Path(source) / file).exists() for file in _TOKENIZER_FILES) else None


def empty_model(build: Mapping[str, Any]) -> nn.Module | None:
    """Returns the transformers model of a build node without its weights; None where only building it tells."""
    try:
        return make_empty(build)
    except (*LOAD_ERRORS, RuntimeError):
        return None


def make_empty(build: Mapping[str, Any], *, attention: str | None = None) -> nn.Module | None:
    """Returns the same, None where its config is not at hand; raises what transformers does where it cannot make it.

    Args:
        attention: One that it must be able to use.
    """
    target = str(build.get("_target_"))
    if target not in (*PRETRAINED, *FROM_CONFIGS):
        return None
    remote = bool(build.get("trust_remote_code", False))
    config = _config_at_hand(build.get("name" if target in PRETRAINED else "config"), trust_remote_code=remote)
    if config is None:
        return None
    kind = {**PRETRAINED, **FROM_CONFIGS}[target]
    with _quiet(), torch.device("meta"):
        model: nn.Module = kind.from_config(config, trust_remote_code=remote, attn_implementation=attention)  # type: ignore[no-untyped-call]
    return model


def _config_at_hand(source: Any, *, trust_remote_code: bool) -> PretrainedConfig | None:
    """Returns the config of a name or a mapping; None where files would have to be fetched or converted for it."""
    if isinstance(source, str) and source.startswith(assets.PREFIX):
        source = assets.known_config(source)
    if source is None or str(source).endswith(".gguf"):
        return None
    if isinstance(source, Mapping):
        with _quiet():
            return AutoConfig.for_model(**dict(source))
    place = _local_source(source)
    return _load(place, partial(_auto_config, place, trust_remote_code=trust_remote_code))


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
    except LOAD_ERRORS as error:
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


def _set_checkpointing(model: PreTrainedModel, wanted: bool) -> PreTrainedModel:
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


def find_hub_problem(name: str, *, trust_remote_code: bool) -> str | None:
    """Returns why the hub's model cannot be had, as far as its config tells."""
    try:
        _load(name, partial(_auto_config, name, trust_remote_code=trust_remote_code))
    except LOAD_ERRORS as error:
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
