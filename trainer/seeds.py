"""Random states that follow from the seed, the step and the rank, and from nothing that ran before."""

import random
import zlib

import numpy as np
import torch


def seed_everything(seed: int, *stream: int | str) -> None:
    """Sets Python's, NumPy's and torch's random states; each stream, such as (step, rank), has its own numbers."""
    words = [zlib.crc32(word.encode()) if isinstance(word, str) else word for word in stream]
    value = int(np.random.SeedSequence([seed, *words]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
