"""Where two tokenizers first read the same text differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Numbers, spaces, line ends, accents, scripts and code: where tokenizers differ.
PROBE = "In 2024, it's  1,234.5 %:\n\n\tdéjà vu, Straße, 東京, Привет 🙂 <b>x</b> def f(a_b): return a_b**2 #\r\n"


def text_difference(
    text: str, left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase, who: tuple[str, str]
) -> str | None:
    """Returns what differs in how two tokenizers read a text, None where they give the same ids.

    Args:
        who: Whose they are, for people.
    """
    ids = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in (left, right)]
    return _first_difference(text, ids, (left, right), who)


def template_difference(
    text: str, left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase, who: tuple[str, str]
) -> str | None:
    """Returns what differs in how two tokenizers write and read a chat, None where one has no template."""
    if not (left.chat_template and right.chat_template):
        return None
    chat = [{"role": "user", "content": text[:200]}, {"role": "assistant", "content": PROBE.strip()}]
    written = [str(tokenizer.apply_chat_template(chat, tokenize=False)) for tokenizer in (left, right)]
    ids = [t.encode(w, add_special_tokens=False) for t, w in zip((left, right), written, strict=True)]
    difference = _first_difference(text, ids, (left, right), who)
    return f"through the chat template, {difference}" if difference else None


def _first_difference(
    text: str,
    ids: Sequence[Sequence[int]],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    who: tuple[str, str],
) -> str | None:
    if list(ids[0]) == list(ids[1]):
        return None
    pairs = zip(*ids, strict=False)
    at = next((i for i, (left, right) in enumerate(pairs) if left != right), min(map(len, ids)))
    shown = " and ".join(
        f"{_tokens(tokenizer, row[at : at + 6])} in {name}"
        for tokenizer, row, name in zip(tokenizers, ids, who, strict=True)
    )
    around = tokenizers[0].decode(list(ids[0][max(0, at - 8) : at + 8]))
    return f"the text {around!r} becomes, from its token {at} on, {shown}"


def _tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    return "[" + ", ".join(f"{token!r} {number}" for token, number in zip(tokens, ids, strict=True)) + "]"
