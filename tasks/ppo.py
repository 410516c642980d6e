"""PPO: an actor learns from scored answers of its own, and a critic learns what they will be worth."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.generation import (
    GenerationOptions,
    Writer,
    greedy,
    make_writer,
    read_options,
    row_seeds,
)
from tasks.logits.heads import HeadTaps, tap_heads
from tasks.logits.log_probs import TokenLogProbs, as_table, token_log_probs
from tasks.losses.advantages import (
    Moments,
    clipped_value_loss,
    explained_variance,
    gae,
    moments,
    whiten,
)
from tasks.losses.policy import KL_ESTIMATES, PolicyLoss
from tasks.policy.health import Health, read_health, warn
from tasks.policy.ppo_options import KLOptions, LossOptions
from tasks.policy.ppo_options import read_options as read_own
from tasks.policy.scored_answers import Rollout, score_answers
from tasks.rewards import Rewards, read_rewards
from tasks.scores.scoring import token_scores
from tasks.text.language import completion_mask
from tasks.text.prompts import PROMPT_FIELDS, longest_prompt, prompts_of
from tasks.values import collected, find_role_problems, find_value_problems, is_at_least, is_whole
from trainer import LOGITS, VALUES, Batch, ConfigError, Metric, StepOutput, TaskModule

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NUM_SHOWN = 8  # answers in a table


class PPOTask(TaskModule):
    """Trains the actor by clipped policy gradients, the critic by regression (arXiv:1707.06347, eq. 7 and 9).

    Each window of prompts is a rollout: the actor answers, the answers are scored, and `epochs` global steps train both
    models on them. Every token is an action. Its reward is -coefficient * log(actor / reference); that of an answer's
    last token also has the answer's score (arXiv:1909.08593, sec. 2.2; arXiv:2203.02155, sec. 3.5).

    Args:
        actor: Name of the trained language model.
        critic: Name of the trained model that gives each token a value; it reads the actor's tokens.
        reference: Name of the frozen language model that the actor stays near.
        rewards: What scores an answer, see `tasks.rewards`.
        generation: How training answers are drawn, see `tasks.generation`; held-out ones are greedy.
        epochs: Global steps on each rollout.
        gamma: The discount per token.
        lam: Of the advantages: 0: one step of the critic's; 1: all rewards that followed.
        whiten: Whether advantages get mean 0 and variance 1 over the global window.
        loss: See `LossOptions`.
        kl: See `KLOptions`.
        missing_end_penalty: Taken from the score of an answer that was cut.
        health: What is warned of, see `tasks.policy.health`; None: nothing.
        fused: Whether logits are made tile by tile: true, false, or "auto": where the heads allow it.
        samples_every: Global steps from one table of drawn answers to the next.
    """

    batch_fields, reads_one_batch = PROMPT_FIELDS, True

    def __init__(
        self,
        *,
        actor: str = "actor",
        critic: str = "critic",
        reference: str = "reference",
        rewards: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        epochs: int = 2,
        gamma: float = 1.0,
        lam: float = 0.95,
        whiten: bool = True,
        loss: Mapping[str, Any] | None = None,
        kl: Mapping[str, Any] | None = None,
        missing_end_penalty: float = 0.0,
        health: Mapping[str, Any] | None = None,
        fused: bool | str = "auto",
        samples_every: int = 10,
    ) -> None:
        roles = {"actor": actor, "critic": critic, "reference": reference}
        problems = find_role_problems(roles)
        if not problems and len(set(roles.values())) < len(roles):
            problems.append(f"task.actor={actor}, task.critic={critic}, task.reference={reference}: name three models")
        share, at_least = "a number from 0 to 1", "a number of at least 0"
        problems += find_value_problems(
            "task",
            epochs=(epochs, is_whole(epochs) and epochs >= 1, "a whole number of at least 1"),
            samples_every=(
                samples_every,
                is_whole(samples_every) and samples_every >= 1,
                "a whole number of at least 1",
            ),
            gamma=(gamma, is_at_least(gamma, 0) and gamma <= 1, share),
            lam=(lam, is_at_least(lam, 0) and lam <= 1, share),
            whiten=(whiten, isinstance(whiten, bool), "true or false"),
            missing_end_penalty=(missing_end_penalty, is_at_least(missing_end_penalty, 0), at_least),
            fused=(fused, fused == "auto" or isinstance(fused, bool), "auto, true or false"),
        )
        parts: dict[str, Any] = {}
        for name, read in (
            ("loss", lambda: read_own(LossOptions, {} if loss is None else loss, key="task.loss")),
            ("kl", lambda: read_own(KLOptions, {} if kl is None else kl, key="task.kl")),
            ("generation", lambda: _drawn(read_options({} if generation is None else generation))),
            ("rewards", lambda: read_rewards({} if rewards is None else rewards)),
            ("health", lambda: read_health(health, without=["max_alike"])),  # a prompt has one answer
        ):
            with collected(problems):
                parts[name] = read()
        if problems:
            raise ConfigError(*problems)
        self.actor, self.critic, self.frozen = actor, critic, reference
        self.kl: KLOptions = parts["kl"]
        self.generation: GenerationOptions = parts["generation"]
        self.rewards: Rewards = parts["rewards"]
        self.loss: LossOptions = parts["loss"]
        self.policy_loss = PolicyLoss(clip_low=self.loss.clip_low, clip_high=self.loss.clip_high)
        self.health = None if parts["health"] is None else Health(parts["health"], prefix=f"train/{actor}/")
        self.passes, self.gamma, self.lam, self.whiten = epochs, gamma, lam, whiten
        self.missing_end_penalty, self.fused, self.samples_every = missing_end_penalty, fused, samples_every
        self.own_tokens = self.rewards.model_names
        self.reads = {actor: LOGITS, reference: LOGITS, critic: VALUES, **self.rewards.reads}
        self.metric_labels = {
            **{f"reward/{name}": f"- {name}" for name in self.rewards.names},
            "kl": f"log p / {reference} (nats a token)",  # of greedy text, so that it is no estimate of the KL
            "answer_tokens": "tokens of an answer",
            "ended": "share of answers that end",
        }
        self.taps = HeadTaps()
        self.kl_weight = self.kl.weight  # of the current rollout
        self._observed: tuple[int, float] | None = None  # the last rollout and its KL per answer
        self._said: list[list[str]] = []  # held-out prompts, answers and rewards of the current validation
        self._before: list[list[str]] = []  # those of the first one
        self._shown_at: int | None = None  # the global step of the last table of drawn answers
        self._weights_of_step: int | None = None  # the global step whose weights the writer has

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        needed = (self.actor, self.critic)
        return [name for name in names if mode != "export" or name in needed]

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        problems = []
        for role, name, is_trained in (
            ("actor", self.actor, True),
            ("critic", self.critic, True),
            ("reference", self.frozen, False),
        ):
            if name not in trainable and not (stage == "export" and name == self.frozen):
                problems.append(f"task.{role}={name}: models has no {name}, only {', '.join(trainable)}")
            elif trainable.get(name, False) != is_trained and (stage == "fit" or not is_trained):
                does, value = ("trains it", "true") if is_trained else ("keeps it as it is", "false")
                problems.append(
                    f"models.{name}.trainable={str(trainable[name]).lower()}, but task.{role} {does}; set it to {value}"
                )
        return problems + (self.rewards.check_models(trainable) if stage != "export" else [])

    def check_tokenizers(self, tokenizers: Mapping[str, PreTrainedTokenizerBase | None]) -> list[str]:
        if tokenizers.get(self.actor) is None:
            return ["the task reads text, but no model brings a tokenizer; give data.tokenizer=<folder>"]
        return self.rewards.check_tokenizers(tokenizers)

    def check_batch(self, batch: Batch, key: str) -> list[str]:
        return self.rewards.check_columns(list(batch["columns"]), data=key)

    def setup(self, stage: str) -> None:
        tokenizer = self.trainer.tokenizers[self.actor]
        assert tokenizer is not None  # checked
        self.tokenizer = tokenizer
        actor, device = self.models[self.actor], self.trainer.device
        self.rewards.setup(self, writer=self.actor)
        self.writer: Writer = make_writer(
            actor,
            tokenizer,
            options=self.generation,
            device=device,
            prompt=longest_prompt(self.trainer.sources),
            readers=[self.models[self.critic], self.models[self.frozen], *self.rewards.readers],
        )
        if self.fused is not False:
            models = [self.models[name] for name in (self.actor, self.frozen)]
            self.taps, problems = tap_heads(models, vocabulary=None, device=self.trainer.device)
            if problems and self.fused is True:
                raise ConfigError(*(f"task.fused=true, but {problem}; set task.fused=auto" for problem in problems))

    # The rollout ------------------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Batch) -> Batch:
        seeds = row_seeds(self.trainer.seed, self._rollout, self.trainer.indices[""])
        rollout = self._answer(batch, seeds=seeds, options=self.generation)
        self._show(rollout)
        written, counted = rollout.batch, completion_mask(rollout.batch)
        # Or a dropout would make old log-probabilities another model's.
        with self.models[self.actor].evaluating(), self.models[self.critic].evaluating():
            old = self._log_probs(self.actor, written, counted).log_probs
            near = self._log_probs(self.frozen, written, counted).log_probs
            values = token_scores(self.models[self.critic], written)[:, :-1]
        return {
            **written,
            "old_log_probs": as_table(old, counted),
            "reference_log_probs": as_table(near, counted),
            "old_values": torch.where(counted, values, 0.0),
            "scores": rollout.scores,
            "shown": {name: list(pair) for name, pair in rollout.metrics(self.rewards.names, model=self.actor).items()},
        }

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        masks = [completion_mask(batch) for batch in batches]

        def of_real(values: list[Tensor]) -> Moments:
            return moments([value[:0] if filler else value for value, filler in zip(values, is_filler, strict=True)])

        self._adapt(of_real([self._kl(batch) for batch in batches]).mean)
        advantages = [self._advantages(batch, mask) for batch, mask in zip(batches, masks, strict=True)]
        returns = [batch["old_values"] + raw for batch, raw in zip(batches, advantages, strict=True)]
        explained = explained_variance(
            of_real([values[mask] for values, mask in zip(returns, masks, strict=True)]),
            of_real([values[mask] for values, mask in zip(advantages, masks, strict=True)]),
        )
        if self.whiten:
            advantages = whiten(advantages, masks, is_filler=is_filler)
        shared = {"kl_weight": self.kl_weight, "explained_variance": explained}
        return [
            {**batch, **shared, "advantages": ours, "returns": theirs}
            for batch, ours, theirs in zip(batches, advantages, returns, strict=True)
        ]

    def _advantages(self, batch: Batch, counted: Tensor) -> Tensor:
        """Returns the advantage of writing each token, (B, T-1), not whitened."""
        rewards = torch.zeros_like(batch["old_values"])
        if self.kl.place == "reward":
            rewards -= self.kl_weight * (batch["old_log_probs"] - batch["reference_log_probs"])
        columns = torch.arange(counted.shape[1], device=counted.device)
        last = torch.where(counted, columns, -1).amax(-1, keepdim=True)  # (B, 1), -1 in a row without a token
        rewards += torch.where(columns == last, batch["scores"].unsqueeze(-1), 0.0)
        return gae(rewards, batch["old_values"], counted, gamma=self.gamma, lam=self.lam)

    def _kl(self, batch: Batch) -> Tensor:
        """Returns the KL of each answer that has a score, summed over its tokens, in nats: one draw's estimate."""
        apart: Tensor = (batch["old_log_probs"] - batch["reference_log_probs"]).sum(-1)  # 0 where nothing counts
        return apart[~batch["scores"].isnan()]

    def _adapt(self, kl: float) -> None:
        """Takes the coefficient on to this rollout, by the KL of the one before it; prepared anew, it stays."""
        if self._observed is not None and self._observed[0] < self._rollout:
            self.kl_weight = self.kl.controller.after(self.kl_weight, kl=self._observed[1])
        self._observed = (self._rollout, kl)

    @property
    def _rollout(self) -> int:
        """The number of the current window, the same for all steps that pass over it."""
        return self.trainer.global_step // self.passes

    # The losses -------------------------------------------------------------------------------------------------------

    def count_items(self, batch: Batch) -> int | Tensor:
        return completion_mask(batch).sum() if "labels" in batch else len(batch["prompt_input_ids"])

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        counted = completion_mask(batch)
        actor, critic = self._actor_output(batch, counted), self._critic_output(batch, counted)
        return StepOutput(
            sums={**actor.sums, **critic.sums},
            metrics={**actor.metrics, **critic.metrics, **self._rollout_metrics(batch)},
        )

    def _rollout_metrics(self, batch: Batch) -> dict[str, Metric]:
        """Returns metrics of the answers, the same in all passes over them."""
        name, kl = self.actor, self._kl(batch)
        return {
            **{key: (total, count) for key, (total, count) in batch["shown"].items()},
            f"{name}/kl": (kl.sum(), completion_mask(batch).sum()),
            f"{name}/kl_per_answer": (kl.sum(), len(kl)),
            f"{name}/kl_weight": (batch["kl_weight"], 1),
        }

    def _actor_output(self, batch: Batch, counted: Tensor) -> StepOutput:
        has_bonus = self.loss.entropy_weight > 0
        said = self._log_probs(self.actor, batch, counted, entropy=True, entropy_gradient=has_bonus)
        assert said.entropy is not None
        old, advantages = batch["old_log_probs"][counted], batch["advantages"][counted]
        terms = self.policy_loss(said.log_probs, old, advantages, None)
        name, count = self.actor, len(old)
        sums = {f"{name}/policy_loss": terms.loss.sum()}
        if has_bonus:
            sums[f"{name}/entropy_bonus"] = -self.loss.entropy_weight * said.entropy.sum()
        if self.kl.place == "loss":
            near = batch["reference_log_probs"][counted]
            apart = KL_ESTIMATES[self.kl.estimator](said.log_probs, near)
            sums[f"{name}/kl_loss"] = batch["kl_weight"] * apart.sum()
        metrics: dict[str, Metric] = {key: (value.detach(), count) for key, value in sums.items()}
        metrics[f"{name}/entropy"] = (said.entropy.detach().sum(), count)
        metrics[f"{name}/clipped"] = ((terms.is_low | terms.is_high).sum(), count)
        metrics[f"{name}/ratio"] = (terms.ratio.sum(), count)
        return StepOutput(sums=sums, metrics=metrics)

    def _critic_output(self, batch: Batch, counted: Tensor) -> StepOutput:
        losses, is_clipped = clipped_value_loss(
            token_scores(self.models[self.critic], batch)[:, :-1][counted],
            old_values=batch["old_values"][counted],
            returns=batch["returns"][counted],
            clip=self.loss.value_clip,
        )
        name, count = self.critic, len(losses)
        metrics: dict[str, Metric] = {
            f"{name}/value_loss": (losses.detach().sum(), count),
            f"{name}/clipped": (is_clipped.sum(), count),
            f"{name}/explained_variance": (batch["explained_variance"], 1),
        }
        return StepOutput(sums={f"{name}/value_loss": losses.sum()}, metrics=metrics)

    def _log_probs(self, name: str, batch: Batch, counted: Tensor, **options: bool) -> TokenLogProbs:
        """Returns what a model says of the answers, at the temperature at which they are drawn."""
        model, temperature = self.models[name], self.generation.temperature
        tap = self.taps.get(model)
        return token_log_probs(model, batch, counted, temperature=temperature, tap=tap, **options)

    # Held-out prompts -------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        rollout = self._answer(batch, seeds=None, options=greedy(self.generation))
        counted = completion_mask(rollout.batch)
        said, near = (self._log_probs(name, rollout.batch, counted).log_probs for name in (self.actor, self.frozen))
        if not self.trainer.is_filler:
            self._said = [*self._said, *rollout.rows()][:NUM_SHOWN]
        shown = rollout.metrics(self.rewards.names, model=self.actor)
        return {**shown, f"{self.actor}/kl": ((said - near).sum(), len(said))}

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """Logs some of the held-out answers, beside those of the first validation."""
        before, self._said, said = self._before, [], self._said
        if not before:
            self._before = said
        elif self.trainer.is_main:
            columns = ["prompt", "before", "reward before", "now", "reward now"]
            rows = [[*old, *new[1:]] for old, new in zip(before, said, strict=False)]
            self.trainer.log_table("held_out", columns=columns, rows=rows, step=self.trainer.global_step)

    def on_train_step_end(self, metrics: dict[str, float]) -> None:
        if self.health is not None:
            warn(self.health.watch(metrics, step=self.trainer.global_step), is_main=self.trainer.is_main)

    # What both have in common -----------------------------------------------------------------------------------------

    def _answer(self, batch: Batch, *, seeds: list[int] | None, options: GenerationOptions) -> Rollout:
        """Returns the actor's answers to the prompts of a batch, and what they are worth."""
        if self._weights_of_step != self.trainer.global_step:
            self.writer.update_weights()
            self._weights_of_step = self.trainer.global_step
        written = self.writer.write(prompts_of(batch), seeds=seeds, options=options)
        return score_answers(
            batch,
            written,
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            missing_end_penalty=self.missing_end_penalty,
            device=self.trainer.device,
        )

    def _show(self, rollout: Rollout) -> None:
        """Logs some drawn answers with their scores, every so often."""
        step = self.trainer.global_step
        if self._shown_at is not None and step < self._shown_at + self.samples_every:
            return
        self._shown_at = step
        if self.trainer.is_main:
            columns, rows = ["prompt", "answer", "reward"], rollout.rows()[:NUM_SHOWN]
            self.trainer.log_table("completions", columns=columns, rows=rows, step=step)

    # What survives a restart ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        health = {} if self.health is None else self.health.state_dict()
        return {"kl_weight": self.kl_weight, "observed": self._observed, "health": health, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_weight, self._observed, self._before = state["kl_weight"], state["observed"], state["before"]
        if self.health is not None and state["health"]:
            self.health.load_state_dict(state["health"])


def _drawn(options: GenerationOptions) -> GenerationOptions:
    if options.temperature == 0:
        raise ConfigError("task.generation.temperature=0: answers to learn from are drawn; give a number above 0")
    return options
