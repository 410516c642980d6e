"""Whether examples are longer than what a model can tell apart by place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.data import Dataset

from trainer.data.example import Example
from trainer.data.preferences import PreferenceDataset
from trainer.data.sources import TrainingData
from trainer.data.text import TextDataset

if TYPE_CHECKING:
    from trainer.handle import ModelHandle
    from trainer.specs import ModelSpec


log = logging.getLogger(__name__)


def tell_lengths(
    models: Mapping[str, ModelHandle],
    specs: Mapping[str, ModelSpec],
    shared: TrainingData,
    *,
    own_tokens: Sequence[str],
) -> None:
    """Warns of each model that its data are longer than; specs hold the data of its own.

    Args:
        own_tokens: Those that read other token ids than the data's.
    """
    for name, model in models.items():
        problem = find_length_problem(name, model.module, specs[name].data or shared)
        if problem is not None and name not in own_tokens:
            log.warning("%s", problem)


def find_length_problem(name: str, module: nn.Module, data: TrainingData) -> str | None:
    """Returns that some of the trainer's own examples have more tokens than a model has positions.

    A model with rotary positions goes on all the same, at places that it never learnt.
    """
    config = getattr(module, "config", None)
    known = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    longest = max((_length(one) for part in (data.train, data.validation) for one in _examples(part)), default=0)
    if not isinstance(known, int) or not 0 < known < longest:
        return None
    return (
        f"models.{name} has {known} positions, but the longest example of its data has {longest} tokens: what it says "
        f"beyond {known} is worth little; set data.block_size={known}"
    )


def _examples(dataset: Dataset[object] | None) -> Iterator[Example]:
    if isinstance(dataset, TextDataset):
        yield from dataset.examples
    elif isinstance(dataset, PreferenceDataset):
        for pair in dataset.pairs:
            yield from (pair.chosen, pair.rejected)


def _length(example: Example) -> int:
    return len(example) if example.position_ids is None else int(example.position_ids.max()) + 1
