"""Shows what the models say to the same prompts, before and after training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.adapters import is_adapted
from trainer.callbacks.callback import Callback
from trainer.config import ConfigError
from trainer.data.tokenizers import end_tokens
from trainer.heartbeat import sign_of_life

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.handle import ModelHandle
    from trainer.task import TaskModule
    from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


class SampleTable(Callback):
    """Lets every model that can generate answer the prompts, greedily; trained ones before and after training.

    All ranks generate, since a sharded model needs them all; rank 0 keeps the text.

    Args:
        prompts: What a user would type; wrapped by the tokenizer's chat template if it has one.
        max_new_tokens: Where an answer is cut.
    """

    order = -10  # before the progress display, whose lines would mix with this one's

    def __init__(self, *, prompts: Sequence[str], max_new_tokens: int = 48) -> None:
        problems = []
        if not prompts:
            problems.append("callbacks.samples.prompts is empty; give at least one, or leave the callback out")
        elif isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
            problems.append(f"callbacks.samples.prompts={prompts}: must be a list of texts")
        if max_new_tokens < 1:
            problems.append(f"callbacks.samples.max_new_tokens={max_new_tokens}: must be at least 1")
        if problems:
            raise ConfigError(*problems)
        self.prompts, self.max_new_tokens = list(prompts), max_new_tokens
        self.answers: dict[str, list[str]] = {}  # column to one answer per prompt

    @property
    def columns(self) -> list[str]:
        """The prompt and one column per model and time."""
        return ["prompt", *self.answers]

    @property
    def rows(self) -> list[list[str]]:
        """One row per prompt."""
        return [[prompt, *(texts[i] for texts in self.answers.values())] for i, prompt in enumerate(self.prompts)]

    def setup(self, trainer: MultiModelTrainer, task: TaskModule, stage: str) -> None:
        speakers = _speakers(trainer)
        if any(trainer.tokenizers[name] is None for name in speakers):
            raise ConfigError(
                "callbacks.samples needs a tokenizer, and no model brings one; set data.tokenizer to a folder or a hub "
                "name, or leave the callback out"
            )
        if not speakers:
            raise ConfigError(
                f"callbacks.samples needs a model that can generate, and none of {', '.join(trainer.models)} can; "
                "leave the callback out"
            )

    def on_fit_start(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        frozen = {name: handle for name, handle in _speakers(trainer).items() if not handle.trainable}
        self._ask(trainer, {**frozen, **_labelled(_trained(trainer), "before")})

    def on_fit_end(self, trainer: MultiModelTrainer, task: TaskModule) -> None:
        self._ask(trainer, _labelled(_trained(trainer), "after"))

    def _ask(self, trainer: MultiModelTrainer, speakers: dict[str, ModelHandle]) -> None:
        missing = {column: handle for column, handle in speakers.items() if column not in self.answers}
        if not missing:
            return
        what = f"samples: {', '.join(missing)} answer {len(self.prompts)} prompts"
        if trainer.is_main:
            log.info("%s, up to %d tokens each", what, self.max_new_tokens)
        with sign_of_life(what) if trainer.is_main else nullcontext():
            for column, handle in missing.items():
                self.answers[column] = self._answers_of(handle, trainer)
        if trainer.is_main:
            trainer.log_table("samples", columns=self.columns, rows=self.rows, step=trainer.global_step)

    def _answers_of(self, handle: ModelHandle, trainer: MultiModelTrainer) -> list[str]:
        tokenizer = trainer.tokenizers[handle.name]
        assert tokenizer is not None  # checked in setup
        ends = end_tokens(handle.module, tokenizer)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
        inputs = pad_left([encode(prompt, tokenizer) for prompt in self.prompts], pad_id=pad_id)
        with evaluating(handle.module):
            tokens = handle.generate(
                input_ids=inputs["input_ids"].to(trainer.device),
                attention_mask=inputs["attention_mask"].to(trainer.device),
                max_new_tokens=self.max_new_tokens,
                pad_token_id=pad_id,
                **GREEDY,
            )
        new = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        return [str(tokenizer.decode(_until_end(ids, ends), skip_special_tokens=True)).strip() for ids in new]

    def state_dict(self) -> dict[str, Any]:
        return {"answers": {column: list(texts) for column, texts in self.answers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # A resumed run compares with what was said before the training began, not before it went on.
        self.answers = dict(state["answers"])


# The sampling values of a model's own generation_config are taken back, or transformers warns that they are ignored.
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def _speakers(trainer: MultiModelTrainer) -> dict[str, ModelHandle]:
    # By attribute: a model may come from anywhere. A wrapper with adapters has `generate` whatever it wraps.
    bases = {n: h.module.get_base_model() if is_adapted(h.module) else h.module for n, h in trainer.models.items()}
    return {name: trainer.models[name] for name in bases if callable(getattr(bases[name], "generate", None))}


def _trained(trainer: MultiModelTrainer) -> dict[str, ModelHandle]:
    return {name: handle for name, handle in _speakers(trainer).items() if handle.trainable}


def _labelled(handles: dict[str, ModelHandle], when: str) -> dict[str, ModelHandle]:
    return {f"{name} {when}": handle for name, handle in handles.items()}


def encode(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of a prompt, as a user's turn if the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])  # the template has them


def pad_left(sequences: Sequence[Sequence[int]], *, pad_id: int) -> dict[str, Tensor]:
    """Returns input_ids and attention_mask, (B, T), whose last column is every sequence's last token."""
    width = max(len(ids) for ids in sequences)
    padded = [[pad_id] * (width - len(ids)) + list(ids) for ids in sequences]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in sequences]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    return next((ids[:i] for i, token in enumerate(ids) if token in ends), ids)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts the module into evaluation mode for a while, and each of its parts back into its own afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
