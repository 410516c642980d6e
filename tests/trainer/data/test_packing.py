"""A packed block computes what its documents compute alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from trainer.data import PaddingCollator, build_text_dataset, model_inputs
from trainer.data.example import Example
from trainer.data.packing import chunk, pack


def example(*ids):
    tokens = np.array(ids, dtype=np.int32)
    return Example(input_ids=tokens, labels=tokens.copy())


def documents(*lengths):
    random = np.random.default_rng(0)
    return [example(*random.integers(2, 400, size=length)) for length in lengths]


def as_items(examples):
    names = ("input_ids", "labels", "position_ids")
    arrays = [{name: getattr(block, name) for name in names} for block in examples]
    return [
        {name: torch.from_numpy(array).long() for name, array in block.items() if array is not None} for block in arrays
    ]


def test_blocks_hold_every_example_whole_and_once():
    examples = documents(7, 3, 5, 2, 4, 6, 3)

    blocks = pack(examples, 10)

    found = [
        part for block in blocks for part in np.split(block.input_ids, np.flatnonzero(block.position_ids == 0)[1:])
    ]
    assert len(blocks) == 3
    assert all(len(block) == 10 for block in blocks)
    assert sorted(map(list, found)) == sorted(list(each.input_ids) for each in examples)


def test_positions_restart_and_the_first_token_of_a_document_is_not_predicted():
    (block,) = pack([example(5, 6, 7), example(8, 9)], 8)

    assert block.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert block.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert block.labels.tolist() == [-100, 6, 7, -100, 9]


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11, 19, 20, 21, 50])
def test_chunks_predict_every_token_but_the_first_exactly_once(length):
    text = example(*range(length))

    (blocks,) = [pack(chunk(text, 10), 10)]

    predicted = np.concatenate([block.labels[1:][block.labels[1:] != -100] for block in blocks])
    assert all(len(block) <= 10 for block in blocks)
    assert sorted(predicted) == list(range(1, length))


def test_long_text_fills_blocks_and_long_chats_are_cut(tokenizer):
    rows = [{"text": "word " * 200}]
    chats = [{"prompt": "Hi", "completion": "word " * 200}, {"prompt": "Hi", "completion": "there"}]

    text = build_text_dataset(rows, tokenizer, block_size=64, packing=True)
    chat = build_text_dataset(chats, tokenizer, block_size=64, packing=True)

    assert len(text) > 5
    assert sum(block.num_counted for block in text.examples) == sum(
        block.num_counted for block in build_text_dataset(rows, tokenizer, block_size=9999, packing=False).examples
    )
    assert max(len(block) for block in chat.examples) == 64
    assert len(chat) == 2
    assert chat.prompts == ["Hi", "Hi"]


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_packed_documents_have_the_logits_that_they_have_alone(model, padding_side):
    # Two rows of different shape and length, so that there are borders, pads and a batch.
    rows = [documents(5, 7, 1, 9), documents(8, 4)]
    blocks = [pack(row, 64)[0] for row in rows]
    batch = PaddingCollator(1, padding_side=padding_side)(as_items(blocks))

    with torch.no_grad():
        logits = model(**model_inputs(batch)).logits

    assert len(batch["input_ids"]) == 2
    assert "attention_mask" not in batch
    for block, row in zip(blocks, logits, strict=True):
        offset = len(row) - len(block) if padding_side == "left" else 0
        starts = [*np.flatnonzero(block.position_ids == 0), len(block)]
        for start, stop in pairwise(starts):
            alone = torch.from_numpy(block.input_ids[start:stop]).long()
            with torch.no_grad():
                expected = model(input_ids=alone[None], use_cache=False).logits[0]
            torch.testing.assert_close(row[offset + start : offset + stop], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"position_ids": None},  # plain packing
        {"attention_mask": "ones"},  # a mask of ones switches the borders off
        {"use_cache": True},  # so does a cache
    ],
)
def test_what_the_packed_test_sees_when_documents_are_not_kept_apart(model, change):
    (block,) = pack(documents(5, 7), 64)
    batch = PaddingCollator(1)(as_items([block]))
    inputs = model_inputs(batch) | change
    if "attention_mask" in change:
        inputs["attention_mask"] = torch.ones_like(batch["input_ids"])

    with torch.no_grad():
        right, wrong = model(**model_inputs(batch)).logits[0], model(**inputs).logits[0]

    torch.testing.assert_close(wrong[:7], right[:7], atol=1e-5, rtol=0)  # the first document sees nothing else
    assert (wrong[7:] - right[7:]).abs().max() > 0.01
