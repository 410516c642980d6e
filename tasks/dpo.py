"""Direct preference optimisation: a policy learns which of two answers is preferred, compared with a reference."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.logits.heads import HeadTaps, tap_heads
from tasks.logits.log_probs import row_sums, token_log_probs
from tasks.losses.preference import ANCHORED, log_ratios, read_preference_loss
from tasks.policy.reference import (
    FILE,
    WITHOUT_MODEL,
    NoReference,
    Reference,
    find_adapter_problems,
    open_reference,
    record_reference,
)
from tasks.roles import find_member_problems
from tasks.scores.intervals import wilson_interval
from tasks.text.language import completion_mask
from tasks.text.preferences import BATCH_FIELDS, both_sides, split_sides
from tasks.text.sequences import decode, exchanges_of
from tasks.text.vocabulary import common_vocabulary
from tasks.values import collected, find_role_problems, is_number
from trainer import LOGITS, Batch, ConfigError, Metric, ModelHandle, StepOutput, TaskModule, sum_over_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FUSED = ("auto", True, False)
NUM_SHOWN = 8  # pairs in the table of a validation
FALL = 0.1  # of the chosen answers' log-probability, relative: beyond it a warning
DIFFERENCE = 0.01  # nats per token between policy and reference before training: beyond it a warning
_DECAY = 0.9  # of the mean over steps that the warning looks at


class DPOTask(TaskModule):
    """Trains the policy to prefer what the data prefer (arXiv:2305.18290), by one of several losses of pairs.

    The loss is a mean over the pairs of the global batch. Both answers of a pair go through the policy together, and
    only their positions through its head.

    Args:
        policy: Name of the trained model.
        reference: Name of a frozen model; "adapter": the policy without its LoRA adapters; "cached": what the policy
            says before it is trained, recorded once; "none": all answers are alike to it.
        loss: One of `tasks.losses.preference.LOSSES`; `beta`, `label_smoothing` and `target_margin` as there.
        length_normalised: Whether log-probabilities count per token of the answer.
        sft_weight: Of the chosen answers' cross-entropy per token beside the loss (arXiv:2404.19733, eq. 1).
        cache: With reference "cached" the file of the recording; None: in the run's folder.
        fused: True or "auto": logits a tile of positions at a time, always or where that is known to be right.
    """

    batch_fields, reads_one_batch = BATCH_FIELDS, True

    def __init__(
        self,
        *,
        policy: str = "policy",
        reference: str = "reference",
        loss: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        target_margin: float = 0.0,
        length_normalised: bool = False,
        sft_weight: float = 0.0,
        cache: str | None = None,
        fused: bool | str = "auto",
    ) -> None:
        problems = find_role_problems({"policy": policy, "reference": reference})
        with collected(problems):
            self.loss = read_preference_loss(
                loss=loss, beta=beta, label_smoothing=label_smoothing, target_margin=target_margin
            )
        problems += _find_problems(policy, reference, loss=loss, cache=cache)
        if not isinstance(length_normalised, bool):
            problems.append(f"task.length_normalised={length_normalised!r}: must be true or false")
        if not (is_number(sft_weight) and sft_weight >= 0):
            problems.append(f"task.sft_weight={sft_weight!r}: must be a finite number of at least 0")
        if fused not in FUSED:
            problems.append(f"task.fused={fused!r}: must be one of auto, true, false")
        if problems:
            raise ConfigError(*problems)
        self.reads = {policy: LOGITS, **({} if reference in WITHOUT_MODEL else {reference: LOGITS})}
        self.policy, self.compared_with = policy, reference
        self.is_normalised, self.sft_weight, self.fused = length_normalised, float(sft_weight), fused
        self.cache = None if cache is None else Path(cache)
        self.metric_labels = _labels(per_token=length_normalised)
        self._held_out: dict[int, Tensor | None] = {}  # by validation batch: what the reference says, which stays
        self._num_pairs, self._shown = 0, list[list[str]]()
        self._chosen: dict[str, float] = {}  # running means of what the chosen answers get in training
        self._has_warned = False

    # What it needs ---------------------------------------------------------------------------------------------------

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        is_alone = self.compared_with in WITHOUT_MODEL and self.policy in names
        return [self.policy] if is_alone else list(names)

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        return find_member_problems(
            trainable,
            stage=stage,
            trained=[("policy", self.policy)],
            frozen=[] if self.compared_with in WITHOUT_MODEL else [("reference", self.compared_with)],
            instead=f"; or take one of {', '.join(WITHOUT_MODEL)}",
        )

    def check_adapters(self, adapted: Sequence[str]) -> list[str]:
        instead = "task.reference=cached, or the name of a frozen model"
        return find_adapter_problems(self.compared_with, policy=self.policy, adapted=adapted, instead=instead)

    def setup(self, stage: str) -> None:
        models = [self.models[name] for name in (self.policy, self.compared_with) if name in self.models]
        tokenizer: PreTrainedTokenizerBase | None = self.trainer.tokenizers[self.policy]
        self.vocabulary = common_vocabulary(models, tokenizer=tokenizer)
        self.taps = self._tap_heads(models)
        self.comparison = self._open_reference()
        self._held_out.clear()

    def _tap_heads(self, models: Sequence[ModelHandle]) -> HeadTaps:
        if self.fused is False:
            return HeadTaps()
        taps, problems = tap_heads(models, vocabulary=self.vocabulary, device=self.trainer.device)
        if problems and self.fused is True:
            raise ConfigError(*(f"task.fused=true, but {problem}; set task.fused=auto" for problem in problems))
        if problems:
            log.info("the logits of all answers are built at once: %s", "; ".join(problems))
        return taps

    def _open_reference(self) -> Reference:
        if self.compared_with == "none":
            return NoReference()
        if self.compared_with == "cached":
            folder = self.trainer.folder
            return record_reference(
                self.trainer,
                self.models[self.policy],
                self._answer_log_probs,
                answers=both_sides,
                path=self.cache or (folder / FILE if folder is not None else None),
            )
        ask = self._answer_log_probs
        return open_reference(self.models, policy=self.policy, reference=self.compared_with, ask=ask)

    # Losses ----------------------------------------------------------------------------------------------------------

    def count_items(self, batch: Batch) -> dict[str, int | Tensor]:
        answers = both_sides(batch)
        counted = completion_mask(answers)
        counts: dict[str, int | Tensor] = {f"{self.policy}/preference": _are_whole(counted).sum()}
        if self.sft_weight:
            counts[f"{self.policy}/cross_entropy"] = split_sides(counted)[0].sum()
        return counts

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        answers = both_sides(batch)
        scores = self._score(answers, self.comparison.log_probs(answers))
        losses = self.loss(scores.chosen, scores.rejected)
        sums = {f"{self.policy}/preference": torch.where(scores.is_whole, losses, 0.0).sum()}
        metrics = self._measure(scores, losses.detach())
        if self.sft_weight:
            name = f"{self.policy}/cross_entropy"
            total = -split_sides(scores.log_probs)[0].sum()
            sums[name] = self.sft_weight * total
            metrics["cross_entropy"] = (total.detach(), split_sides(scores.lengths)[0].sum())
        return StepOutput(sums=sums, metrics={f"{self.policy}/{name}": value for name, value in metrics.items()})

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        answers = both_sides(batch)
        if batch_idx not in self._held_out:
            self._held_out[batch_idx] = self.comparison.log_probs(answers)
        scores = self._score(answers, self._held_out[batch_idx])
        if batch_idx == 0:
            self._num_pairs = 0
            self._show(answers, scores)
        if not self.trainer.is_filler:
            self._num_pairs += int(scores.is_whole.sum())
        return self._measure(scores, self.loss(scores.chosen, scores.rejected))

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        count = int(sum_over_ranks(torch.tensor(self._num_pairs, device=self.trainer.device)))
        found: dict[str, float] = {"pairs": count}
        for name in ("reward_accuracy", "log_prob_accuracy"):
            if name in metrics:
                found[f"{name}_low"], found[f"{name}_high"] = wilson_interval(metrics[name], count)
        return found

    def _answer_log_probs(self, model: ModelHandle, answers: Batch) -> Tensor:
        """Returns a model's log-probability of each answer, (2B,)."""
        counted = completion_mask(answers)
        found = token_log_probs(model, answers, counted, tap=self.taps.get(model), vocabulary=self.vocabulary)
        return row_sums(found.log_probs, counted)

    def _score(self, answers: Batch, reference: Tensor | None) -> _Scores:
        log_probs = self._answer_log_probs(self.models[self.policy], answers)
        counted = completion_mask(answers)
        lengths = counted.sum(-1)
        ratios = log_ratios(log_probs, reference, lengths=lengths if self.is_normalised else None)
        chosen, rejected = split_sides(ratios)
        return _Scores(
            chosen=chosen,
            rejected=rejected,
            log_probs=log_probs,
            reference=reference,
            lengths=lengths,
            is_whole=_are_whole(counted),
        )

    def _measure(self, scores: _Scores, losses: Tensor) -> dict[str, Metric]:
        """Returns metrics of the pairs as sums and counts."""
        log_probs = scores.log_probs.detach()
        chosen, rejected = (self.loss.beta * side.detach() for side in (scores.chosen, scores.rejected))
        is_whole, lengths = scores.is_whole, scores.lengths.clamp(min=1)
        likely = split_sides(log_probs / lengths if self.is_normalised else log_probs)
        whole = split_sides(log_probs)
        values = {
            "preference": losses,
            "reward_accuracy": _wins(chosen - rejected),
            "reward_margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "log_prob_accuracy": _wins(likely[0] - likely[1]),
            "chosen_log_prob": whole[0],
            "rejected_log_prob": whole[1],
        }
        if scores.reference is not None:
            differences = log_probs - scores.reference
            values["chosen_log_ratio"] = split_sides(differences)[0]
            values["drift"] = torch.stack(split_sides((differences / lengths).abs())).mean(0)
        return {name: (torch.where(is_whole, value, 0.0).sum(), is_whole.sum()) for name, value in values.items()}

    # What is told ----------------------------------------------------------------------------------------------------

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        step = self.trainer.global_step
        if self._shown and self.trainer.is_main:
            columns = ["prompt", "chosen", "rejected", "reward margin"]
            self.trainer.log_table("pairs", columns=columns, rows=self._shown, step=step)
        if step == 0 and metrics.get("val/drift", 0.0) > DIFFERENCE:
            log.warning(
                "before training the policy differs from its reference by %.3f nats per token; is models.%s the model "
                "that it starts from?",
                metrics["val/drift"],
                self.compared_with,
            )
        before, now = (found.get("val/chosen_log_prob") for found in (self.trainer.before, metrics))
        if before is not None and now is not None and now < (1 + FALL) * before:
            self._warn(f"held-out chosen answers have log-probability {now:.2f}, {before:.2f} before training")

    def on_train_step_end(self, metrics: dict[str, float]) -> None:
        for name in ("chosen_log_prob", "chosen_log_ratio"):
            value = metrics.get(f"train/{self.policy}/{name}")
            if value is not None:
                self._chosen[name] = _DECAY * self._chosen.get(name, value) + (1 - _DECAY) * value
        if "chosen_log_ratio" not in self._chosen:
            return
        now, ratio = self._chosen["chosen_log_prob"], self._chosen["chosen_log_ratio"]
        if now < (1 + FALL) * (now - ratio):
            self._warn(f"the chosen answers have log-probability {now:.2f}, {now - ratio:.2f} by the reference")

    def _warn(self, fact: str) -> None:
        """Tells once that the known failure of this loss has come: both answers become unlikely."""
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "step %d: %s; the policy moves to answers that are in no pair. Lower models.%s.optimizer.lr, raise "
            "task.beta, or hold the chosen answers up by task.sft_weight=1",
            self.trainer.global_step,
            fact,
            self.policy,
        )

    def _show(self, answers: Batch, scores: _Scores) -> None:
        """Keeps the first pairs for the table of the validation."""
        tokenizer = self.trainer.tokenizers[self.policy]
        if tokenizer is None or not self.trainer.is_main:
            return
        exchanges = exchanges_of(answers)
        margins = (self.loss.beta * (scores.chosen - scores.rejected)).tolist()
        pairs = zip(exchanges[: len(margins)], exchanges[len(margins) :], margins, strict=True)
        self._shown = []
        for chosen, rejected, margin in list(pairs)[:NUM_SHOWN]:
            texts = (chosen.prompt, chosen.answer, rejected.answer)
            self._shown.append([*(decode(tokenizer, ids, skips_special=True) for ids in texts), f"{margin:+.3f}"])


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """What policy and reference say of B pairs.

    Args:
        chosen: Log-ratios that the loss is of, (B,).
        rejected: Of the rejected answers.
        log_probs: The policy's of whole answers, the chosen ones first, (2B,).
        reference: The same of the reference, None without one.
        lengths: Tokens of the answers, (2B,).
        is_whole: Which pairs have two answers with a token each, (B,).
    """

    chosen: Tensor
    rejected: Tensor
    log_probs: Tensor
    reference: Tensor | None
    lengths: Tensor
    is_whole: Tensor


def _are_whole(counted: Tensor) -> Tensor:
    chosen, rejected = split_sides(counted.any(-1))
    return chosen & rejected


def _wins(difference: Tensor) -> Tensor:
    """Returns 1 where it is above 0, and a half where both answers are alike, as they are before training."""
    return (difference.sign() + 1) / 2


def _find_problems(policy: Any, reference: Any, *, loss: Any, cache: Any) -> list[str]:
    problems = []
    if isinstance(policy, str) and policy == reference:
        problems.append(
            f"task.policy and task.reference are both {policy!r}; name two models, or take one of "
            f"{', '.join(WITHOUT_MODEL)}"
        )
    if policy in WITHOUT_MODEL:
        problems.append(f"task.policy={policy!r}: is a word of task.reference; give the model another name")
    if reference == "none" and loss in ANCHORED:
        problems.append(
            f"task.reference=none: task.loss={loss} takes each answer's log-ratio by itself, which is far from 0 "
            "without a reference; take a loss of differences, such as sigmoid"
        )
    if not (cache is None or (isinstance(cache, str) and cache)):
        problems.append(f"task.cache={cache!r}: must be a file, or null")
    elif cache is not None and reference != "cached":
        problems.append(f"task.cache={cache}: only task.reference=cached reads it; drop it")
    return problems


def _labels(*, per_token: bool) -> dict[str, str]:
    unit = " per token" if per_token else ""
    return {
        "preference": "loss",
        "reward_accuracy": "pairs told apart by reward",
        "reward_accuracy_low": "by reward, 95 % interval from",
        "reward_accuracy_high": "by reward, 95 % interval to",
        "log_prob_accuracy": f"pairs told apart by log p{unit}",
        "log_prob_accuracy_low": "by log p, 95 % interval from",
        "log_prob_accuracy_high": "by log p, 95 % interval to",
        "reward_margin": f"reward margin{unit}",
        "chosen_log_prob": "log p of the chosen answer (nats)",
        "rejected_log_prob": "log p of the rejected answer",
        "chosen_log_ratio": "log p / reference, chosen answer",
        "drift": "distance from reference (nats/token)",
    }
