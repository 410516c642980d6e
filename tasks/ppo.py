"""PPO: an actor learns from scored answers of its own, and a critic learns what they will be worth."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.generation import (
    SERVER_PLACE,
    GenerationOptions,
    Writer,
    find_folder_problems,
    greedy,
    make_writer,
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
from tasks.policy.health import Health, Unrewarded, read_health, warn
from tasks.policy.options import read_drawn, read_ppo_kl, read_ppo_loss, whole
from tasks.policy.reference import ADAPTER, Reference, find_adapter_problems, open_reference
from tasks.policy.scored_answers import Rollout, score_answers
from tasks.rewards import read_rewards
from tasks.scores.intervals import SampleMean
from tasks.scores.scoring import token_scores
from tasks.text.language import completion_mask
from tasks.text.prompts import PROMPT_FIELDS, longest_prompt, prompts_of
from tasks.values import collected, find_role_problems, find_value_problems, is_at_least, is_single
from trainer import LOGITS, VALUES, Batch, ConfigError, Metric, ModelHandle, StepOutput, TaskModule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NUM_SHOWN = 8  # answers in a table
ROUNDING = 1e-12  # of a variance in float64, as a share of the mean square


class PPOTask(TaskModule):
    """Trains the actor by clipped policy gradients, the critic by regression (arXiv:1707.06347, eq. 7 and 9).

    Each window of prompts is a rollout: the actor answers, the answers are scored, and `epochs` global steps train both
    models on them. Every token is an action. Its reward is -coefficient * log(actor / reference); that of an answer's
    last token also has the answer's score (arXiv:1909.08593, sec. 2.2; arXiv:2203.02155, sec. 3.5).

    Args:
        actor: Name of the trained language model.
        critic: Name of the trained model that gives each token a value; it reads the actor's tokens.
        reference: What the actor stays near: the name of a frozen language model; "adapter": the actor without its LoRA
            adapters.
        rewards: What scores an answer, see `tasks.rewards`.
        generation: How training answers are drawn, see `tasks.generation`; held-out ones are greedy.
        epochs: Global steps on each rollout.
        gamma: The discount per token.
        lam: Of the advantages: 0: one step of the critic's; 1: all rewards that followed.
        whiten: Whether advantages get mean 0 and variance 1 over the global window.
        loss: See `PPOLossOptions` of `tasks.policy.options`.
        kl: See `PPOKlOptions` there.
        missing_end_penalty: Taken from the score of an answer that was cut.
        health: What is warned of, see `tasks.policy.health`; None: nothing.
        fused: Whether logits are made tile by tile: true, false, or "auto": where the heads allow it.
        samples_every: Global steps from one table of drawn answers to the next.
    """

    batch_fields, reads_one_batch = PROMPT_FIELDS, True
    may_differ = SERVER_PLACE

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
        share, at_least = "a number from 0 to 1", "a number of at least 0, and one that a float32 holds"
        problems += find_value_problems(
            "task",
            epochs=whole(epochs, least=1),
            samples_every=whole(samples_every, least=1),
            gamma=(gamma, is_at_least(gamma, 0) and gamma <= 1, share),
            lam=(lam, is_at_least(lam, 0) and lam <= 1, share),
            whiten=(whiten, isinstance(whiten, bool), "true or false"),
            missing_end_penalty=(
                missing_end_penalty,
                is_single(missing_end_penalty) and missing_end_penalty >= 0,
                at_least,
            ),
            fused=(fused, fused == "auto" or isinstance(fused, bool), "auto, true or false"),
        )
        with collected(problems):
            self.loss = read_ppo_loss(loss)
        with collected(problems):
            self.kl = read_ppo_kl(kl)
        with collected(problems):
            self.generation = read_drawn(generation)
        with collected(problems):
            self.rewards = read_rewards({} if rewards is None else rewards)
        with collected(problems):
            watched = read_health(health, without=["max_alike"])  # a prompt has one answer
        if problems:
            raise ConfigError(*problems)
        self.actor, self.critic, self.compared = actor, critic, reference
        self.frozen = [] if reference == ADAPTER else [reference]  # a model of its own
        self.policy_loss = PolicyLoss(clip_low=self.loss.clip_low, clip_high=self.loss.clip_high)
        self.health = None if watched is None else Health(watched, prefix=f"train/{actor}/")
        self.unrewarded = Unrewarded(self.rewards.weighted_names)
        self.passes, self.gamma, self.lam, self.whiten = epochs, gamma, lam, whiten
        self.missing_end_penalty, self.fused, self.samples_every = missing_end_penalty, fused, samples_every
        self.own_tokens = self.rewards.model_names
        self.reads = {**dict.fromkeys((actor, *self.frozen), LOGITS), critic: VALUES, **self.rewards.reads}
        self.metric_labels = {
            "reward_low": "reward, 95 % interval from",
            "reward_high": "reward, 95 % interval to",
            **{f"reward/{name}": f"- {name}" for name in self.rewards.names},
            "kl": "log p / reference (nats a token)",  # of greedy text, so that it is no estimate of the KL
            "answer_tokens": "tokens of an answer",
            "ended": "share of answers that end",
            "value_loss": "loss of the values",
        }
        self.taps = HeadTaps()
        self.kl_weight = self.kl.weight  # of the current rollout
        self._observed: tuple[int, float] | None = None  # the last rollout and its KL per answer
        self._held_out = SampleMean()  # the scores of the current validation
        self._said: list[list[str]] = []  # held-out prompts, answers and rewards of the current validation
        self._before: list[list[str]] = []  # those of the first one
        self._shown_at: int | None = None  # the global step of the last table of drawn answers
        self._weights_of_step: int | None = None  # the global step whose weights the writer has

    def models_for(self, mode: str, names: Sequence[str]) -> list[str]:
        if mode == "export":
            return [name for name in names if name in (self.actor, self.critic)]
        needed = (self.actor, self.critic, *self.frozen, *self.own_tokens)
        return [name for name in names if name in needed or (mode == "fit" and name != "reference")]

    def check_models(self, trainable: Mapping[str, bool], *, stage: str) -> list[str]:
        problems = []
        roles = [("actor", self.actor, True), ("critic", self.critic, True)]
        roles += [("reference", name, False) for name in self.frozen]
        for role, name, is_trained in roles:
            if name not in trainable and not (stage == "export" and role == "reference"):
                others = f"; or take {ADAPTER}" if role == "reference" else ""
                problems.append(f"task.{role}={name}: models has no {name}, only {', '.join(trainable)}{others}")
            elif trainable.get(name, False) != is_trained and (stage == "fit" or not is_trained):
                does, value = ("trains it", "true") if is_trained else ("keeps it as it is", "false")
                problems.append(
                    f"models.{name}.trainable={str(trainable[name]).lower()}, but task.{role} {does}; set it to {value}"
                )
        if stage == "export":
            return problems
        problems += find_folder_problems(self.generation.server, self.actor, trainable)
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
        self.tokenizer = tokenizer
        actor, device = self.models[self.actor], self.trainer.device
        frozen = [self.models[name] for name in self.frozen]
        self.rewards.setup(self, writer=self.actor)
        self.writer: Writer = make_writer(
            actor,
            tokenizer,
            options=self.generation,
            device=device,
            prompt=longest_prompt(self.trainer.sources),
            readers=[self.models[self.critic], *frozen, *self.rewards.readers],
        )
        self.comparison: Reference = open_reference(
            self.models, policy=self.actor, reference=self.compared, ask=self._log_prob_table
        )
        if self.fused is not False:
            self.taps, problems = tap_heads([actor, *frozen], vocabulary=None, device=device)
            if problems and self.fused is True:
                raise ConfigError(*(f"task.fused=true, but {problem}; set task.fused=auto" for problem in problems))

    # The rollout ------------------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Batch) -> Batch:
        seeds = row_seeds(self.trainer.seed, self._rollout, self.trainer.indices[""])
        rollout = self._answer(batch, seeds=seeds, options=self.generation)
        self._show(rollout)
        shown = {name: list(pair) for name, pair in rollout.metrics(self.rewards.names, model=self.actor).items()}
        return {**self._judge(rollout), "shown": shown}

    def _judge(self, rollout: Rollout) -> Batch:
        """Returns the answers with their scores, and with what the models say of them as they are now."""
        written, counted = rollout.batch, completion_mask(rollout.batch)
        actor, critic = self.models[self.actor], self.models[self.critic]
        # Or a dropout would make old log-probabilities another model's.
        with actor.evaluating(), critic.evaluating():
            old, values = self._log_prob_table(actor, written), token_scores(critic, written)[:, :-1]
        return {
            **written,
            "old_log_probs": old,
            "reference_log_probs": self.comparison.log_probs(written),
            "old_values": torch.where(counted, values, 0.0),
            "scores": rollout.scores,
        }

    def prepare_window(self, batches: list[Batch], *, is_filler: Sequence[bool]) -> list[Batch]:
        masks = [completion_mask(batch) for batch in batches]

        def of_real(values: list[Tensor]) -> Moments:
            return moments([value[:0] if filler else value for value, filler in zip(values, is_filler, strict=True)])

        kl = of_real([self._kl(batch) for batch in batches])
        self.unrewarded.check(kl.count, trainer=self.trainer)
        self._adapt(kl)
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

    def _adapt(self, kl: Moments) -> None:
        """Takes the coefficient on to this rollout, by the KL of the one before it; prepared anew, it stays.

        Args:
            kl: Of this rollout's answers that have a score.
        """
        if self._observed is not None and self._observed[0] < self._rollout:
            self.kl_weight = self.kl.controller.after(self.kl_weight, kl=self._observed[1])
        self._observed = (self._rollout, kl.mean) if kl.count else None

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
        said = self._log_probs(self.models[self.actor], batch, entropy=True, entropy_gradient=has_bonus)
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

    def _log_probs(self, model: ModelHandle, batch: Batch, **options: bool) -> TokenLogProbs:
        """Returns what a model says of the answers, at the temperature at which they are drawn."""
        counted, temperature = completion_mask(batch), self.generation.temperature
        return token_log_probs(model, batch, counted, temperature=temperature, tap=self.taps.get(model), **options)

    def _log_prob_table(self, model: ModelHandle, batch: Batch) -> Tensor:
        """Returns the log-probabilities of the answers' tokens, (B, T-1), 0 elsewhere."""
        return as_table(self._log_probs(model, batch).log_probs, completion_mask(batch))

    # Held-out prompts -------------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Metric]:
        rollout = self._answer(batch, seeds=None, options=greedy(self.generation))
        if batch_idx == 0:
            self._held_out = SampleMean()
        if not self.trainer.is_filler:
            self._held_out.add(rollout.scores)
            self._said = [*self._said, *rollout.rows()][:NUM_SHOWN]
        judged = self._judge(rollout)
        counted = completion_mask(judged)
        apart = judged["old_log_probs"] - judged["reference_log_probs"]
        errors = self._advantages(judged, counted)[counted].double()  # returns less values
        returns = errors + judged["old_values"][counted]
        own = {
            "value_loss": errors.square() / 2,
            "_error": errors,
            "_error_squared": errors.square(),
            "_return": returns,
            "_return_squared": returns.square(),
        }
        return {
            **rollout.metrics(self.rewards.names, model=self.actor),
            f"{self.actor}/kl": (apart.sum(), counted.sum()),
            **{f"{self.critic}/{name}": (values.sum(), len(values)) for name, values in own.items()},
        }

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        found = self._held_out.interval(f"{self.actor}/reward", self.trainer.device)
        if f"{self.critic}/_error" not in metrics:  # no answer has a score
            return found

        def moments_of(name: str) -> Moments:
            mean, squared = (metrics[f"{self.critic}/{key}"] for key in (name, f"{name}_squared"))
            variance = squared - mean**2
            return Moments(count=1, mean=mean, variance=variance if variance > ROUNDING * squared else 0.0)

        explained = explained_variance(moments_of("_return"), moments_of("_error"))
        return {**found, f"{self.critic}/explained_variance": explained}

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
            self.trainer.log_table("completions", columns=columns, rows=rows, step=step + 1)

    # What survives a restart ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        health = {} if self.health is None else self.health.state_dict()
        return {"kl_weight": self.kl_weight, "observed": self._observed, "health": health, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_weight, self._observed, self._before = state["kl_weight"], state["observed"], state["before"]
        if self.health is not None and state["health"]:
            self.health.load_state_dict(state["health"])
