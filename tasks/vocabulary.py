"""Which tokens models share, and under which ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def shared_vocabulary(configs: Mapping[str, PreTrainedConfig], *, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Returns how many of the first logits all models share.

    Heads of one family are padded to different sizes (Qwen2.5: 151936 and 152064 rows for 151665 tokens): all are cut
    to the tokenizer's real size. Padding the smaller one instead would give the made-up rows part of the mass.

    Args:
        configs: Name of a model to its configuration.
    """
    sizes: dict[str, int] = {name: config.get_text_config().vocab_size for name, config in configs.items()}
    num_tokens: int | None = None if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
    numbers = ", ".join(f"models.{name} has {size} logits" for name, size in sizes.items())
    if num_tokens is not None and num_tokens > min(sizes.values()):
        raise ConfigError(f"{numbers}, but the tokenizer has {num_tokens} tokens; every model must know all of them")
    if len(set(sizes.values())) == 1:
        return min(sizes.values())
    if num_tokens is None:
        raise ConfigError(f"{numbers}, and no tokenizer says how many of them are tokens; give data.tokenizer")
    return num_tokens
