"""Prompts and answers inside token batches: taken apart, told in another model's tokens, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
import torch
from torch import Tensor

from trainer import IGNORED, Batch, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

_MARKS = ("[[first]]", "[[second]]", "[[third]]", "[[fourth]]")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt and its answer as token ids; both may be empty.

    Args:
        column: Where the answer begins in its batch.
    """

    prompt: list[int]
    answer: list[int]
    column: int


def exchanges_of(batch: Batch) -> list[Exchange]:
    """Returns each row's last answer, its last run of tokens with a label, and all that stands before it.

    The first token of a row is never in an answer, since nothing predicts it. A row without a label has no answer, and
    its prompt is empty.
    """
    tokens, labels = batch["input_ids"], batch["labels"]
    attended = batch.get("attention_mask")
    real = torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended != 0
    return [
        _last_exchange(row[kept].tolist(), (own[kept] != IGNORED).tolist(), columns=kept.nonzero().squeeze(-1).tolist())
        for row, own, kept in zip(tokens, labels, real, strict=True)
    ]


def _last_exchange(tokens: list[int], has_label: list[bool], *, columns: list[int]) -> Exchange:
    counted = [index for index, flag in enumerate(has_label) if flag and index > 0]
    if not counted:
        return Exchange(prompt=[], answer=[], column=1)
    stop = start = counted[-1] + 1
    while start > 1 and has_label[start - 1]:
        start -= 1
    return Exchange(prompt=tokens[:start], answer=tokens[start:stop], column=columns[start])


def join(exchanges: Sequence[Exchange], *, pad_id: int, device: torch.device) -> Batch:
    """Returns input_ids, labels (the answers') and attention_mask, (B, T), padded on the right.

    A row of nothing holds one pad that is attended to: attention over no token at all would be NaN.
    """
    pairs = [(one.prompt, one.answer) if one.prompt or one.answer else ([pad_id], []) for one in exchanges]
    width = max([2, *(len(prompt) + len(answer) for prompt, answer in pairs)])

    def table(rows: Iterable[list[int]], *, fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=device)

    return {
        "input_ids": table((prompt + answer for prompt, answer in pairs), fill=pad_id),
        "labels": table(([IGNORED] * len(prompt) + answer for prompt, answer in pairs), fill=IGNORED),
        "attention_mask": table(([1] * len(prompt + answer) for prompt, answer in pairs), fill=0),
    }


def answer_mask(columns: Sequence[int], lengths: Sequence[int], *, like: Tensor) -> Tensor:
    """Returns the positions that predict the first so many tokens of each row's answer, (B, T-1) bool.

    Args:
        columns: Where the answers begin.
        like: Token ids, (B, T).
    """
    positions = torch.arange(like.shape[1] - 1, device=like.device)
    first, count = (torch.tensor(list(values), device=like.device)[:, None] for values in (columns, lengths))
    return (positions >= first - 1) & (positions < first - 1 + count)


def find_packing_problem(batch: Batch, key: str) -> list[str]:
    """Returns the problem of rows of several documents, whose prompts cannot be told apart; `key` is their set's."""
    if "position_ids" not in batch:
        return []
    return [f"{key}: a row holds several examples, but this task needs rows of one each: data.packing=false"]


# Text -----------------------------------------------------------------------------------------------------------------


def read_alike(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> bool:
    """Returns whether token ids say the same to both tokenizers, in the same chat template."""
    return bool(
        source.get_vocab() == target.get_vocab()
        and source.chat_template == target.chat_template
        and source.eos_token_id == target.eos_token_id
    )


class Interpreter:
    """Tells exchanges of one tokenizer in the tokens of another, each with its own chat template.

    Args:
        source: The tokenizer of the exchanges.
        target: The other model's.
        ends: The source's ids that end an answer; default: its end token.
    """

    def __init__(
        self, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, *, ends: set[int] | None = None
    ) -> None:
        self.source, self.target = source, target
        self.ends = {source.eos_token_id} if ends is None else ends
        self.is_same = read_alike(source, target)
        self._frames = _frames(source) if source.chat_template is not None and not self.is_same else []

    def prompt(self, ids: list[int]) -> list[int]:
        """Returns a prompt in the target's tokens: the same messages in its chat template, where it has one."""
        if self.is_same or not ids:
            return ids
        return encode_prompt(self.messages(ids), self.target)

    def messages(self, ids: list[int]) -> list[Message]:
        """Returns what a prompt says; without a chat template it is one message of the user."""
        if self.source.chat_template is None:
            return [{"role": "user", "content": decode(self.source, ids, skips_special=True)}]
        text = decode(self.source, ids)
        for frame in self._frames:
            found = frame.parse(text)
            if found is not None:
                return found
        raise ValueError(
            "a prompt does not begin and end as the chat template of its tokenizer has it, so that its messages cannot "
            f"be told in another template: {text[:200]!r}"
        )

    def answer(self, ids: list[int], *, prompt: Sequence[int] = ()) -> list[int]:
        """Returns an answer in the target's tokens; with an end token where it has one.

        Args:
            prompt: What stands before it, as some tokenizers decode a text's first token without its space.
        """
        if self.is_same:
            return ids
        is_ended = bool(ids) and ids[-1] in self.ends
        text = continuation(self.source, prompt, ids[:-1] if is_ended else ids)
        told = [int(token) for token in self.target(text, add_special_tokens=False, verbose=False)["input_ids"]]
        end = self.target.eos_token_id
        return [*told, int(end)] if is_ended and end is not None else told

    def tell(self, exchanges: Sequence[Exchange]) -> list[Exchange]:
        """Returns the exchanges in the target's tokens; their columns are those of `join`."""
        told = []
        for exchange in exchanges:
            prompt = self.prompt(exchange.prompt)
            answer = self.answer(exchange.answer, prompt=exchange.prompt)
            told.append(Exchange(prompt=prompt, answer=answer, column=len(prompt)))
        return told


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """What a chat template puts around and between the messages of a prompt.

    Args:
        roles: Of the first messages; then assistant and user take turns.
        between: What stands before an assistant's message, and before a later user's.
    """

    roles: list[str]
    opening: str
    after_system: str
    between: tuple[str, str]
    closing: str

    def parse(self, text: str) -> list[Message] | None:
        """Returns the messages of a prompt, None where it is not of this form."""
        if not (text.startswith(self.opening) and text.endswith(self.closing)):
            return None
        text = text[len(self.opening) : len(text) - len(self.closing)]
        messages: list[Message] = []
        if "system" in self.roles:
            system, found, text = text.partition(self.after_system)
            if not found:
                return None
            messages.append({"role": "system", "content": system})
        separators, turn = self.between, 0
        while True:
            said, found, rest = text.partition(separators[turn % 2])
            messages.append({"role": ("user", "assistant")[turn % 2], "content": said})
            if not found:
                # A prompt ends with what the user says; an assistant at the end means a text of another form.
                return messages if turn % 2 == 0 else None
            text, turn = rest, turn + 1


def _frames(tokenizer: PreTrainedTokenizerBase) -> list[_Frame]:
    """Returns the forms of a prompt in a chat template, without a system message and with one, found by marks."""
    frames: list[_Frame] = []
    for roles in (["user"], ["system", "user"]):
        said = [*roles, "assistant", "user"]
        messages = [{"role": role, "content": mark} for role, mark in zip(said, _MARKS, strict=False)]
        try:
            text = render_prompt(messages, tokenizer)
        except ConfigError:
            if roles == ["user"]:
                raise
            continue  # a template without a system message, of which no prompt has one
        # As it comes back from the tokens, which for some tokenizers is not quite what went in.
        back = decode(tokenizer, encode_prompt(messages, tokenizer))
        found = [_frame(form, roles=roles, num_messages=len(said)) for form in (back, text)]
        frames += [frame for frame in found if frame is not None]
    if not frames:
        raise ConfigError(
            "the messages of a prompt cannot be told apart in the chat template of the data's tokenizer, as nothing "
            "stands between them; give data.tokenizer with another template"
        )
    return frames


def _frame(text: str, *, roles: list[str], num_messages: int) -> _Frame | None:
    """Returns what stands around the marks of a rendered conversation, None where one is lost or touches another."""
    parts = []
    for mark in _MARKS[:num_messages]:
        before, found, text = text.partition(mark)
        if not found:
            return None
        parts.append(before)
    if "" in parts[1:]:
        return None
    after_system = parts[1] if "system" in roles else ""
    return _Frame(
        roles=roles, opening=parts[0], after_system=after_system, between=(parts[-2], parts[-1]), closing=text
    )


def render_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a conversation in the chat template, up to where the assistant is to go on."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of a tokenizer refuses the messages: {error}") from error


def encode_prompt(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of a conversation that the assistant is to go on with."""
    is_templated = tokenizer.chat_template is not None
    text = render_prompt(messages, tokenizer) if is_templated else "\n".join(one["content"] for one in messages)
    # A template has the special tokens.
    ids = [int(token) for token in tokenizer(text, add_special_tokens=not is_templated, verbose=False)["input_ids"]]
    # Some tokenizers close every text, but this one goes on.
    ids = ids[:-1] if not is_templated and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    return ids or [start_token(tokenizer)]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skips_special: bool = False) -> str:
    """Returns the text of token ids, exactly: nothing is tidied up."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=skips_special, clean_up_tokenization_spaces=False))


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Returns the text that an answer adds to its prompt, without special tokens."""
    before = decode(tokenizer, prompt, skips_special=True)
    whole = decode(tokenizer, [*prompt, *answer], skips_special=True)
    return whole[len(before) :] if whole.startswith(before) else decode(tokenizer, answer, skips_special=True)


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns what stands before a text that has no prompt, or nothing would predict its first token."""
    return int(tokenizer.bos_token_id) if tokenizer.bos_token_id is not None else pad_token(tokenizer)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the id to pad with; without one, the end token, as masks tell pads by length and never by id."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise ConfigError("a tokenizer has neither a pad token nor an end token; one of them is needed")
    return int(found)
