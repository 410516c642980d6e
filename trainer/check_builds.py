"""Says what is wrong with a `build` node of a model, without weights, a download or a conversion."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_kernels_available

from trainer import assets
from trainer.models import FROM_CONFIGS, PRETRAINED, find_hub_problem, make_empty
from trainer.words import did_you_mean, first_line

_KNOWN = {  # what each class makes, and the configs that transformers has for that
    transformers.AutoModelForCausalLM: ("language model", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    transformers.AutoModel: ("model", transformers.MODEL_MAPPING),
    transformers.AutoModelForSequenceClassification: (
        "model with a score per text",
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ),
    transformers.AutoModelForTokenClassification: (
        "model with a score per token",
        transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    ),
}
# What transformers makes a model of nothing from, without a word.
_MOST_LAYERS = 10_000  # to make more takes forever, also without weights
_ROPE = ("rope_parameters", "rope_scaling")
# The last five are of single models.
_ROPE_SETTINGS = {*RopeParameters.__annotations__, "type", "alpha", "long_mscale", "short_mscale", "mrope_interleaved",
                  "llama_4_scaling_beta"}  # fmt: skip
_FOR_GENERATION = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]  # every config takes them, and drops them
_COUNTS = ("num_hidden_layers", "max_position_embeddings", "intermediate_size", "hidden_size", "vocab_size")


def check_build(key: str, build: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with a build node, without weights, a download or a conversion.

    Args:
        key: Where the node stands, such as models.student.build.
    """
    target = build.get("_target_")
    if target not in (*PRETRAINED, *FROM_CONFIGS):
        return []
    word = "name" if target in PRETRAINED else "config"
    place, source = f"{key}.{word}", build.get(word)
    remote = bool(build.get("trust_remote_code", False))
    attention = build.get("attn_implementation")
    if not isinstance(attention, str | None) or (word == "name" and not isinstance(source, str | None)):
        return []  # targets.py names these
    if word == "config" and isinstance(source, Mapping):
        what, known = _KNOWN[FROM_CONFIGS[str(target)]]
        problems = _check_settings(place, source, what=what, known=known)
    else:
        problems = _check_name(place, source, trust_remote_code=remote)
        if word == "name":
            problems = problems or _check_weights(place, str(source))
    problems += _check_attention(f"{key}.attn_implementation", attention)
    return problems or _check_making(key, place, build)


def _check_attention(key: str, name: object) -> list[str]:
    # Paged attention is for a server's cache.
    known = ["eager", *(known for known in ALL_ATTENTION_FUNCTIONS.valid_keys() if not known.startswith("paged|"))]
    if name is None or name in known or "/" in str(name):  # a kernel of the hub's
        return []
    return [f"{key}={name}: transformers has {', '.join(known)}{did_you_mean(str(name), known)}"]


def _check_making(key: str, place: str, build: Mapping[str, Any]) -> list[str]:
    """Returns why transformers cannot make a model of a config that is at hand: it makes one without weights."""
    source, attention = build.get(place.rpartition(".")[2]), build.get("attn_implementation")
    is_folder = isinstance(source, str) and (Path(source).expanduser() / "config.json").is_file()
    # Another's code is for the ranks to run.
    if (is_folder or isinstance(source, Mapping)) and not build.get("trust_remote_code", False):
        shown = f"{place}={source}" if is_folder else place
        if problem := _making_problem(build):
            return [f"{shown}: transformers cannot make this model: {problem}"]
    is_local = isinstance(attention, str) and "/" not in attention and not is_kernels_available()
    if is_local and attention != "sdpa" and (problem := _making_problem(build, attention=attention)):
        return [f"{key}.attn_implementation={attention}: {problem}; every model has eager, nearly all have sdpa"]
    return []


def _making_problem(build: Mapping[str, Any], **options: Any) -> str | None:
    try:
        make_empty(build, **options)
    except Exception as error:  # transformers lets through whatever its parts raise
        if isinstance(error, RuntimeError) and "meta" in str(error).lower():
            return None  # it cannot be made without memory
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        text = lines[-1] if isinstance(error, StrictDataclassError) else lines[0]
        is_told = isinstance(error, (ValueError, ImportError, OSError, RuntimeError, StrictDataclassError))
        return text.rstrip(".") if is_told else f"{type(error).__name__}: {text}"
    return None


def _check_name(key: str, name: object, *, trust_remote_code: bool) -> list[str]:
    """Returns the problem, if any, of a name that should lead to a model."""
    if name is not None and not isinstance(name, str):
        return [f"{key}={name}: must be a folder or hub name, or a mapping with model_type"]
    if name in (None, "", "???"):
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
        problem = find_hub_problem(name, trust_remote_code=trust_remote_code)
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
            return [f"{key}={name}: {file.name} is broken ({first_line(error)}); copy or download it again"]
    if not any(file.suffix in (".safetensors", ".bin", ".json") for file in folder.glob("*model*")):
        return [f"{key}={name}: this folder has no weights, such as the model.safetensors that save_pretrained writes"]
    return []


def _index_problem(index: Path) -> str | None:
    """Returns why an index of weights is not to be followed: transformers would, also out of the folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{index.name} is broken ({first_line(error)}); copy or download it again"
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


def _check_settings(
    key: str, settings: Mapping[str, Any], *, what: str, known: Iterable[type[PretrainedConfig]]
) -> list[str]:
    """Returns the problems of a mapping that describes a model: an unknown type, settings that its type lacks."""
    model_type = settings.get("model_type")
    types = sorted(config.model_type for config in known)
    if model_type not in types:
        nearest = difflib.get_close_matches(str(model_type), types, n=1, cutoff=0.0)[0]
        return [f"{key}.model_type={model_type} is no {what} that transformers knows; nearest: {nearest}"]
    default = AutoConfig.for_model(model_type)
    taken = _settings_of(default)
    problems = []
    for name, value in settings.items():
        if name != "model_type" and name not in taken and not _is_legacy(default, name, value):
            nearest = difflib.get_close_matches(name, sorted(taken), n=1, cutoff=0.0)[0]
            problems.append(f"{key}.{name} is no setting of {model_type}; nearest: {nearest}")
        elif name == "return_dict" and value is not True:
            problems.append(f"{key}.return_dict={value}: must be true, since outputs are read by their names")
        elif name in _ROPE and isinstance(value, Mapping):
            problems += _check_rope(f"{key}.{name}", value)
        elif default.attribute_map.get(name, name) in _COUNTS and isinstance(value, int) and value < 1:
            problems.append(f"{key}.{name}={value}: must be at least 1")
        elif default.attribute_map.get(name, name) == _COUNTS[0] and isinstance(value, int) and value > _MOST_LAYERS:
            problems.append(f"{key}.{name}={value}: must be at most {_MOST_LAYERS}")
    return problems


def _settings_of(default: PretrainedConfig) -> set[str]:
    """Returns the settings of a kind of config; transformers keeps any other one silently, without effect."""
    kind, own = type(default), set(default.to_dict())
    switched = {name for name, part in inspect.getmembers(kind) if isinstance(part, property) and part.fset}
    rope = {*_ROPE, "rope_theta", "partial_rotary_factor"} if "rope_parameters" in own else set()
    names = {*inspect.signature(kind).parameters, *default.attribute_map, *own, *(switched - set(_ROPE)), *rope}
    return {name for name in names if not name.startswith("_")} - {"model_type", "transformers_version"}


def _is_legacy(default: PretrainedConfig, name: str, value: Any) -> bool:
    """Returns whether a config takes a name that it does not list, such as one of an earlier version.

    It uses those up or lets others follow from them, and only keeps what it does not know.
    """
    if hasattr(type(default), name) or name in _FOR_GENERATION:
        return False
    try:
        made = type(default)(**{name: value})
        return name not in vars(made) or {**made.to_dict(), name: None} != {**default.to_dict(), name: None}
    except Exception:  # of a value that it refuses, which making the model says
        return True


def _check_rope(key: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the unknown settings of a rotary embedding, or of one for each kind of layer."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _check_rope(f"{key}.{name}", value)
        elif name not in _ROPE_SETTINGS:
            nearest = difflib.get_close_matches(name, sorted(_ROPE_SETTINGS), n=1, cutoff=0.0)[0]
            yield f"{key}.{name} is no setting of a rotary embedding; nearest: {nearest}"
