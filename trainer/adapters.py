"""Adds LoRA adapters (peft) to a model, checks their settings, and writes and reads an adapter's folder."""

from __future__ import annotations

import difflib
import json
import sys
import types
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from trainer import distributed
from trainer.config import ConfigError
from trainer.handle import is_sharded
from trainer.seeds import seed_everything

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG_FILE = "adapter_config.json"
_ADAPTER = "default"  # peft's name for the only one
# What says which model an adapter belongs to; it follows from the model itself.
_OWN = ("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version")
_STARTS = (True, False, "gaussian")  # peft's others rewrite the base model's weights, which an adapter does not hold
_SHARDED = "peft reads its weights from outside their modules, where ZeRO-3 has sharded them; choose ZeRO 0, 1 or 2"
_PLAIN = (int, float, bool, str, list, tuple, dict, typing.Literal)


# Settings ------------------------------------------------------------------------------------------------------------


def check_lora(
    key: str, settings: Mapping[str, Any], *, trainable: bool, freeze: Iterable[str], stage: int
) -> list[str]:
    """Returns what is wrong with a model's adapter settings, as far as that shows without the model.

    Args:
        key: Where the model stands, such as models.student.
        stage: That of ZeRO.
    """
    if not settings:
        return []
    problems = list(_unfit(f"{key}.lora", settings))
    for word in ("use_dora", "target_parameters"):
        if stage == 3 and settings.get(word):
            problems.append(f"{key}.lora.{word}: {_SHARDED}")
    if not trainable:
        problems.append(f"{key}.lora is given, but {key} is frozen (trainable: false); drop one of the two")
    if freeze:
        problems.append(
            f"{key}.freeze is given beside {key}.lora, which freezes all weights but the adapters' already; drop "
            f"freeze, and choose what is trained by {key}.lora.target_modules"
        )
    if problems:
        return problems
    try:
        with _quiet():
            _lora_config(settings)
    except (ValueError, TypeError, ImportError) as error:
        problems.append(f"{key}.lora: {_one_line(error)}")
    return problems


def check_fit(key: str, settings: Mapping[str, Any], module: nn.Module, *, stage: int) -> list[str]:
    """Returns why a model cannot take these adapters; the model, which may be on the meta device, is changed.

    Args:
        key: Where the settings stand, such as models.student.lora.
        stage: That of ZeRO.
    """
    problems = list(_unmatched(key, settings, module))
    if not problems:
        try:
            adapted = _adapt(module, settings)
            problems += _unshardable(key, adapted) if stage == 3 else []
        except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError, AttributeError) as error:
            problems.append(f"{key}: {_one_line(error)}")
    return problems


def _lora_config(settings: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(**settings)


def _known() -> dict[str, Any]:
    """Returns peft's settings that are plain values, with their types."""
    from peft import LoraConfig

    hints = typing.get_type_hints(LoraConfig)
    return {
        item.name: hints[item.name]
        for item in fields(LoraConfig)
        if item.init and item.name not in (*_OWN, "inference_mode") and _is_plain(hints[item.name])
    }


def _is_plain(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(kind is type(None) or _is_plain(kind) for kind in typing.get_args(hint))
    return (typing.get_origin(hint) or hint) in _PLAIN


def _unfit(key: str, settings: Mapping[str, Any]) -> Iterator[str]:
    known = _known()
    for word, value in settings.items():
        if word in _OWN:
            yield f"{key}.{word}: the trainer gives this one itself; drop it"
        elif word not in known:
            near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.0)[0]
            yield f"{key}.{word}: peft.LoraConfig has no such setting that is a plain value; nearest: {near}"
        elif word == "init_lora_weights":
            if value not in _STARTS:
                others = "; peft's others change the base model's own weights, which an exported adapter does not hold"
                yield f"{key}.{word}={value}: must be true, false or gaussian{others}"
        elif not _fits(value, known[word]):
            yield f"{key}.{word}={value}: must be {_spelt(known[word])}"
    numbers = {word: value for word, value in settings.items() if type(value) in (int, float)}
    if numbers.get("r", 1) < 1:
        yield f"{key}.r={numbers['r']}: must be at least 1"
    if numbers.get("lora_alpha", 1) <= 0:
        yield f"{key}.lora_alpha={numbers['lora_alpha']}: must be above 0"
    if not 0 <= numbers.get("lora_dropout", 0) < 1:
        yield f"{key}.lora_dropout={numbers['lora_dropout']}: must be at least 0 and below 1"


def _fits(value: Any, hint: Any) -> bool:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # Strict, or "8" would be a number; lists stand for tuples too, which YAML does not have.
    strict = "tuple" not in str(hint)
    try:
        TypeAdapter(hint, config=ConfigDict(strict=strict)).validate_python(value)
    except ValidationError:
        return False
    return True


def _spelt(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_spelt(kind) for kind in typing.get_args(hint))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    words |= {list: "a list", dict: "a mapping"}
    return words.get(typing.get_origin(hint) or hint, str(hint))


def _unmatched(key: str, settings: Mapping[str, Any], module: nn.Module) -> Iterator[str]:
    """Yields the listed modules that the model lacks: peft leaves them out without a word if others are there."""
    names = [name for name, _ in module.named_modules() if name]
    for word in ("target_modules", "modules_to_save"):
        listed = settings.get(word) or ()
        for wanted in listed if not isinstance(listed, str) else ():
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                ends = {name.rpartition(".")[2] for name in names}
                near = difflib.get_close_matches(wanted, ends, n=1, cutoff=0.0)
                yield f"{key}.{word}: the model has no module {wanted}; nearest: {', '.join(near)}"


def _unshardable(key: str, adapted: nn.Module) -> Iterator[str]:
    from peft.tuners.lora import Embedding
    from peft.tuners.lora.layer import MultiheadAttention

    for name, part in adapted.named_modules():
        if isinstance(part, Embedding | MultiheadAttention):
            yield f"{key}: {name.removeprefix('base_model.model.')} is among target_modules, but {_SHARDED}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


# Adding --------------------------------------------------------------------------------------------------------------


def add_lora(name: str, module: nn.Module, *, settings: Mapping[str, Any], seed: int) -> nn.Module:
    """Returns the module with fresh adapters, the only weights that now require a gradient.

    Not within zero.Init, which leaves peft nothing to initialize: the adapters' B would not be zero, without a word.

    Args:
        name: The model's, for the random start and for messages.
    """
    # Building the base leaves another random state on each rank under ZeRO-3, and the adapters would differ.
    seed_everything(seed, name, "lora")
    if problems := list(_unmatched(f"models.{name}.lora", settings, module)):
        raise ConfigError(*problems)
    try:
        adapted = _adapt(module, settings)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"models.{name}.lora: {_one_line(error)}") from error
    sharded = any(is_sharded(parameter) for parameter in module.parameters())
    if problems := list(_unshardable(f"models.{name}.lora", adapted)) if sharded else []:
        raise ConfigError(*problems)
    return adapted


def _adapt(module: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    from peft import get_peft_model
    from peft.helpers import update_forward_signature

    with _quiet():
        # In the base model's data type: peft's float32 is refused by ZeRO-3, and DeepSpeed keeps a float32 copy anyway.
        adapted: nn.Module = get_peft_model(module, _lora_config(settings), autocast_adapter_dtype=False)
        update_forward_signature(adapted)  # or a task would believe that it takes any argument
    return adapted


# Folders -------------------------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> TypeGuard[PeftModel]:
    """Returns whether the module carries adapters."""
    if "peft" not in sys.modules:  # its import takes half a second
        return False
    from peft import PeftModel

    return isinstance(module, PeftModel)


def adapter_state(module: PeftModel) -> dict[str, Tensor]:
    """Returns the adapters' weights on the CPU of rank 0, {} elsewhere; every rank must call it."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from peft import get_peft_model_state_dict

    values = module.state_dict(keep_vars=True)
    # The base model's embedding is not resized, so it is not the adapter's to keep.
    own = {id(value) for value in get_peft_model_state_dict(module, values, save_embedding_layers=False).values()}
    state: dict[str, Tensor] = {}
    for key, value in values.items():
        if id(value) in own:
            with GatheredParameters([value] if isinstance(value, nn.Parameter) and is_sharded(value) else []):
                if distributed.is_main():
                    state[key] = value.detach().to("cpu", copy=True)
    return state


def save_adapter(module: PeftModel, folder: Path, state: dict[str, Tensor]) -> None:
    """Writes an adapter's folder, as peft does; on rank 0 only.

    Args:
        state: From `adapter_state`.
    """
    config = module.peft_config[_ADAPTER]
    if (base := config.base_model_name_or_path) and Path(base).is_dir():
        # A relative path would be looked for in whoever loads it's working folder, then on the hub.
        config.base_model_name_or_path = str(Path(base).resolve())
    with _quiet():
        module.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)


def load_adapter(module: nn.Module, folder: Path) -> nn.Module:
    """Returns the base model with the adapters of a folder, frozen; not within zero.Init."""
    from peft import PeftModel

    with _quiet():
        adapted: nn.Module = PeftModel.from_pretrained(module, str(folder), autocast_adapter_dtype=False)
    return adapted


def check_folder(key: str, name: str, *, trainable: bool) -> list[str]:
    """Returns what is wrong with building a model from an adapter's folder; nothing if the name leads to none.

    transformers loads the base model that the folder names, and the adapter onto it.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").exists() or not (folder / CONFIG_FILE).exists():
        return []
    base, problem = base_name(folder), None
    if base is None:
        problem = "does not say which model it belongs to"
    elif Path(base).is_absolute() and not Path(base).is_dir():
        problem = f"belongs to {base}, which is not there; correct base_model_name_or_path in its {CONFIG_FILE}"
    elif trainable:
        problem = "builds a frozen model only; merge it into its base model (peft's merge_and_unload) and save that"
    return [f"{key}={name}: this folder holds an adapter, which {problem}"] if problem else []


def base_name(folder: Path) -> str | None:
    """Returns which model an adapter's folder belongs to, as far as it says."""
    base: str | None = _read_config(folder)["base_model_name_or_path"]
    return base


def base_class(folder: Path) -> str:
    """Returns the name of that model's class."""
    return str(_read_config(folder)["auto_mapping"]["base_model_class"])


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
