"""The loss of a micro-batch against textbooks in float64, a document at a time, however documents lie in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tasks.losses import TopTokens
from tasks.terms.objective import LogitsObjective, Signals, compare_relations, compare_states
from tasks.terms.term import RelationsTerm, StatesTerm, parse_terms
from tasks.text.language import MASKS, attention_pairs, next_tokens
from trainer import IGNORED, Batch
from trainer.data.collate import PaddingCollator

NO = IGNORED
PAD, VOCABULARY, HEADS = 0, 13, 2
LAYERS = {"model.layers.0": "model.layers.1", "model.layers.1": "model.layers.3"}
# Of each document the tokens, and which of them have a label.
DOCUMENTS = [
    ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]),
    ([6, 7, 8], [0, 1, 1]),
    ([9, 10, 11, 12], [0, 1, 0, 0]),  # ends in tokens without a label, as a chat template does
    ([2, 4, 6], [0, 0, 0]),
    ([3, 3, 5, PAD], [0, 0, 1, 1]),  # holds a token that is also the padding
]
LAYOUTS = {
    "padded": ([[0], [1], [2], [3], [4]], "right"),
    "left padded": ([[0], [1], [2], [3], [4]], "left"),
    "packed": ([[1, 0, 2], [3], [4, 3]], "right"),
    "packed, left padded": ([[1, 0, 2], [3], [4, 3]], "left"),
}


def make_batch(layout: str) -> tuple[Batch, list[tuple[int, int, int]]]:
    """Returns a batch, and of each document its row, its first column and its number, in the order of the batch."""
    rows, side = LAYOUTS[layout]
    items, places = [], []
    width = max(sum(len(DOCUMENTS[number][0]) for number in row) for row in rows)
    for index, row in enumerate(rows):
        tokens = [torch.tensor(DOCUMENTS[number][0]) for number in row]
        flags = [torch.tensor(DOCUMENTS[number][1]) for number in row]
        labels = [torch.where(flag == 1, token, NO) for token, flag in zip(tokens, flags, strict=True)]
        item = {"input_ids": torch.cat(tokens), "labels": torch.cat(labels)}
        if "packed" in layout:
            item["position_ids"] = torch.cat([torch.arange(len(token)) for token in tokens])
        items.append(item)
        start = width - len(item["labels"]) if side == "left" else 0
        for number, token in zip(row, tokens, strict=True):
            places.append((index, start, number))
            start += len(token)
    return PaddingCollator(PAD, padding_side=side)(items), places


def counted_places(places: list[tuple[int, int, int]], mask: str) -> Iterator[tuple[int, int, int]]:
    """Returns row, first column of the document and column of each position that a mask counts, by its meaning."""
    for row, start, number in places:
        for offset, has_label in enumerate(DOCUMENTS[number][1][1:]):  # the next token's
            if mask == "all" or (mask == "completion") == bool(has_label):
                yield row, start, start + offset


def make_states(batch: Batch, *, width: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*batch["input_ids"].shape, width, generator=generator).requires_grad_() for _ in LAYERS]


def mse(student: Tensor, teacher: Tensor) -> Tensor:
    return ((student - teacher) ** 2).mean()


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    return 1 - (student @ teacher) / (student.norm() * teacher.norm())


def relation(states: Tensor, row: int, start: int, column: int, head: int) -> Tensor:
    """Returns how much a position relates to those of its document, up to itself, in log-probabilities."""
    size = states.shape[-1] // HEADS
    part = states[row, start : column + 1, head * size : (head + 1) * size]
    return (part @ part[-1] / size**0.5).log_softmax(0)


def relations_kl(student: Tensor, teacher: Tensor, place: tuple[int, int, int]) -> Tensor:
    values = []
    for head in range(HEADS):
        p, q = relation(teacher, *place, head), relation(student, *place, head)
        values.append((p.exp() * (p - q)).sum())
    return torch.stack(values).mean()


def check_against(ours: Tensor, expected: Tensor, student: list[Tensor]) -> None:
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    rows = torch.linspace(0.5, 1.5, len(ours))  # no two positions weigh alike
    mine = torch.autograd.grad((ours * rows).sum(), student)
    theirs = torch.autograd.grad((expected * rows).sum(), student)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_count_real_positions_of_a_document_once(layout: str) -> None:
    batch, places = make_batch(layout)

    masks = {name: mask(batch) for name, mask in MASKS.items()}

    for name, mask in masks.items():
        expected = [[row, column] for row, _, column in counted_places(places, name)]
        assert mask.nonzero().tolist() == expected, name
    assert torch.equal(masks["completion"] | masks["prompt"], masks["all"])
    assert not (masks["completion"] & masks["prompt"]).any()
    documents = [DOCUMENTS[number][0] for *_, number in places]
    assert next_tokens(batch, masks["all"]).tolist() == [token for document in documents for token in document[1:]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_position_attends_to_its_document_up_to_itself(layout: str) -> None:
    batch, places = make_batch(layout)

    pairs = attention_pairs(batch)

    for row, start, number in places:
        for column in range(start, start + len(DOCUMENTS[number][0])):
            assert pairs[row, column].nonzero().flatten().tolist() == list(range(start, column + 1))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("function", "textbook"), [("hidden_mse", mse), ("hidden_cosine", cosine_distance)])
def test_states_are_compared_at_the_positions_that_count(
    layout: str, mask: str, function: str, textbook: Callable[[Tensor, Tensor], Tensor]
) -> None:
    term = parse_terms({function: {"layers": LAYERS, "mask": mask}})[function]
    assert isinstance(term, StatesTerm)
    batch, places = make_batch(layout)
    student, teacher = (make_states(batch, width=6, seed=seed) for seed in (0, 1))

    ours = compare_states(term, student, teacher, MASKS[mask](batch))

    expected = [
        torch.stack(
            [
                textbook(mine.double()[row, column], theirs.detach().double()[row, column])
                for mine, theirs in zip(student, teacher, strict=True)
            ]
        ).mean()
        for row, _, column in counted_places(places, mask)
    ]
    check_against(ours, torch.stack(expected), student)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_relations_are_those_within_a_document(layout: str, mask: str) -> None:
    term = parse_terms({"attention_relations": {"layers": LAYERS, "heads": HEADS, "mask": mask}})["attention_relations"]
    assert isinstance(term, RelationsTerm)
    batch, places = make_batch(layout)
    student, teacher = make_states(batch, width=6, seed=0), make_states(batch, width=8, seed=1)

    ours = compare_relations(term, student, teacher, MASKS[mask](batch), attention_pairs(batch))

    expected = [
        torch.stack(
            [
                relations_kl(mine.double(), theirs.detach().double(), place)
                for mine, theirs in zip(student, teacher, strict=True)
            ]
        ).mean()
        for place in counted_places(places, mask)
    ]
    check_against(ours, torch.stack(expected), student)


TERMS = {
    "forward_kl": {"mask": "completion", "temperature": 2.0},
    "reverse_kl": {"mask": "prompt"},
    "cross_entropy": {"mask": "all"},
}
SCALES = {"forward_kl": 0.5, "reverse_kl": 2.0, "cross_entropy": 0.25}
WEIGHTS = (0.7, 0.3)  # of two teachers


def textbook_sums(student: Tensor, teachers: list[Tensor], labels: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """Returns each term's sum over the positions of its mask, in float64."""
    q, q_warm = student.log_softmax(-1), (student / 2).log_softmax(-1)
    sums = {"forward_kl": 0.0, "reverse_kl": 0.0, "cross_entropy": -q[rows["all"], labels[rows["all"]]].sum()}
    for weight, teacher in zip(WEIGHTS, teachers, strict=True):
        p, p_warm = teacher.log_softmax(-1), (teacher / 2).log_softmax(-1)
        sums["forward_kl"] += weight * 4 * (p_warm.exp() * (p_warm - q_warm)).sum(-1)[rows["completion"]].sum()
        sums["reverse_kl"] += weight * (q.exp() * (q - p)).sum(-1)[rows["prompt"]].sum()
    return torch.stack([sums[name] for name in TERMS])  # type: ignore[arg-type]


def make_objective(signals: Callable[[slice, float], Signals]) -> tuple[LogitsObjective, dict[str, Tensor], Tensor]:
    batch, _ = make_batch("packed")
    masks = {name: mask(batch) for name, mask in MASKS.items()}
    counted = masks["all"]
    rows, labels = {name: mask[counted] for name, mask in masks.items()}, next_tokens(batch, counted)
    objective = LogitsObjective(
        terms=parse_terms(TERMS),  # type: ignore[arg-type]
        scales={name: torch.tensor(scale) for name, scale in SCALES.items()},
        temperatures={"forward_kl": 2.0, "reverse_kl": 1.0, "cross_entropy": 1.0},
        rows=rows,
        labels=labels,
        teacher=signals,
    )
    return objective, rows, labels


def make_logits(count: int, seed: int) -> Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("sizes", [None, [1, 2, 3], [1]], ids=["whole", "tiles", "one by one"])
def test_terms_of_several_masks_are_the_textbooks_in_any_tiles(sizes: list[int] | None) -> None:
    """Tiles of one token lie outside all but one mask."""
    teachers: list[Tensor] = []
    objective, rows, labels = make_objective(
        lambda part, temperature: [(w, t[part]) for w, t in zip(WEIGHTS, teachers, strict=True)]
    )
    count = len(labels)
    teachers += [make_logits(count, seed) for seed in (1, 2)]
    student = make_logits(count, 0).requires_grad_()

    total, sums, start = torch.zeros(()), torch.zeros(len(TERMS)), 0
    for index in range(count):
        if start < count:
            part = slice(start, start + (count if sizes is None else sizes[index % len(sizes)]))
            found = objective(student[part], part)
            total, sums, start = total + found[0], sums + found[1], part.stop

    expected = textbook_sums(student.double(), [teacher.double() for teacher in teachers], labels, rows)
    torch.testing.assert_close(sums.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    loss = (expected * torch.tensor(list(SCALES.values())).double()).sum()
    torch.testing.assert_close(total.double(), loss, rtol=1e-5, atol=1e-5)
    mine, theirs = torch.autograd.grad(total, student)[0], torch.autograd.grad(loss, student)[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_recorded_teacher_is_cut_to_the_mask_as_well() -> None:
    """All its tokens are recorded, so that it is the live teacher."""
    teacher = make_logits(32, 1)
    recorded = TopTokens.from_logits(teacher, k=VOCABULARY, temperatures=(1.0, 2.0))
    live, _, labels = make_objective(lambda part, temperature: [(1.0, teacher[part])])
    cached, _, _ = make_objective(lambda part, temperature: [(1.0, recorded[part])])
    student, part = make_logits(len(labels), 0), slice(2, len(labels))

    torch.testing.assert_close(cached(student[part], part), live(student[part], part), rtol=1e-4, atol=1e-4)


def test_a_teacher_is_asked_once_a_temperature() -> None:
    asked: list[float] = []

    def signals(part: slice, temperature: float) -> Signals:
        asked.append(temperature)
        return [(1.0, make_logits(32, 1)[part])]

    objective, _, labels = make_objective(signals)

    objective(make_logits(len(labels), 0), slice(0, len(labels)))

    assert asked == [2.0, 1.0]


def test_a_function_that_returns_no_loss_per_token_is_refused() -> None:
    objective, _, labels = make_objective(lambda part, temperature: [(1.0, make_logits(32, 1)[part])])
    objective.terms["reverse_kl"].loss = lambda student, teacher, labels, *, temperature: student.sum()

    with pytest.raises(ValueError, match=r"task\.terms\.reverse_kl\.function returned"):
        objective(make_logits(len(labels), 0), slice(0, len(labels)))
