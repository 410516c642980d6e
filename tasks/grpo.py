"""GRPO: a model answers each prompt several times, and learns from which answers were rewarded more than the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.generation import (
    SERVER_PLACE,
    GenerationOptions,
    Writer,
    find_folder_problems,
    greedy,
    log_samples,
    make_writer,
    row_seeds,
)
from tasks.logits.heads import HeadTaps, tap_heads
from tasks.logits.log_probs import as_table, token_log_probs
from tasks.losses.policy import KL_ESTIMATES, Tokens, batch_deviation, group_advantages
from tasks.policy.health import Health, Unrewarded, read_health, warn
from tasks.policy.options import read_advantages, read_drawn, read_kl, read_loss, whole
from tasks.policy.reference import ADAPTER, find_adapter_problems, open_reference
from tasks.policy.update import PolicyUpdate
from tasks.rewards import Answers, means, read_rewards
from tasks.roles import find_member_problems
from tasks.scores.intervals import SampleMean
from tasks.text.language import completion_mask
from tasks.text.prompts import PROMPT_FIELDS, longest_prompt, prompts_of, repeat
from tasks.text.sequences import Exchange, join, pad_token
from tasks.values import collected, find_role_problems, find_value_problems
from trainer import IGNORED, LOGITS, Batch, ConfigError, Metric, ModelHandle, StepOutput, TaskModule, sum_over_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NUM_SHOWN = 8  # answers in a table


class GRPOTask(TaskModule):
    """Trains the actor on groups of its own answers, by clipped policy gradients (arXiv:2402.03300, eq. 3).

    Each window of prompts is a rollout: the actor answers each prompt `num_completions` times, the answers are
    rewarded, and an answer's advantage is its reward beside those of the same prompt. `epochs` global steps train on
    it. What is drawn follows from the seed, the step, the prompt and the answer's number alone.

    Args:
        actor: Name of the trained model.
        reference: What the actor is kept near, or compared with: the name of a frozen model; "adapter": the actor
            without its LoRA adapters; None: nothing.
        num_completions: Answers to each prompt.
        epochs: Global steps on each rollout.
        generation: How answers are drawn, see `tasks.generation`; held-out ones are greedy.
        rewards: What is rewarded, see `tasks.rewards`.
        advantages: See `AdvantageOptions` of `tasks.policy.options`.
        loss: See `PolicyLoss`.
        kl: See `KlOptions`.
        mask_truncated: Whether answers that were cut are rewarded, but not trained on.
        fused: Whether logits are made tile by tile: "auto": where the heads allow it; True, False.
        health: See `HealthOptions`; None: nothing is warned of.
        samples_every: Global steps from one table of answers to the next.
    """

    batch_fields, reads_one_batch = PROMPT_FIELDS, True
    may_differ = SERVER_PLACE

    def __init__(
        self,
        *,
        actor: str = "actor",
        reference: str | None = None,
        num_completions: int = 8,
        epochs: int = 1,
        generation: Mapping[str, Any] | None = None,
        rewards: Mapping[str, Any] | None = None,
        advantages: Mapping[str, Any] | None = None,
        loss: Mapping[str, Any] | None = None,
        kl: Mapping[str, Any] | None = None,
        mask_truncated: bool = False,
        fused: bool | str = "auto",
        health: Mapping[str, Any] | None = None,
        samples_every: int = 10,
    ) -> None:
        problems = find_role_problems({"actor": actor, **({} if reference is None else {"reference": reference})})
        if actor == reference:
            problems.append(f"task.actor and task.reference are both {actor!r}; name two models")
        problems += find_value_problems(
            "task",
            num_completions=whole(num_completions, least=2),
            epochs=whole(epochs, least=1),
            samples_every=whole(samples_every, least=1),
            mask_truncated=(mask_truncated, isinstance(mask_truncated, bool), "true or false"),
            fused=(fused, fused == "auto" or isinstance(fused, bool), "auto, true or false"),
        )
        with collected(problems):
            self.options = read_drawn(generation)
        with collected(problems):
            self.loss = read_loss(loss)
        with collected(problems):
            self.advantages = read_advantages(advantages)
        with collected(problems):
            self.rewards = read_rewards({} if rewards is None else rewards)
        with collected(problems):
            watched = read_health(health)
        with collected(problems):
            self.kl = read_kl(kl)
            if self.kl.weight > 0 and reference is None:
                problems.append(
                    f"task.kl.weight={self.kl.weight} needs a reference; name a frozen model: task.reference=reference"
                )
        if problems:
            raise ConfigError(*problems)
        self.actor, self.compared, self.num_completions, self.passes = actor, reference, num_completions, epochs
        self.frozen = None if reference == ADAPTER else reference  # a model of its own
        self.loss = replace(self.loss, max_length=self.options.max_new_tokens)
        self.unrewarded = Unrewarded(self.rewards.weighted_names)
        self.mask_truncated, self.fused = mask_truncated, fused
        self.samples_every = samples_every
        self.health = Health(watched, prefix=f"train/{actor}/") if watched is not None else None
        self.own_tokens = self.rewards.model_names
        self.reads = {name: LOGITS for name in (actor, self.frozen) if name is not None} | self.rewards.reads
        self.metric_labels = {
            "reward": "reward",
            "reward_low": "reward, 95 % interval from",
            "reward_high": "reward, 95 % interval to",
            **{f"reward/{name}": f"- {name}" for name in self.rewards.names},
            "log_prob": "log-probability of its tokens (nats)",
            "answer_tokens": "tokens of an answer",
            "ended": "share of answers that end",
        }
        self.taps = HeadTaps()
        self._written_after: int | None = None  # the actor's updates that the writer knows of
        self._shown_at: int | None = None  # the global step of the last table
        self._held_out = SampleMean()  # the rewards of the current validation
        self._said: list[list[str]] = []  # held-out prompts and answers of the current validation
        self._before: list[list[str]] = []  # those of the first one

    # Checks --------------------------------------------------------------------------------------------------------

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        if mode == "export":
            return [name for name in names if name == self.actor]
        is_fit = mode == "fit"
        needed = (self.actor, *self.own_tokens, self.frozen if is_fit else None)
        return [name for name in names if name in needed or (is_fit and name != "reference")]

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        frozen = [("reference", self.frozen)] if stage == "fit" and self.frozen is not None else []
        problems = find_member_problems(trainable, stage=stage, trained=[("actor", self.actor)], frozen=frozen)
        if stage == "export":
            return problems
        problems += find_folder_problems(self.options.server, self.actor, trainable)
        return problems + self.rewards.check_models(trainable)

    def check_adapters(self, adapted: Sequence[str]) -> list[str]:
        return find_adapter_problems(self.compared, policy=self.actor, adapted=adapted)

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        return self.rewards.check_tokenizers(tokenizers, writer=self.actor)

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        return self.rewards.check_batch(batch, key)

    def setup(self, stage: str) -> None:
        tokenizer = self.trainer.tokenizers[self.actor]
        assert tokenizer is not None  # checked
        self.tokenizer, self.device = tokenizer, self.trainer.device
        self.rewards.setup(self, writer=self.actor)
        frozen = [self.models[self.frozen]] if self.frozen is not None and self.frozen in self.models else []
        self.writer: Writer = make_writer(
            self.models[self.actor],
            tokenizer,
            options=self.options,
            device=self.device,
            prompt=longest_prompt(self.trainer.sources),
            readers=[*frozen, *self.rewards.readers],
        )
        if stage == "fit" and self.fused is not False:
            self.taps, problems = tap_heads([self.models[self.actor], *frozen], vocabulary=None, device=self.device)
            if problems and self.fused is True:
                raise ConfigError(*(f"task.fused=true: {problem}" for problem in problems))
            if problems:
                log.info("logits are made all at once: %s", "; ".join(problems))

    # Rollouts ------------------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Batch) -> Batch:
        samples, trainer = self.num_completions, self.trainer
        seeds = row_seeds(trainer.seed, trainer.global_step, trainer.indices[""], samples=samples)
        exchanges, is_ended = self._write(batch, samples=samples, seeds=seeds, options=self.options)
        answers = Answers.of(batch, exchanges, samples=samples, tokenizer=self.tokenizer)
        components = self.rewards.score(answers, device=self.device)
        self._show(answers, components)
        rollout = join(exchanges, pad_id=pad_token(self.tokenizer), device=self.device)
        lengths = [len(exchange.answer) for exchange in exchanges]
        rollout |= {
            "components": components,
            "rewards": self.rewards.total(components, answers),
            "is_ended": torch.tensor(is_ended, device=self.device),
            "lengths": torch.tensor(lengths, device=self.device),
        }
        if self._needs_old:
            with self.models[self.actor].evaluating():  # as it wrote: without dropout
                rollout["old"] = self._log_probs(self.models[self.actor], rollout)
        if self.compared is not None:
            speaker = open_reference(self.models, policy=self.actor, reference=self.compared, ask=self._log_probs)
            rollout["reference"] = speaker.log_probs(rollout)
        if self.kl.weight > 0 and self.kl.place == "reward":
            apart = KL_ESTIMATES[self.kl.estimator](rollout["old"], rollout["reference"])
            rollout["rewards"] = rollout["rewards"] - self.kl.weight * apart.sum(-1)
        if self.mask_truncated:
            rollout["labels"] = rollout["labels"].masked_fill(~rollout["is_ended"][:, None], IGNORED)
        return rollout

    @property
    def _needs_old(self) -> bool:
        """Whether the answers are trained on by a policy that has moved since it wrote them."""
        num_updates = self.trainer.gradient_accumulation_steps // self.models[self.actor].accumulation
        return self.passes > 1 or num_updates > 1 or (self.kl.weight > 0 and self.kl.place == "reward")

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        real = [batch["rewards"] for batch, filler in zip(batches, is_filler, strict=True) if not filler]
        rewards = torch.cat([torch.zeros(0, device=self.device), *real])
        self.unrewarded.check(int(sum_over_ranks((~rewards.isnan()).sum())), trainer=self.trainer)
        deviation = batch_deviation(rewards, sum_over_ranks) if self.advantages.scale == "batch" else None
        for batch in batches:
            groups = batch["rewards"].view(-1, self.num_completions)
            options = self.advantages
            found = group_advantages(groups, baseline=options.baseline, scale=options.scale, deviation=deviation)
            batch["advantages"] = found.flatten()
        return batches

    def count_items(self, batch: Batch) -> Tensor:
        if "labels" not in batch:  # a validation's prompts
            return torch.tensor(len(batch["prompt_input_ids"]))
        return self.loss.items(completion_mask(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        counted = completion_mask(batch)
        tokens = Tokens.of(counted)
        update = PolicyUpdate(
            loss=self.loss,
            kl=self.kl,
            old=batch["old"][counted] if "old" in batch else None,
            advantages=batch["advantages"][tokens.rows],
            reference=batch["reference"][counted] if "reference" in batch else None,
            tokens=tokens,
            temperature=self.options.temperature,
        )
        actor = self.models[self.actor]
        total, watched = update.run(actor, batch, counted, tap=self.taps.get(actor))
        metrics: dict[str, Metric] = {name: (value, len(tokens.rows)) for name, value in watched.items()}
        metrics |= self._reward_metrics(batch["components"], batch["rewards"])
        groups = batch["rewards"].view(-1, self.num_completions)
        is_alike = (batch["advantages"].view_as(groups) == 0).all(-1)
        metrics |= {
            "alike": (is_alike.sum(), len(groups)),
            "answer_tokens": (batch["lengths"].sum(), len(batch["lengths"])),
            "ended": (batch["is_ended"].sum(), len(batch["is_ended"])),
        }
        return StepOutput(
            sums={self.actor: total}, metrics={f"{self.actor}/{name}": value for name, value in metrics.items()}
        )

    def on_train_step_end(self, metrics: dict[str, float]) -> None:
        if self.health is not None:
            warn(self.health.watch(metrics, step=self.trainer.global_step), is_main=self.trainer.is_main)

    # Validation ----------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._said = []

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        exchanges, is_ended = self._write(batch, samples=1, seeds=None, options=greedy(self.options))
        answers = Answers.of(batch, exchanges, samples=1, tokenizer=self.tokenizer)
        components = self.rewards.score(answers, device=self.device)
        rewards = self.rewards.total(components, answers)
        rollout = join(exchanges, pad_id=pad_token(self.tokenizer), device=self.device)
        likely, count = self._log_probs(self.models[self.actor], rollout).sum(), completion_mask(rollout).sum()
        if batch_idx == 0:
            self._held_out = SampleMean()
        if not self.trainer.is_filler:
            self._held_out.add(rewards)
            said = zip(answers.prompts, answers.completions, strict=True)
            self._said = [*self._said, *map(list, said)][:NUM_SHOWN]
        return {
            **self._reward_metrics(components, rewards),
            "log_prob": (likely, count),
            "answer_tokens": (sum(len(one.answer) for one in exchanges), len(exchanges)),
            "ended": (sum(is_ended), len(is_ended)),
        }

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return self._held_out.interval("reward", self.device)

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        trainer = self.trainer
        if not self._before:
            self._before = self._said
        elif trainer.is_main:
            rows = [
                [prompt, before, after] for (prompt, before), (_, after) in zip(self._before, self._said, strict=False)
            ]
            trainer.log_table("held_out", columns=["prompt", "before", "now"], rows=rows, step=trainer.global_step)

    # Parts ---------------------------------------------------------------------------------------------------------

    def _write(
        self, batch: Batch, *, samples: int, seeds: list[int] | None, options: GenerationOptions
    ) -> tuple[list[Exchange], list[bool]]:
        """Returns so many answers to each prompt, side by side, and whether each has ended."""
        prompts = repeat(prompts_of(batch), samples)
        num_updates = self.models[self.actor].num_updates
        if self._written_after != num_updates:  # a server need not be given the same weights again
            self._written_after = num_updates
            self.writer.update_weights()
        written = self.writer.write(prompts, seeds=seeds, options=options)
        exchanges = [
            Exchange(prompt=prompt, answer=answer, column=len(prompt))
            for prompt, answer in zip(prompts, written.answers, strict=True)
        ]
        return exchanges, written.is_ended

    def _log_probs(self, model: ModelHandle, rollout: Batch) -> Tensor:
        """Returns the log-probabilities of the answers' tokens, (B, T-1), 0 elsewhere."""
        counted = completion_mask(rollout)
        found = token_log_probs(model, rollout, counted, temperature=self.options.temperature, tap=self.taps.get(model))
        return as_table(found.log_probs, counted)

    def _reward_metrics(self, components: Tensor, rewards: Tensor) -> dict[str, Metric]:
        parts = {f"reward/{name}": pair for name, pair in means(components, self.rewards.names).items()}
        return {**means(rewards[:, None], ["reward"]), **parts}

    def _show(self, answers: Answers, components: Tensor) -> None:
        """Logs some answers with their rewards, every so often."""
        step = self.trainer.global_step
        if self._shown_at is not None and step < self._shown_at + self.samples_every:
            return
        self._shown_at = step
        log_samples(
            self.trainer,
            "completions",
            prompts=answers.prompts,
            answers=answers.completions,
            values={name: components[:, index].tolist() for index, name in enumerate(self.rewards.names)},
            step=step + 1,
            limit=NUM_SHOWN,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"health": None if self.health is None else self.health.state_dict(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = [list(row) for row in state["before"]]
        if self.health is not None and state["health"] is not None:
            self.health.load_state_dict(state["health"])
