"""Draws: distributed as the filtered softmax, and the same for a row whatever stands beside it."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.generation import GenerationOptions, row_seeds
from tasks.generation.draws import TokenDraws, gumbel

LOGITS = torch.tensor([2.0, 1.5, 0.0, -1.0, 1.4, -3.0, 0.5, -0.5])
NUM_DRAWS = 40_000


def draw(options: GenerationOptions, *, width: int = 3, count: int = NUM_DRAWS) -> Tensor:
    """Returns drawn tokens of rows with the same logits, (count,)."""
    draws = TokenDraws(options, row_seeds(0, 1, range(count)), prompt_width=3)
    return draws(torch.zeros(count, width, dtype=torch.long), LOGITS.repeat(count, 1)).argmax(-1)


def softmax_by_hand(options: GenerationOptions) -> list[float]:
    """The distribution that the options say, in plain Python."""
    weights = {token: math.exp(float(value) / options.temperature) for token, value in enumerate(LOGITS)}
    ordered = sorted(weights, key=lambda token: -weights[token])
    if options.top_k:
        ordered = ordered[: options.top_k]
    total, kept, mass = sum(weights[token] for token in ordered), [], 0.0
    for token in ordered:
        if mass < options.top_p:
            kept.append(token)
        mass += weights[token] / total
    kept = [token for token in kept if weights[token] >= options.min_p * weights[ordered[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(LOGITS))]


@pytest.mark.parametrize(
    "options",
    [
        GenerationOptions(),
        GenerationOptions(temperature=0.5),
        GenerationOptions(temperature=2.0, top_k=5),
        GenerationOptions(top_p=0.8),
        GenerationOptions(min_p=0.2),
        GenerationOptions(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
@pytest.mark.parametrize("width", [3, 20])
def test_frequencies_are_the_softmax_of_what_the_options_leave(options: GenerationOptions, width: int) -> None:
    counts = torch.bincount(draw(options, width=width), minlength=len(LOGITS)).tolist()

    expected = [probability * NUM_DRAWS for probability in softmax_by_hand(options)]
    assert [count for count, mean in zip(counts, expected, strict=True) if mean == 0] == [0] * expected.count(0.0)
    terms = [(count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True) if mean > 0]
    freedom = len(terms) - 1
    # Chi-square lies within four standard deviations of its mean, unless it is another distribution.
    assert sum(terms) < freedom + 4 * math.sqrt(2 * freedom)


def test_places_and_rows_are_independent() -> None:
    first, second = (draw(GenerationOptions(), width=width) for width in (3, 4))

    for left, right in ((first, second), (first[1:], first[:-1])):
        together = torch.bincount(left * len(LOGITS) + right, minlength=len(LOGITS) ** 2)
        expected = (LOGITS.softmax(-1)[:, None] * LOGITS.softmax(-1)).flatten() * len(left)
        terms = ((together - expected).pow(2) / expected)[expected > 5]
        assert terms.sum().item() < len(terms) - 1 + 4 * math.sqrt(2 * len(terms))


def test_a_row_does_not_depend_on_its_neighbours_the_padding_or_torchs_random_state() -> None:
    options, seeds = GenerationOptions(), row_seeds(3, 7, [4, 9], samples=2)
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    together = TokenDraws(options, seeds, prompt_width=5)(torch.zeros(4, 8, dtype=torch.long), scores)

    torch.manual_seed(123)
    for row, seed in enumerate(seeds):
        ids = torch.zeros(1, 3 + 2, dtype=torch.long)  # less padding on the left; the third token of the answer
        alone = TokenDraws(options, [seed], prompt_width=2)(ids, scores[row : row + 1])
        assert torch.equal(alone[0], together[row])
    state = torch.get_rng_state()
    TokenDraws(options, seeds, prompt_width=0)(torch.zeros(4, 1, dtype=torch.long), scores)
    assert torch.equal(state, torch.get_rng_state())


def test_seeds_differ_by_seed_step_example_and_sample() -> None:
    seeds = [seed for run in (0, 1) for step in (0, 1) for seed in row_seeds(run, step, [0, 1, 5], samples=4)]

    assert len(set(seeds)) == 2 * 2 * 3 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seeds(0, 1, [5, 1], samples=2) == row_seeds(0, 1, [5], samples=2) + row_seeds(0, 1, [1], samples=2)


def test_noise_is_that_of_splitmix64() -> None:
    def output(state: int) -> int:
        mask = 2**64 - 1
        word = state & mask
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
        return word ^ (word >> 31)

    keys = [5, 2**62 + 11]
    expected = [
        [-math.log(-math.log1p(-((output(key + n * 0x9E3779B97F4A7C15) >> 11) + 0.5) * 2.0**-53)) for n in range(1, 7)]
        for key in keys
    ]

    found = gumbel(torch.tensor(keys), 6)

    assert found.tolist() == [pytest.approx(row, rel=1e-12) for row in expected]
    wide: Any = gumbel(torch.arange(7), 100_000)  # several blocks
    assert torch.equal(wide[3], gumbel(torch.tensor([3]), 100_000)[0])
    assert wide.isfinite().all()
    assert wide.mean().item() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert wide.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_a_large_vocabulary_costs_little() -> None:
    draws = TokenDraws(GenerationOptions(), row_seeds(0, 0, range(24)), prompt_width=0)
    scores, ids = torch.randn(24, 49_152), torch.zeros(24, 1, dtype=torch.long)

    start = time.process_time()
    draws(ids, scores)

    assert time.process_time() - start < 1.0  # 0.05 s on one idle core


def test_another_order_of_a_sum_changes_almost_no_token() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 20_000, generator=generator, dtype=torch.float64)
    moved = scores + 1e-6 * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    ids = torch.zeros(64, 1, dtype=torch.long)
    draws = TokenDraws(GenerationOptions(), row_seeds(0, 0, range(64)), prompt_width=0)

    assert torch.equal(draws(ids, scores).argmax(-1), draws(ids, moved).argmax(-1))
