"""Losses per token, and the names under which a term finds them."""

from tasks.losses.divergences import cross_entropy, forward_kl, reverse_kl, top1_agreement
from tasks.losses.functions import FUNCTIONS, TokenLoss, find_function
from tasks.losses.top_tokens import TopTokens

__all__ = [
    "FUNCTIONS",
    "TokenLoss",
    "TopTokens",
    "cross_entropy",
    "find_function",
    "forward_kl",
    "reverse_kl",
    "top1_agreement",
]
