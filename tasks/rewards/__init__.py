"""Rewards of written answers: named functions, a user's own, and reward models, weighted."""

from tasks.rewards.reading import FUNCTIONS, Reward
from tasks.rewards.running import Answers, Rewards, means, read_rewards

__all__ = [
    "FUNCTIONS",
    "Answers",
    "Reward",
    "Rewards",
    "means",
    "read_rewards",
]
