"""A reward model: one score per answer, from pairs of which one answer is preferred (Bradley-Terry)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.roles import find_member_problems
from tasks.scores.calibration import bin_gaps, expected_error, wins
from tasks.scores.intervals import wilson_interval
from tasks.scores.scoring import sequence_scores
from tasks.text.preferences import BATCH_FIELDS, both_sides, split_sides
from tasks.text.sequences import decode
from tasks.values import find_role_problems, is_number
from trainer import IGNORED, SCORE, Batch, ConfigError, Metric, StepOutput, TaskModule, gather, sum_over_ranks

log = logging.getLogger(__name__)

NUM_SHOWN = 4  # pairs at each end of the table
COLUMNS = ["margin", "prompt", "chosen", "score of chosen", "rejected", "score of rejected"]


class RewardTask(TaskModule):
    """Trains a model that gives the preferred of two answers the higher score.

    The loss of a pair is -log sigmoid(r_chosen - r_rejected - margin) (Bradley and Terry, 1952; the margin as in
    Touvron et al., arXiv:2307.09288, sec. 3.2.2), the mean over the pairs of the global batch. `centering` adds that
    coefficient times (r_chosen + r_rejected)^2, which fixes the level that the differences leave open (Eisenstein et
    al., arXiv:2312.09244, sec. 2).

    Args:
        reward: Name of the trained model, with a score per text.
        centering: Coefficient of the penalty; 0: none.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True

    def __init__(self, *, reward: str = "reward", centering: float = 0.0) -> None:
        problems = find_role_problems({"reward": reward})
        if not (is_number(centering) and centering >= 0):
            problems.append(f"task.centering={centering!r}: must be a finite number of at least 0; 0: no penalty")
        if problems:
            raise ConfigError(*problems)
        self.reads = {reward: SCORE}
        self.reward, self.centering = reward, centering
        self.metric_labels = {
            "accuracy": "pairs ranked right",
            "accuracy_low": "ranked right, 95 % interval from",
            "accuracy_high": "ranked right, 95 % interval to",
            "pairwise_loss": "pairwise loss (nats)",
            "margin": "difference of the scores",
            "calibration_error": "calibration error (ECE)",
        }
        # Of the running validation, on this rank.
        self._num_seen = 0
        self._extremes: list[_Scored] = []

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        return find_member_problems(trainable, stage=stage, trained=[("reward", self.reward)])

    def count_items(self, batch: Batch) -> int:
        return len(batch["chosen_input_ids"])

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        chosen, rejected = self._scores(batch)
        sums = {f"{self.reward}/pairwise_loss": pairwise_losses(chosen, rejected, margin=batch.get("margin")).sum()}
        if self.centering > 0:
            sums[f"{self.reward}/centering"] = self.centering * (chosen + rejected).pow(2).sum()
        metrics: dict[str, Metric] = {name: (value.detach(), len(chosen)) for name, value in sums.items()}
        for name, value in _statistics(chosen.detach(), rejected.detach()).items():
            metrics[f"{self.reward}/{name}"] = value
        return StepOutput(sums=sums, metrics=metrics)

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        if batch_idx == 0:
            self._num_seen, self._extremes = 0, []
        chosen, rejected = self._scores(batch)
        count, margins = len(chosen), chosen - rejected
        if not self.trainer.is_filler:
            self._num_seen += count
            self._extremes = _ends([*self._extremes, *_scored(batch, chosen, rejected)])
        return {
            **_statistics(chosen, rejected),
            "pairwise_loss": (pairwise_losses(chosen, rejected).sum(), count),
            "brier_score": (torch.sigmoid(-margins).pow(2).sum(), count),
            **{f"gap{index}/_of_bin": (gap, count) for index, gap in enumerate(bin_gaps(margins))},
        }

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        device = self.trainer.device
        self._num_pairs = int(sum_over_ranks(torch.tensor(self._num_seen, device=device)).item())
        low, high = wilson_interval(metrics["accuracy"], self._num_pairs)
        gaps = [value for name, value in metrics.items() if name.endswith("/_of_bin")]
        return {"accuracy_low": low, "accuracy_high": high, "calibration_error": expected_error(gaps)}

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """Shows the held-out pairs that the model tells apart best and worst."""
        extremes = _ends([pair for pairs in gather(self._extremes) for pair in pairs])
        tokenizer = self.trainer.tokenizers.get(self.reward)
        if tokenizer is None or not self.trainer.is_main:
            return
        accuracy, low, high = (100 * metrics[f"val/{name}"] for name in ("accuracy", "accuracy_low", "accuracy_high"))
        log.info(
            "%.1f %% of %d held-out pairs are ranked right (95 %% interval %.1f to %.1f)",
            accuracy,
            self._num_pairs,
            low,
            high,
        )
        rows = [
            [
                f"{pair.margin:+.2f}",
                decode(tokenizer, pair.prompt, skips_special=True),
                decode(tokenizer, pair.chosen, skips_special=True),
                f"{pair.scores[0]:.2f}",
                decode(tokenizer, pair.rejected, skips_special=True),
                f"{pair.scores[1]:.2f}",
            ]
            for pair in extremes
        ]
        self.trainer.log_table("pairs", columns=COLUMNS, rows=rows, step=self.trainer.global_step)

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return split_sides(sequence_scores(self.models[self.reward], both_sides(batch)))


def pairwise_losses(chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None) -> Tensor:
    """Returns -log sigmoid(chosen - rejected - margin) per pair, in nats, (B,)."""
    difference = chosen - rejected
    return -F.logsigmoid(difference if margin is None else difference - margin.to(difference))


def _statistics(chosen: Tensor, rejected: Tensor) -> dict[str, Metric]:
    count, margins = len(chosen), chosen - rejected
    return {
        "accuracy": (wins(margins).sum(), count),
        "margin": (margins.sum(), count),
        "mean_score": ((chosen + rejected).sum(), 2 * count),
    }


@dataclass(frozen=True, kw_only=True, order=True)
class _Scored:
    """A pair with its scores; ordered by their difference, and alike on any ranks."""

    margin: float
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    scores: tuple[float, float]


def _scored(batch: Batch, chosen: Tensor, rejected: Tensor) -> list[_Scored]:
    pairs = []
    for index, scores in enumerate(zip(chosen.tolist(), rejected.tolist(), strict=True)):
        prompt, *answers = (*_parts(batch, "chosen", index), _parts(batch, "rejected", index)[1])
        pairs.append(
            _Scored(margin=scores[0] - scores[1], prompt=prompt, chosen=answers[0], rejected=answers[1], scores=scores)
        )
    return pairs


def _parts(batch: Batch, side: str, index: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of a row before its first label, and from there on."""
    tokens, labels, attended = (batch[f"{side}_{part}"][index] for part in ("input_ids", "labels", "attention_mask"))
    kept, has_label = tokens[attended != 0].tolist(), labels[attended != 0] != IGNORED
    start = int(has_label.long().argmax())
    return kept[:start], kept[start:]


def _ends(pairs: list[_Scored]) -> list[_Scored]:
    """Returns the pairs with the largest and the smallest margins, the largest first."""
    ordered = sorted(pairs, reverse=True)
    return ordered if len(ordered) <= 2 * NUM_SHOWN else ordered[:NUM_SHOWN] + ordered[-NUM_SHOWN:]
