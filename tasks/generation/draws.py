"""Draws of tokens that follow from a row's seed and the token's place in the answer, and from nothing else."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tasks.generation.options import GenerationOptions

_BLOCK = 2**18  # numbers that are drawn at a time: about what a CPU's cache holds

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16): the step of its counter and its two multipliers.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_seeds(seed: int, step: int, indices: Sequence[int], *, samples: int = 1) -> list[int]:
    """Returns a seed for each answer, the `samples` of one example next to each other, (len(indices) * samples).

    Args:
        seed: The run's.
        step: The global step.
        indices: The examples' places in their data set: `trainer.indices`.
    """
    return [_hash(seed, step, index, sample) for index in indices for sample in range(samples)]


def _hash(*words: int) -> int:
    """Returns a number below 2**63 that any change of a word changes."""
    packed = b"".join(struct.pack("<q", word) for word in words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class TokenDraws(LogitsProcessor):
    """Scores whose largest is a draw from what the options leave of the softmax: the Gumbel-max trick.

    The largest of log p + g, with g of each token drawn from Gumbel(0, 1), is distributed as p (Maddison, Tarlow and
    Minka, arXiv:1411.0030, sec. 2). Against one number per token and the inverse of the cumulative sum, this costs a
    number per entry of the vocabulary, but another order of a sum, which moves every logit by one part in 10^7, then
    changes about one token in 10^6: no boundary between two of 50,000 tokens lies that close to what was drawn.

    Args:
        seeds: One per row.
        prompt_width: The columns before the first token of the answers.
    """

    def __init__(self, options: GenerationOptions, seeds: Sequence[int], *, prompt_width: int) -> None:
        self.filters, self.seeds, self.prompt_width = filters(options), list(seeds), prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for keep in self.filters:
            scores = keep(input_ids, scores)
        place = input_ids.shape[1] - self.prompt_width
        keys = torch.tensor([_signed(_hash(seed, place)) for seed in self.seeds], device=scores.device)
        return scores.double() + gumbel(keys, scores.shape[1])


def filters(options: GenerationOptions) -> list[LogitsProcessor]:
    """Returns transformers' own temperature and filters, those that do something."""
    found: list[LogitsProcessor] = []
    if options.temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k > 0:
        found.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        found.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0:
        found.append(MinPLogitsWarper(options.min_p))
    return found


def gumbel(keys: Tensor, size: int) -> Tensor:
    """Returns numbers drawn from Gumbel(0, 1), (B, size) float64; a row follows from its key alone.

    Number n of a row is -log(-log(u)), u made of the n-th output of SplitMix64 with the key as its state.

    Args:
        keys: (B,) int64.
    """
    counter = torch.arange(1, size + 1, device=keys.device) * _signed(_STEP)  # wraps around, as all of it
    rows = max(1, _BLOCK // size if keys.device.type == "cpu" else len(keys))
    drawn = [_gumbel_of(_mix(part[:, None] + counter)) for part in torch.split(keys, rows)]
    return torch.cat(drawn) if drawn else torch.empty(0, size, dtype=torch.float64, device=keys.device)


def _mix(state: Tensor) -> Tensor:
    """Returns SplitMix64's output of each state, (B, V) int64; in place."""
    state.bitwise_xor_(_shifted(state, 30)).mul_(_signed(_FIRST))
    state.bitwise_xor_(_shifted(state, 27)).mul_(_signed(_SECOND))
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Returns the value shifted to the right, with zeros coming in also where its sign bit is set."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _gumbel_of(words: Tensor) -> Tensor:
    # From the upper 53 bits, all a float64 holds, and never 0 or 1.
    uniform = _shifted(words, 11).double().add_(0.5).mul_(2.0**-53)
    # log1p(-u), as the draw that wins is the one of the least -log: there the resolution is needed.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(word: int) -> int:
    """Returns the int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word
