"""Losses per token, and the names under which a term finds them."""

from tasks.losses.divergences import (
    cross_entropy,
    entropy,
    forward_kl,
    generalised_jsd,
    reverse_kl,
    skew_kl,
    skew_reverse_kl,
    top1_agreement,
    total_variation,
)
from tasks.losses.functions import FUNCTIONS, TokenLoss, accepts_top_tokens, find_function
from tasks.losses.mixture import mix_teachers
from tasks.losses.top_tokens import TopTokens

__all__ = [
    "FUNCTIONS",
    "TokenLoss",
    "TopTokens",
    "accepts_top_tokens",
    "cross_entropy",
    "entropy",
    "find_function",
    "forward_kl",
    "generalised_jsd",
    "mix_teachers",
    "reverse_kl",
    "skew_kl",
    "skew_reverse_kl",
    "top1_agreement",
    "total_variation",
]
