"""Held-out numbers against their textbook formulas in float64, however the tokens are cut into parts."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.losses import TopTokens
from tasks.teaching.quality import BINS, Quality, completion_lengths, derive_quality, find_edge_problems

NUM_TOKENS, VOCABULARY = 400, 11


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Student and teacher logits of very different confidence, and labels that the teacher often gets right."""
    random = torch.Generator().manual_seed(0)
    scale = 6 * torch.rand(NUM_TOKENS, 1, generator=random)
    teacher = scale * torch.randn(NUM_TOKENS, VOCABULARY, generator=random)
    student = teacher * torch.rand(NUM_TOKENS, 1, generator=random) + torch.randn(teacher.shape, generator=random)
    labels = torch.distributions.Categorical(logits=teacher).probs.multinomial(1, generator=random).squeeze(1)
    return student, teacher, labels


def no_groups(count: int) -> Tensor:
    return torch.empty(count, 0, dtype=torch.long)


def means(quality: Quality, sums: Tensor) -> dict[str, float]:
    """Returns what the trainer makes of the sums of all micro-batches: means, without those of no item."""
    found = {}
    for name, metric in quality.metrics(sums).items():
        assert isinstance(metric, tuple)
        if float(metric[1]):
            found[name] = float(metric[0]) / float(metric[1])
    return found


def reference_ece(logits: Tensor, labels: Tensor) -> float:
    """Returns sum over bins of |bin| / N * |accuracy - confidence|, as Guo et al. write it, in float64."""
    probabilities = np.exp(logits.double().numpy())
    probabilities /= probabilities.sum(1, keepdims=True)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels.numpy()
    error = 0.0
    for index in range(BINS):
        inside = (confidence > index / BINS) & (confidence <= (index + 1) / BINS)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def log_softmax(logits: Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), -1).numpy()


def test_numbers_are_those_of_the_formulas(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, teacher, labels = tokens
    quality = Quality(edges=())

    found = means(quality, quality.sums(student, teacher, labels, no_groups(NUM_TOKENS)))

    log_q, log_p = log_softmax(student), log_softmax(teacher)
    rows = np.arange(NUM_TOKENS)
    expected = {
        "cross_entropy": -log_q[rows, labels].mean(),
        "forward_kl": (np.exp(log_p) * (log_p - log_q)).sum(1).mean(),
        "reverse_kl": (np.exp(log_q) * (log_q - log_p)).sum(1).mean(),
        "top1_agreement": (log_q.argmax(1) == log_p.argmax(1)).mean(),
        "reference/cross_entropy": -log_p[rows, labels].mean(),
        "reference/forward_kl": 0.0,
        "reference/reverse_kl": 0.0,
        "reference/top1_agreement": 1.0,
    }
    shown = {name: value for name, value in found.items() if not name.rpartition("/")[2].startswith("_")}
    assert shown == pytest.approx(expected, rel=1e-5)
    assert 0.1 < expected["top1_agreement"] < 0.9


def test_calibration_error_is_that_of_the_formula_for_both_models(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, teacher, labels = tokens
    quality = Quality(edges=())

    found = means(quality, quality.sums(student, teacher, labels, no_groups(NUM_TOKENS)))
    of_teacher = {name.removeprefix("reference/"): value for name, value in found.items() if "reference/" in name}
    own = {name: value for name, value in found.items() if "reference/" not in name}

    assert derive_quality(own)["ece"] == pytest.approx(reference_ece(student, labels), abs=1e-6)
    assert derive_quality(of_teacher)["ece"] == pytest.approx(reference_ece(teacher, labels), abs=1e-6)
    assert derive_quality(own)["perplexity"] == pytest.approx(math.exp(own["cross_entropy"]))
    assert reference_ece(student, labels) > reference_ece(teacher, labels), "its labels are the teacher's own draws"


def test_confidence_at_the_ends_has_a_bin() -> None:
    certain, even = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    quality = Quality(teacher=None, edges=())

    found = means(quality, quality.sums(torch.cat([certain, even]), None, torch.tensor([1, 0]), no_groups(2)))

    assert found["_gap_14"] == 0.5, "quite sure and wrong, one of two"
    assert found["_gap_07"] == pytest.approx(-0.25), "0.5 sure and right: 7/15 < 0.5 <= 8/15"
    assert derive_quality(found)["ece"] == pytest.approx(0.75)


@pytest.mark.parametrize("sizes", [[400], [1, 399], [0, 150, 250], [100] * 4, [57] * 7 + [1]])
def test_parts_add_up_to_the_whole(tokens: tuple[Tensor, Tensor, Tensor], sizes: list[int]) -> None:
    student, teacher, labels = tokens
    quality = Quality(sources=("a", "b", "c"), edges=(5, 50))
    groups = torch.stack([torch.arange(NUM_TOKENS) % 3, 3 + torch.arange(NUM_TOKENS) % 2], 1)

    whole = quality.sums(student, teacher, labels, groups)
    parts = [
        quality.sums(*part)
        for part in zip(*(each.split(sizes) for each in (student, teacher, labels, groups)), strict=True)
    ]

    assert whole.shape == (quality.num_sums,)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=0, atol=1e-9)


def test_groups_split_the_whole(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, teacher, labels = tokens
    quality = Quality(sources=("code", "chat"), edges=(16,))
    of_chat = torch.arange(NUM_TOKENS) % 4 == 0
    groups = torch.stack([of_chat.long(), torch.full((NUM_TOKENS,), 2)], 1)

    found = means(quality, quality.sums(student, teacher, labels, groups))
    chat = means(
        Quality(edges=()), Quality(edges=()).sums(student[of_chat], teacher[of_chat], labels[of_chat], no_groups(100))
    )

    assert quality.groups == ["by_source/code", "by_source/chat", "by_length/1-16", "by_length/17-up"]
    for name in ("cross_entropy", "forward_kl", "reverse_kl", "top1_agreement"):
        assert found[f"by_source/chat/{name}"] == pytest.approx(chat[name])
        assert found[f"by_length/1-16/{name}"] == pytest.approx(found[name])
        assert f"by_length/17-up/{name}" not in found, "no token is of that group"
    assert found["reference/by_source/chat/cross_entropy"] == pytest.approx(chat["reference/cross_entropy"])
    assert found["reference/by_source/code/forward_kl"] == 0
    own = {name: value for name, value in found.items() if not name.startswith("reference/")}
    assert derive_quality(own).keys() == {"perplexity", "ece"}, "of all tokens only"


def test_names_do_not_depend_on_what_a_batch_holds(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, teacher, labels = tokens
    quality = Quality(sources=("a", "b"))

    empty = quality.sums(student[:0], teacher[:0], labels[:0], torch.empty(0, 2, dtype=torch.long))
    some = quality.sums(student[:1], teacher[:1], labels[:1], torch.tensor([[1, 3]]))

    assert quality.metrics(empty).keys() == quality.metrics(some).keys()
    assert empty.tolist() == [0.0] * quality.num_sums


def test_without_a_teacher_only_the_student_is_measured(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, _, labels = tokens
    quality = Quality(teacher=None, edges=())

    found = means(quality, quality.sums(student, None, labels, no_groups(NUM_TOKENS)))

    assert {name for name in found if "_gap_" not in name} == {"cross_entropy"}
    assert derive_quality(found)["ece"] == pytest.approx(reference_ece(student, labels), abs=1e-6)


def test_a_teacher_of_top_tokens_bounds_the_divergences_from_below(tokens: tuple[Tensor, Tensor, Tensor]) -> None:
    student, teacher, labels = tokens
    log_probs, ids = teacher.log_softmax(-1).topk(VOCABULARY - 3)
    order = torch.randperm(VOCABULARY - 3)  # nothing says that they are sorted
    top = TopTokens(ids=ids[:, order], log_probs=log_probs[:, order], log_normalisers={1.0: torch.zeros(NUM_TOKENS)})
    quality, whole = Quality(teacher=TopTokens, edges=()), Quality(edges=())

    found = means(quality, quality.sums(student, top, labels, no_groups(NUM_TOKENS)))
    exact = means(whole, whole.sums(student, teacher, labels, no_groups(NUM_TOKENS)))

    assert 0 < found["forward_kl"] < exact["forward_kl"]
    assert 0 < found["reverse_kl"] < exact["reverse_kl"]
    for name in ("cross_entropy", "top1_agreement", *(f"reference/_gap_{index:02}" for index in range(BINS))):
        assert found[name] == pytest.approx(exact[name], abs=1e-6)
    assert "reference/cross_entropy" not in found, "it is not known"


# Groups of a batch ---------------------------------------------------------------------------------------------------


def batch_of(rows: list[list[int]], **fields: list[list[int]]) -> dict[str, Any]:
    """Returns a batch of labels, -100 where there is none; 0 is a pad."""
    labels = torch.tensor(rows)
    batch: dict[str, Any] = {"input_ids": labels.abs(), "labels": labels}
    return batch | {name: torch.tensor(values) for name, values in fields.items()}


@pytest.mark.parametrize("side", ["left", "right"])
def test_length_is_that_of_the_labels_of_a_row_without_prompt_and_pads(side: str) -> None:
    prompt, pad = -100, -100
    rows = [[prompt, prompt, 5, 6, 7], [prompt, 8] + [pad] * 3]
    masks = [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    positions = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    if side == "left":
        rows[1], masks[1], positions[1] = [pad] * 3 + [prompt, 8], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]
    batch = batch_of(rows, attention_mask=masks, position_ids=positions)

    lengths = completion_lengths(batch)
    counted = torch.tensor(rows)[:, 1:] != -100

    assert lengths[counted].tolist() == [3, 3, 3, 1]


def test_packed_documents_have_lengths_and_sources_of_their_own() -> None:
    batch = batch_of(
        [[-100, 4, 5, 6, -100, 7, -100, 8, 9]],
        position_ids=[[0, 1, 2, 3, 0, 1, 0, 1, 2]],
        source=[[1, 1, 1, 1, 0, 0, 1, 1, 1]],
    )
    counted = batch["labels"][:, 1:] != -100
    quality = Quality(sources=("a", "b"), edges=(1, 2))

    groups = quality.groups_of(batch, counted)

    named = [[quality.groups[place] for place in row] for row in groups.tolist()]
    assert named == [
        *[["by_source/b", "by_length/3-up"]] * 3,
        ["by_source/a", "by_length/1-1"],
        *[["by_source/b", "by_length/2-2"]] * 2,
    ]


def test_one_source_is_no_group_and_edges_may_be_left_out() -> None:
    batch = batch_of([[-100, 4, 5]])
    counted = batch["labels"][:, 1:] != -100

    assert Quality(sources=("only",), edges=()).groups == []
    assert Quality(sources=("only",), edges=()).groups_of(batch, counted).shape == (2, 0)


@pytest.mark.parametrize(
    "edges", [[0, 4], [4, 4], [8, 4], [4.5], [True], [10**30], [2**31], 16, None, [None], [[1]], {4: 8}]
)
def test_wrong_edges_are_refused_by_key(edges: list[Any]) -> None:
    (problem,) = find_edge_problems("task.length_edges", edges)

    assert problem.startswith(f"task.length_edges={edges}: must be whole numbers")


def test_right_edges_are_taken() -> None:
    assert find_edge_problems("task.length_edges", []) == find_edge_problems("task.length_edges", [16, 64]) == []
