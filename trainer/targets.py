"""Holds every `_target_` of a configuration against what it names: does it exist, and does it take these keys."""

import importlib
import inspect
import pkgutil
import re
import traceback
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.words import did_you_mean

_RESERVED = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")
# What build.py gives when it makes the object; the configuration need not.
_GIVEN = (
    (re.compile(r"models\.[^.]+\.build"), "dtype"),
    (re.compile(r"models\.[^.]+\.optimizer"), "params"),
    (re.compile(r"models\.[^.]+\.optimizer"), "model_params"),  # DeepSpeed's word for it
    (re.compile(r"models\.[^.]+\.scheduler"), "optimizer"),
)
_SIMPLE = {int, float, bool, str, type(None)}
_MADE_WHOLE = re.compile(r"task|(callbacks|logger)\.[^.]+|models\.[^.]+\.(build|optimizer|scheduler)")
_CONVERSIONS = ("none", "partial", "object", "all")


class TargetError(Exception):
    """A dotted name that leads nowhere; the text says why and what is near."""


def target_problems(config: Mapping[str, Any]) -> list[str]:
    """Returns the problems of every node with `_target_`, however deep, and of nodes that should have one."""
    problems = [problem for key, node in _nodes(config) for problem in _check_node(key, node)]
    return problems + list(_nameless(config))


def find_target(name: str) -> Any:
    """Returns the object of a dotted name; raises TargetError, with what is near, where there is none."""
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise TargetError("not a dotted name, such as torch.optim.AdamW")
    found: Any = _import(parts[0], whole=name)
    for index, part in enumerate(parts[1:], start=1):
        place = ".".join(parts[:index])
        if inspect.ismodule(found) and not _has(found, part):
            if part not in _submodules(found):
                known = [*_submodules(found), *(word for word in dir(found) if not word.startswith("_"))]
                raise TargetError(f"{place} has no {part}{did_you_mean(part, known)}")
            found = _import(f"{place}.{part}", whole=name)
        elif _has(found, part):
            found = getattr(found, part)
        else:
            raise TargetError(f"{place} has no {part}{did_you_mean(part, dir(found))}")
    return found


def _has(owner: Any, name: str) -> bool:
    try:
        getattr(owner, name)
    except AttributeError:
        return False
    return True


def _import(name: str, *, whole: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise TargetError(f"importing {name} failed: {error}") from error
        near = did_you_mean(name, ("torch", "deepspeed", "trainer", "tasks", "transformers"))
        raise TargetError(
            f"there is no package {name}{near or '; run from the folder that holds it, or install it'}"
        ) from error
    # A user's module may raise anything while it is imported; all of it means that the target is not there.
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {name} {how_raised(error)}") from error


def how_raised(error: BaseException) -> str:
    """Returns what was raised and in which line, for code that is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"raised {type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    not_theirs = ("<", str(Path(__file__).parent))
    theirs = [one for one in frames if not one.filename.startswith(not_theirs) and "site-packages" not in one.filename]
    place = "".join(f" ({one.filename}:{one.lineno})" for one in (theirs or frames)[-1:])
    return f"raised {type(error).__name__}: {error}{place}"


def _submodules(module: types.ModuleType) -> list[str]:
    return [info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))]


def _nodes(value: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
        for name, child in value.items():
            yield from _nodes(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _nodes(child, f"{key}.{index}")


def _check_node(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    name = node["_target_"]
    if name == "???":
        return
    try:
        target = find_target(str(name))
    except TargetError as error:
        yield f"{key}._target_={name}: {error}"
        return
    yield from _check_words(key, node)
    if not callable(target):
        yield f"{key}._target_={name}: not a class or function"
        return
    hints = _hints(target)
    try:
        parameters = _parameters(target, hints)
    except ValueError:
        return  # some built-in callables do not tell what they take
    yield from _check_keys(key, node, name, parameters)
    yield from _check_types(key, node, hints, parameters)


def _check_words(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the words that are Hydra's, and not the target's."""
    for word in ("_partial_", "_recursive_"):
        if not isinstance(node.get(word, False), bool):
            yield f"{key}.{word}={node[word]}: must be true or false"
    if str(node.get("_convert_", "all")) not in _CONVERSIONS:
        yield f"{key}._convert_={node['_convert_']}: must be one of {', '.join(_CONVERSIONS)}"
    if not isinstance(node.get("_args_", []), list):
        yield f"{key}._args_={node['_args_']}: must be a list"
    elif node.get("_args_") and key.startswith("models.") and _MADE_WHOLE.fullmatch(key):
        yield f"{key}._args_={node['_args_']}: the trainer gives arguments of its own; give these by their names"
    if node.get("_partial_") is True and _MADE_WHOLE.fullmatch(key):
        yield f"{key}._partial_=true: the trainer itself says when this is called; drop it"


def _parameters(target: Any, hints: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a target; where a TypedDict says which keywords it takes (PEP 692), each of these."""
    found: dict[str, inspect.Parameter] = {}
    for word, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hints.get(word)) is typing.Unpack:
            (keywords,) = typing.get_args(hints[word])
            for key, hint in typing.get_type_hints(keywords, include_extras=True).items():
                default = parameter.empty if _is_required(key, hint, keywords) else None
                found[key] = inspect.Parameter(key, parameter.KEYWORD_ONLY, default=default)
        else:
            found[word] = parameter
    return found


def _is_required(key: str, hint: Any, keywords: Any) -> bool:
    # Of annotations that are texts, __required_keys__ knows only the class's `total`.
    if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
        return typing.get_origin(hint) is typing.Required
    return key in keywords.__required_keys__


def _check_keys(
    key: str, node: Mapping[str, Any], name: str, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    kinds = {parameter.kind for parameter in parameters.values()}
    given_later = {word for pattern, word in _GIVEN if pattern.fullmatch(key)}
    takes = [
        word
        for word, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and word not in given_later
    ]
    for word in node:
        if word in _RESERVED or word in takes:
            continue
        if word in given_later:
            yield f"{key}.{word}: the trainer gives this one itself; drop it"
        elif inspect.Parameter.VAR_KEYWORD not in kinds:
            hint = did_you_mean(word, takes) or (f"; it takes {', '.join(takes)}" if takes else "; it takes none")
            yield f"{key}.{word}: {name} has no such parameter{hint}"
    if not node.get("_partial_") and not node.get("_args_"):
        for word in takes:
            if parameters[word].default is inspect.Parameter.empty and word not in node:
                yield f"{key}.{word} is missing: {name} needs it"


def _check_types(
    key: str, node: Mapping[str, Any], hints: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    """Plain values only: whatever else a parameter takes, its own code says best."""
    for word, value in node.items():
        hint = hints.get(word)
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = {_plain_name(kind) for kind in (typing.get_args(hint) if is_union else (hint,))}
        if word not in parameters or hint is None or not kinds <= {*_SIMPLE, "Tensor"} or value in ("auto", "???"):
            continue
        numbers = [kind for kind in (int, float) if kind in kinds]
        is_text, is_switch = isinstance(value, str), isinstance(value, bool)
        is_other = isinstance(value, list | dict) or (value is None and type(None) not in kinds)
        is_no_text = not numbers and bool not in kinds and value is not None and not is_text
        is_no_switch = not numbers and bool in kinds and value is not None and not is_switch  # 0.5 would count as true
        if is_text and str in kinds:
            continue
        if is_text or is_other or is_no_text or is_no_switch or (is_switch and bool not in kinds):
            words = {"a number": numbers, "true or false": bool in kinds and not numbers, "a text": str in kinds}
            yield f"{key}.{word}={value}: must be {' or '.join(text for text, fits in words.items() if fits)}"
        elif isinstance(value, float) and numbers == [int] and not value.is_integer():
            yield f"{key}.{word}={value}: must be a whole number"


def _hints(target: Any) -> dict[str, Any]:
    function = target if inspect.isroutine(target) else type(target).__call__
    function = target.__init__ if inspect.isclass(target) else function
    try:
        hints = typing.get_type_hints(function)
        listed = [typing.get_args(hint)[0] for hint in hints.values() if typing.get_origin(hint) is typing.Unpack]
        return {**hints, **{word: hint for one in listed for word, hint in typing.get_type_hints(one).items()}}
    # Annotations may name what exists for type checkers only; then there is nothing to hold a value against.
    except (NameError, TypeError, AttributeError):
        return {}


def _plain_name(kind: Any) -> Any:
    return "Tensor" if getattr(kind, "__name__", "") == "Tensor" else kind


def _nameless(config: Mapping[str, Any]) -> Iterator[str]:
    """Every callback, logger, task and build is an object, so each needs a `_target_`."""
    for group in ("callbacks", "logger"):
        nodes = config.get(group) or {}
        named = [name for name, node in nodes.items() if isinstance(node, Mapping) and "_target_" in node]
        for name in nodes:
            if name not in named and nodes[name] is not None:
                yield f"{group}.{name} has no _target_{did_you_mean(name, named)}"
    if isinstance(config.get("task"), Mapping) and "_target_" not in config["task"]:
        yield "task._target_ is missing; name the task's class, such as tasks.distill.DistillTask"
    models = config.get("models") or {}
    for name, model in models.items():
        if not (model.get("build") or {}).get("_target_"):
            others = [other for other in models if other != name and (models[other].get("build") or {}).get("_target_")]
            yield (
                f"models.{name}.build._target_ is missing; choose one: model@models.{name}.build=causal_lm"
                f"{did_you_mean(name, others)}"
            )
        for part in ("optimizer", "scheduler"):
            if model.get(part) and "_target_" not in model[part]:
                yield f"models.{name}.{part} has no _target_; choose one: {part}@models.{name}.{part}=..."
