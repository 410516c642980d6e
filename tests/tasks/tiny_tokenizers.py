"""Tokenizers of a few tokens, one per character and some longer ones, whose text comes back exactly."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,?'0123456789:;()->=+_\n"
SPECIAL = ("<pad>", "<end>", "<user>", "<bot>", "<sys>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'user': '<user>', 'assistant': '<bot>', 'system': '<sys>'}[message.role] + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<end>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)
# A template in words, with a system message of its own where none is given.
WORDY = (
    "{% if messages[0].role != 'system' %}{{ 'be kind\n' }}{% endif %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tokenizer(
    merges: Sequence[str] = (),
    *,
    special: Sequence[str] = SPECIAL,
    characters: str = CHARACTERS,
    template: str | None = None,
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the special tokens first, then the characters, then the merged tokens.

    Args:
        merges: Pairs to be merged, such as "t h".
    """
    pairs = [tuple(merge.split()) for merge in merges]
    tokens = [*special, *characters, *("".join(pair) for pair in pairs)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))  # type: ignore[arg-type]
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=[token for token in special if token not in ("<pad>", "<end>")],
    )
    made.chat_template = template
    return made
