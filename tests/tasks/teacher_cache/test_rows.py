"""What a row is known by: its own tokens, and nothing of the batch around it."""

from typing import Any

import torch
from torch import Tensor

from tasks.teacher_cache.rows import describe_examples, describe_rows
from tests.tasks.teacher_cache.cache_runs import make_data
from trainer import IGNORED
from trainer.data import PaddingCollator


def item(*lengths: int, prompt: int = 1, packed: bool = False, first: int = 1) -> dict[str, Tensor]:
    """One example, of several documents where packed, each with a prompt that has no label."""
    tokens = torch.arange(first, first + sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    found = {"input_ids": tokens, "labels": torch.where(positions < prompt, IGNORED, tokens)}
    return found | ({"position_ids": positions} if packed else {})


def digests(batch: dict[str, Any]) -> list[bytes]:
    return list(describe_rows(batch, mask="completion").digests)


def test_padding_and_place_change_nothing() -> None:
    short, long = item(4), item(9)
    alone = digests(PaddingCollator(0)([short]))

    for side in ("left", "right"):
        both = digests(PaddingCollator(0, padding_side=side)([long, short]))  # type: ignore[arg-type]
        assert both[1] == alone[0]
        assert both[0] != both[1]
    assert digests({name: value[None] for name, value in short.items()}) == alone  # without a mask


def test_padding_of_packed_rows_changes_nothing() -> None:
    short, long = item(3, 2, packed=True), item(4, 5, packed=True)
    collate = PaddingCollator(0)

    alone, both = collate([short]), collate([long, short])

    assert digests(both)[1] == digests(alone)[0]
    for mask in ("completion", "all"):
        kept = describe_rows(both, mask=mask).kept[1]
        assert kept.tolist() == [*describe_rows(alone, mask=mask).kept[0].tolist(), False, False, False, False]


def test_whatever_the_teacher_sees_or_the_label_is_changes_the_digest() -> None:
    one = item(3, 3, packed=True)
    others = [
        item(6, packed=True) | {"labels": one["labels"]},  # one document
        item(2, 4, packed=True) | {"labels": one["labels"]},  # cut elsewhere
        item(3, 3, packed=True, first=2),
        one | {"labels": torch.where(torch.arange(6) == 2, IGNORED, one["labels"])},
        one | {"labels": torch.where(torch.arange(6) == 2, 60, one["labels"])},
    ]

    found = [digests(PaddingCollator(0)([example]))[0] for example in [one, *others]]

    assert len(set(found)) == len(found)


def test_examples_are_described_once_each_whatever_the_ranks() -> None:
    sources = {"": make_data()}

    def describe(world_size: int) -> set[tuple[str, int, bytes, int, int]]:
        return {
            (example.part, example.index, example.digest, example.num_kept, example.largest)
            for rank in range(world_size)
            for example in describe_examples(sources, mask="completion", rank=rank, world_size=world_size)
        }

    assert describe(1) == describe(2) == describe(3)
    assert len(describe(1)) == 10 + 6  # of 12 and 7; the others have no label
    train: Any = sources[""].train
    for part, index, *_, largest in describe(1):
        assert part != "train" or largest == train[index]["labels"][1:].max()
