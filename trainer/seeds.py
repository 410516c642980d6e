"""Random states that follow from the seed, the step and the rank, and from nothing that ran before."""

import random

import numpy as np
import torch


def seed_everything(seed: int, *, step: int = 0, rank: int = 0) -> None:
    """Sets Python's, NumPy's and torch's random states."""
    value = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
