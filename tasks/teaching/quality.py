"""What is measured of held-out tokens: sums over them, whole, by source and by length, and what follows from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.losses import TopTokens, cross_entropy, forward_kl, reverse_kl
from tasks.text.language import completion_mask, perplexities
from tasks.values import is_whole
from trainer import Batch, Metric

LENGTH_EDGES = (16, 64, 256)  # tokens
MAX_EDGE = 2**31
BINS = 15  # of the calibration error, as in Guo et al.
_GAP = "_gap_"


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Which numbers are taken of held-out tokens; their names are the same on every rank and for every batch.

    Of the student always `cross_entropy` and what the calibration error needs; with a teacher `forward_kl`,
    `reverse_kl` and `top1_agreement`, and the teacher's own numbers as `reference/...`. All at temperature 1.

    Args:
        teacher: Type of what the teacher gives: its logits (Tensor), or its most likely tokens (TopTokens), of which
            the divergences are lower bounds (what is left counts as one token) and the cross-entropy is not known.
            None: there is none.
        sources: Names for what rows come from; fewer than two: no such groups.
        places: Which of these names each number in the batch's `source` has; none: the number itself.
        edges: Completions of up to so many tokens make a group, those above the last one more; none: no such groups.
    """

    teacher: type[Tensor] | type[TopTokens] | None = Tensor
    sources: Sequence[str] = ()
    places: Sequence[int] = ()
    edges: Sequence[int] = LENGTH_EDGES

    @property
    def groups(self) -> list[str]:
        """The names of all groups, such as by_source/wiki and by_length/17-64."""
        return self._by_source + self._by_length

    @property
    def num_sums(self) -> int:
        """How many numbers `sums` returns."""
        return (1 + len(self.groups)) * self._width + BINS * (1 if self.teacher is None else 2)

    def groups_of(self, batch: Batch, counted: Tensor) -> Tensor:
        """Returns the groups of the tokens that count, (N, A), places in `groups`: of the source, of the length.

        Args:
            counted: Which positions do, (B, T-1); position t is about token t+1.
        """
        found = []
        if self._by_source:
            numbers = batch["source"][:, 1:][counted]
            found.append(torch.tensor(self.places, device=numbers.device)[numbers] if self.places else numbers)
        if self._by_length:
            lengths = completion_lengths(batch)[counted]
            edges = torch.tensor(self.edges, device=lengths.device)
            found.append(torch.bucketize(lengths, edges) + len(self._by_source))
        return torch.stack(found, 1) if found else counted.new_zeros(int(counted.sum()), 0, dtype=torch.long)

    @torch.no_grad()
    def sums(self, student: Tensor, teacher: Tensor | TopTokens | None, labels: Tensor, groups: Tensor) -> Tensor:
        """Returns sums over tokens, (num_sums,), in float64 where the device has it; those of parts add up.

        Args:
            student: Logits, (n, V), any float type; computed in float32.
            teacher: Logits of the same shape, or its most likely tokens; carries no gradient.
            labels: The right tokens, (n,), none of them -100.
            groups: Of `groups_of`, (n, A).
        """
        dtype = torch.float32 if student.device.type == "mps" else torch.float64
        token, confidence = _most_likely(student)
        values = [torch.ones_like(confidence), cross_entropy(student, labels)]
        gaps = [_calibration_gaps(token, confidence, labels, dtype=dtype)]
        if self.teacher is not None:
            assert isinstance(teacher, self.teacher)
            teacher_token, teacher_confidence = _most_likely(teacher)
            agrees = (token == teacher_token).float()
            values += [forward_kl(student, teacher), reverse_kl(student, teacher), agrees]
            gaps.append(_calibration_gaps(teacher_token, teacher_confidence, labels, dtype=dtype))
        if self.teacher is Tensor:
            assert isinstance(teacher, Tensor)
            values.append(cross_entropy(teacher, labels))
        table = torch.stack(values, 1).to(dtype)  # (n, width)
        of_groups = table.new_zeros(len(self.groups), self._width)
        for column in groups.T:
            of_groups.index_add_(0, column, table)
        return torch.cat([table.sum(0), of_groups.flatten(), *gaps])

    def metrics(self, sums: Tensor) -> dict[str, Metric]:
        """Returns what `validation_step` returns of the sums of a micro-batch."""
        tables = sums[: (1 + len(self.groups)) * self._width].view(-1, self._width)
        metrics: dict[str, Metric] = {}
        for prefix, row in zip(["", *(f"{group}/" for group in self.groups)], tables, strict=True):
            metrics |= self._metrics_of(row, prefix)
        gaps = sums[tables.numel() :].view(-1, BINS)
        for prefix, bins in zip(("", "reference/"), gaps, strict=False):
            metrics |= {f"{prefix}{_GAP}{index:02}": (gap, tables[0, 0]) for index, gap in enumerate(bins)}
        return metrics

    def _metrics_of(self, row: Tensor, prefix: str) -> dict[str, Metric]:
        count, own, *shared = row
        found = {"cross_entropy": own} | dict(zip(("forward_kl", "reverse_kl", "top1_agreement"), shared, strict=False))
        if self.teacher is not None:  # of itself it is right about everything
            found |= {"reference/forward_kl": 0 * count, "reference/reverse_kl": 0 * count}
            found |= {"reference/top1_agreement": count}
        if self.teacher is Tensor:
            found["reference/cross_entropy"] = shared[-1]
        return {_within(prefix, name): (value, count) for name, value in found.items()}

    @property
    def _width(self) -> int:
        """Numbers of all tokens or of a group: how many tokens, and a sum for each metric."""
        return 2 if self.teacher is None else 6 if self.teacher is Tensor else 5

    @property
    def _by_source(self) -> list[str]:
        return [f"by_source/{name}" for name in self.sources] if len(self.sources) > 1 else []

    @property
    def _by_length(self) -> list[str]:
        starts = [1, *(edge + 1 for edge in self.edges)]
        ends = [f"-{edge}" for edge in self.edges] + ["-up"]
        return [f"by_length/{start}{end}" for start, end in zip(starts, ends, strict=True)] if self.edges else []


def derive_quality(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the perplexity and the expected calibration error (`ece`) of all tokens, from reduced metrics.

    ECE = sum over bins of |sum over the bin's tokens of (confidence - is right)| / number of all tokens, with 15 bins
    of equal width over the probability of the most likely token (Guo et al., arXiv:1706.04599, eq. 3).
    """
    gaps = [abs(value) for name, value in metrics.items() if name.startswith(_GAP)]
    derived = perplexities({name: value for name, value in metrics.items() if not name.startswith("by_")})
    return derived | ({"ece": sum(gaps)} if gaps else {})


def completion_lengths(batch: Batch) -> Tensor:
    """Returns, for the token after each position, how many tokens of its document have a label, (B, T-1).

    Of a conversation all answers count together; packed documents are told apart by `position_ids`.
    """
    counted = completion_mask(batch)
    document = torch.zeros_like(batch["input_ids"])
    if "position_ids" in batch:
        document = (batch["position_ids"] == 0).cumsum(1)
    document = document[:, 1:]
    lengths = document.new_zeros(len(document), batch["input_ids"].shape[1] + 1)
    return lengths.scatter_add_(1, document, counted.long()).gather(1, document)


def find_edge_problems(key: str, edges: Any) -> list[str]:
    """Returns what is wrong with the edges of lengths that stand under a key of the configuration."""
    is_list = isinstance(edges, Sequence) and not isinstance(edges, str)
    if is_list and all(is_whole(edge) and 0 < edge < MAX_EDGE for edge in edges) and list(edges) == sorted(set(edges)):
        return []
    rule = "must be whole numbers above 0 and below 2**31, each larger than the one before, such as [16,64,256]"
    return [f"{key}={list(edges) if is_list else edges!r}: {rule}"]


def _within(prefix: str, name: str) -> str:
    rest = name.removeprefix("reference/")
    return f"{prefix}{name}" if rest == name else f"reference/{prefix}{rest}"


def _most_likely(given: Tensor | TopTokens) -> tuple[Tensor, Tensor]:
    """Returns the most likely tokens and their probabilities in float32, (n,) each."""
    if isinstance(given, TopTokens):
        log_probs, places = given.log_probs.max(-1)
        return given.ids.gather(-1, places.unsqueeze(-1)).squeeze(-1), log_probs.float().exp()
    highest, token = given.float().max(-1)
    return token, (highest - given.float().logsumexp(-1)).exp()


def _calibration_gaps(token: Tensor, confidence: Tensor, labels: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Returns the sum of (confidence - is right) of each bin's tokens, (BINS,); bin i holds (i/15, (i+1)/15]."""
    edges = torch.arange(1, BINS, device=token.device, dtype=dtype) / BINS
    bins = torch.bucketize(confidence.to(dtype), edges)
    gaps = confidence.to(dtype) - (token == labels).to(dtype)
    return gaps.new_zeros(BINS).index_add_(0, bins, gaps)
