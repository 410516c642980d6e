"""The writer that a configuration asks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from tasks.generation.local import LocalWriter, find_length_problems, num_positions
from tasks.generation.options import GenerationOptions
from tasks.generation.server import ServerWriter
from tasks.generation.writer import Writer
from trainer import ConfigError, ModelHandle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_writer(
    model: ModelHandle,
    tokenizer: PreTrainedTokenizerBase,
    *,
    options: GenerationOptions,
    device: torch.device,
    gather: Literal["auto"] | bool = "auto",
    prompt: int = 1,
    readers: Sequence[ModelHandle] = (),
) -> Writer:
    """Returns what writes the answers of a model; every rank must call it.

    Raises ConfigError where the options do not fit the model or the server.

    Args:
        options: Those of the longest answers, and whether a server writes them.
        device: Where the model computes.
        gather: Of `LocalWriter`.
        prompt: Tokens of the longest one.
        readers: The other models that read what is written, token by token.
    """
    told = [*readers, *([] if options.server is not None else [model])]  # a server tells its own positions
    problems = find_length_problems(
        {one.name: num_positions(one.module) for one in told}, prompt=prompt, options=options
    )
    if problems:
        raise ConfigError(*problems)
    server = options.server
    if server is not None:
        key = os.environ[server.api_key_env] if server.api_key_env is not None else None
        remote = ServerWriter(model, tokenizer, server=server, device=device, key=key)
        remote.check(options, prompt=prompt)
        return remote
    return LocalWriter(model, tokenizer, device=device, gather=gather)
