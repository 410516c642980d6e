"""The terms of a distillation loss, as configuration: a function, where it taps, which positions count, how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.losses import TokenLoss, accepts_top_tokens, find_function
from tasks.terms.reading import ONE, RELATIONS, STATE_LOSSES, Reading, StateLoss, read_terms
from tasks.terms.schedule import Schedule
from tasks.text.language import MASKS
from trainer import ConfigError

_COMMON = ("function", "weight", "mask")
_OF_LOGITS = (*_COMMON, "temperature")  # and what the function itself takes
_OF_STATES = (*_COMMON, "layers", "projection")
_OF_RELATIONS = (*_COMMON, "layers", "heads")
_LAYER = "model.layers.-1"  # where to look, in messages


@dataclass(kw_only=True)
class Term:
    """One part of the loss: weight * the mean of its values over the tokens of the global batch that `mask` counts."""

    weight: Schedule = ONE
    mask: str = "completion"


@dataclass(kw_only=True)
class LogitsTerm(Term):
    """Compares what student and teacher predict.

    Args:
        loss: One loss per token, of logits at the term's temperature.
        function: Its name.
        reads_teacher: Whether the loss depends on the teacher at all.
        takes_top_tokens: Whether a teacher's most likely tokens will do.
        top_k: How many of them it reads; None: all that there are.
    """

    loss: TokenLoss
    function: str
    temperature: Schedule = ONE
    reads_teacher: bool = True
    takes_top_tokens: bool = True
    top_k: int | None = None


@dataclass(kw_only=True)
class StatesTerm(Term):
    """Compares hidden states, averaged over pairs of layers.

    Args:
        layers: The student's module paths to the teacher's.
        loss: One loss per token, of states (N, D).
        projection: The model that maps the student's states to the teacher's width; None: the widths are equal.
    """

    layers: Mapping[str, str]
    loss: StateLoss
    projection: str | None = None


@dataclass(kw_only=True)
class RelationsTerm(Term):
    """Compares which positions attend to which, by queries, keys or values, averaged over pairs of layers.

    Args:
        layers: The student's module paths to the teacher's.
        heads: Into how many the states are cut, of both models alike.
    """

    layers: Mapping[str, str]
    heads: int = 1


AnyTerm = LogitsTerm | StatesTerm | RelationsTerm


def parse_terms(terms: Mapping[str, Mapping[str, Any]]) -> dict[str, AnyTerm]:
    """Returns the terms that count, or raises one ConfigError with everything that is wrong in them."""
    return read_terms(terms, _read)


def _read(reading: Reading) -> AnyTerm | None:
    weight, mask = reading.weight(), reading.choice("mask", "completion", MASKS)
    if reading.function in tuple(STATE_LOSSES):  # compared one by one: what a user gives may have no hash
        term: AnyTerm | None = _read_states(reading)
    elif reading.function == RELATIONS:
        term = _read_relations(reading)
    else:
        term = _read_logits(reading)
    return None if term is None else dataclasses.replace(term, weight=weight, mask=mask)


def _read_logits(reading: Reading) -> LogitsTerm | None:
    function = reading.function
    options = {name: value for name, value in reading.given.items() if name not in _OF_LOGITS}
    temperature = reading.temperature(1.0)
    if function == "cross_entropy" and temperature != ONE:
        reading.refuse("temperature", "cross_entropy has none; leave it at 1")
    try:
        loss = find_function(function, options, beside=_OF_LOGITS)
    except ConfigError as error:
        reading.problems += [f"{reading.key}: {problem}" for problem in error.problems]
        return None
    return LogitsTerm(
        loss=loss,
        function=str(function),
        temperature=temperature,
        reads_teacher=function != "cross_entropy",
        takes_top_tokens=accepts_top_tokens(function),
        top_k=options.get("top_k"),
    )


def _read_states(reading: Reading) -> StatesTerm:
    reading.allow(_OF_STATES)
    projection = reading.given.get("projection")
    if projection is not None and not isinstance(projection, str):
        reading.refuse("projection", "it must be the name of a trained model, such as projection")
    loss = STATE_LOSSES[reading.function]
    return StatesTerm(layers=reading.layers(example=_LAYER), loss=loss, projection=projection)


def _read_relations(reading: Reading) -> RelationsTerm:
    reading.allow(_OF_RELATIONS)
    return RelationsTerm(layers=reading.layers(example=_LAYER), heads=reading.heads())
