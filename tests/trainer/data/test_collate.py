"""Padding changes shapes and nothing that a model computes."""

import pytest
import torch

from trainer.data import PaddingCollator, model_inputs
from trainer.data.loader import TrainLoader


def items(*rows):
    return [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]


def test_pads_to_the_longest_on_the_right():
    batch = PaddingCollator(1)(items([5, 6, 1], [7]))

    assert batch["input_ids"].tolist() == [[5, 6, 1], [7, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, 1], [7, -100, -100]], "an end token that is also the pad stays a label"
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "position_ids" not in batch


def test_pads_on_the_left_with_positions_that_skip_the_pads():
    batch = PaddingCollator(1, padding_side="left")(items([5, 6, 1], [7]))

    assert batch["input_ids"].tolist() == [[5, 6, 1], [1, 1, 7]]
    assert batch["labels"].tolist() == [[5, 6, 1], [-100, -100, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_packed_items_keep_their_positions_and_get_no_mask():
    packed = [item | {"position_ids": torch.arange(len(item["labels"]))} for item in items([5, 6, 7], [8])]

    batch = PaddingCollator(1)(packed)

    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 1]]
    assert set(batch) == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_padded_rows_have_the_logits_that_they_have_alone(model, padding_side):
    rows = [[5, 6, 7, 8, 9, 1], [10, 11], [12, 13, 14]]
    batch = PaddingCollator(1, padding_side=padding_side)(items(*rows))

    with torch.no_grad():
        logits = model(**model_inputs(batch)).logits
        alone = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]

    for row, mask, expected in zip(logits, batch["attention_mask"], alone, strict=True):
        torch.testing.assert_close(row[mask == 1], expected, atol=1e-5, rtol=0)


def test_left_padding_without_a_mask_would_be_seen(model):
    batch = PaddingCollator(1, padding_side="left")(items([5, 6, 7, 8], [10, 11]))

    with torch.no_grad():
        right = model(**model_inputs(batch)).logits[1, -1]
        wrong = model(input_ids=batch["input_ids"], use_cache=False).logits[1, -1]

    assert (wrong - right).abs().max() > 0.01


def test_any_dataset_of_dicts_works_with_the_collate_function_of_torch():
    dataset = [{"pixels": torch.full((2, 2), float(index)), "label": index} for index in range(3)]
    loader = TrainLoader(
        dataset,
        collate=torch.utils.data.default_collate,
        batch_size=3,
        accumulation=1,
        rank=0,
        world_size=1,
        seed=0,
    )

    _, _, (micro,) = next(loader.windows())

    assert micro.batch["pixels"].shape == (3, 2, 2)
    assert sorted(micro.batch["label"].tolist()) == [0, 1, 2]
