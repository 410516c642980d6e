"""Answers written by a model of the run itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig

from tasks.generation.draws import TokenDraws
from tasks.generation.options import GenerationOptions
from tasks.generation.stops import StopTexts, up_to_end
from tasks.generation.writer import Written
from tasks.text.sequences import pad_token
from trainer import ConfigError, ModelHandle, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalWriter:
    """Writes with a model of the run, by transformers' `generate`, all prompts of a call at once.

    What is drawn from is exactly what the options say: nothing of the model's own generation_config but its end tokens.

    Args:
        device: Where the model computes.
        gather: Whether a ZeRO-3 model's weights are gathered once for a whole call; see `ModelHandle.generate`.
    """

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        gather: Literal["auto"] | bool = "auto",
    ) -> None:
        self.model, self.tokenizer, self.device, self.gather = model, tokenizer, device, gather
        self.ends = end_tokens(model.module, tokenizer)
        self.positions = num_positions(model.module)

    def write(
        self, prompts: Sequence[list[int]], *, seeds: Sequence[int] | None, options: GenerationOptions
    ) -> Written:
        """Returns an answer to each prompt; arguments as in `Writer.write`."""
        check_seeds(prompts, seeds)
        self.check_length(max(map(len, prompts), default=0), options)
        asked = [index for index, prompt in enumerate(prompts) if prompt]
        own_seeds = None if seeds is None else [seeds[index] for index in asked]
        rows = self._generate([prompts[index] for index in asked], seeds=own_seeds, options=options)
        written = Written(answers=[[] for _ in prompts], is_ended=[True for _ in prompts])
        for index, (answer, is_ended) in zip(asked, rows, strict=True):
            written.answers[index], written.is_ended[index] = answer, is_ended
        return written

    def update_weights(self) -> None:
        """Does nothing: the model is the one that is trained."""

    def check_length(self, prompt: int, options: GenerationOptions) -> None:
        """Raises ConfigError where a prompt of so many tokens leaves no room for the answer."""
        problems = find_length_problems({self.model.name: self.positions}, prompt=prompt, options=options)
        if problems:
            raise ConfigError(*problems)

    def _generate(
        self, prompts: list[list[int]], *, seeds: list[int] | None, options: GenerationOptions
    ) -> list[tuple[list[int], bool]]:
        pad_id = pad_token(self.tokenizer)
        # A single token stands in where this rank has nothing to ask: a sharded model needs every rank.
        rows, new = (prompts, options.max_new_tokens) if prompts else ([[pad_id]], 1)
        width = max(map(len, rows))
        criteria = StopTexts(options.stop, tokenizer=self.tokenizer, prompt_width=width, num_rows=len(rows))
        arguments: dict[str, Any] = {"stopping_criteria": [criteria]} if options.stop else {}
        if prompts and seeds is not None and options.temperature > 0:
            arguments["logits_processor"] = [TokenDraws(options, seeds, prompt_width=width)]
        with without_own_options(self.model.module):
            tokens = self.model.generate(
                gather=self.gather,
                input_ids=torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=self.device),
                attention_mask=torch.tensor(
                    [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device
                ),
                max_new_tokens=new,
                do_sample=False,  # the draws are made by the scores
                use_cache=True,
                pad_token_id=pad_id,
                eos_token_id=sorted(self.ends) or None,
                **arguments,
            )
        return [
            self._until(ids, length)
            for ids, length in zip(tokens[: len(prompts), width:].tolist(), criteria.lengths, strict=False)
        ]

    def _until(self, ids: list[int], length: int | None) -> tuple[list[int], bool]:
        answer, is_ended = up_to_end(ids, self.ends)
        if length is not None and length < len(answer):
            return answer[:length], True
        return answer, is_ended or length is not None


def check_seeds(prompts: Sequence[list[int]], seeds: Sequence[int] | None) -> None:
    """Raises ValueError unless there is a seed for each prompt, or none at all."""
    if seeds is not None and len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one for each: row_seeds(...)")


def find_length_problems(positions: Mapping[str, int | None], *, prompt: int, options: GenerationOptions) -> list[str]:
    """Returns which models have too few positions for a prompt of so many tokens and the longest answer.

    Args:
        positions: By model; None: it does not say.
    """
    return [
        f"a prompt of {prompt} tokens and {options.max_new_tokens} new ones (max_new_tokens) are more than the "
        f"{known} positions of models.{name}; set a smaller max_new_tokens, or shorten the prompts (data.block_size)"
        for name, known in positions.items()
        if known is not None and prompt + options.max_new_tokens > known
    ]


def num_positions(module: nn.Module) -> int | None:
    """Returns how many tokens a model can tell apart by their place, None where it does not say."""
    config = getattr(module, "config", None)
    found = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    return found if isinstance(found, int) and found > 0 else None


@contextmanager
def without_own_options(module: nn.Module) -> Iterator[None]:
    """Has `generate` know nothing of a model's own generation_config for a while.

    It may hold penalties, forced, forbidden or suppressed tokens, a least length, a watermark, and more with each
    version of transformers; they would change what is drawn from, and what a policy is taken to have drawn from.
    """
    # All parts: a model with adapters gives its own to the one it wraps.
    kept = [(part, part.generation_config) for part in module.modules() if "generation_config" in vars(part)]
    for part, _ in kept:
        part.generation_config = GenerationConfig()  # type: ignore[assignment,no-untyped-call]
    try:
        yield
    finally:
        for part, own in kept:
            part.generation_config = own
