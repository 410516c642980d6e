"""Both sides of a batch of pairs as one batch."""

import torch

from tasks.text.preferences import BATCH_FIELDS, both_sides, split_sides
from trainer.data.preferences import PreferenceCollator

LENGTHS = ((3, 5), (4, 2))  # of the chosen and the rejected answer of each pair


def batch_of_pairs() -> dict[str, torch.Tensor]:
    items = []
    for pair, lengths in enumerate(LENGTHS):
        item = {}
        for place, (side, length) in enumerate(zip(("chosen", "rejected"), lengths, strict=True)):
            tokens = torch.arange(length) + 10 * (2 * pair + place + 1)
            item |= {f"{side}_input_ids": tokens, f"{side}_labels": torch.where(tokens % 10 < 1, -100, tokens)}
        items.append(item)
    return PreferenceCollator(pad_token_id=13)(items)


def test_the_chosen_answers_come_first_and_every_row_keeps_its_tokens() -> None:
    batch = batch_of_pairs()
    assert set(BATCH_FIELDS) == set(batch)

    stacked = both_sides(batch)

    starts, lengths = (10, 30, 20, 40), (3, 4, 5, 2)
    assert all(value.shape == (4, 5) for value in stacked.values())
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert stacked["attention_mask"][row].tolist() == [1] * length + [0] * (5 - length)
        assert stacked["input_ids"][row, :length].tolist() == list(range(start, start + length))
        assert stacked["labels"][row].tolist() == [-100, *range(start + 1, start + length), *[-100] * (5 - length)]


def test_values_of_both_sides_come_apart_as_they_were_put_together() -> None:
    chosen, rejected = split_sides(both_sides(batch_of_pairs())["input_ids"][:, 0])

    assert (chosen.tolist(), rejected.tolist()) == ([10, 30], [20, 40])
