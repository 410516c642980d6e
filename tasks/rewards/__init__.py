"""Rewards of written answers: named functions, a user's own, and reward models, weighted."""

from tasks.rewards.answers import Answers
from tasks.rewards.reading import FUNCTIONS, Reward
from tasks.rewards.running import RewardError, Rewards, means, read_rewards

__all__ = [
    "FUNCTIONS",
    "Answers",
    "Reward",
    "RewardError",
    "Rewards",
    "means",
    "read_rewards",
]
