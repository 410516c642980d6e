"""From rows to token examples: chat templates, labels of what is learnt, cutting or packing."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import jinja2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.data.example import Example, Tokens
from trainer.data.packing import chunk, pack
from trainer.data.row_sources import name_sources_of_rows, number_sources_of_rows
from trainer.data.rows import FORMATS, Message, Row, has_format, is_chat, is_pair, prompt_of
from trainer.task import IGNORED

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000
_TELL_EVERY_SECONDS = 5


class TextDataset(Dataset[dict[str, Tensor]]):
    """Tokenised examples; an item holds `input_ids` and `labels`, (time,), and `position_ids` where packed.

    Where rows have a `source`, an item holds `source` too, (time,): of each token, its place in `sources`.

    Args:
        groups: The names under which metrics tell sources apart, and the place among them of each source.
    """

    def __init__(
        self,
        examples: list[Example],
        *,
        prompts: list[str],
        sources: list[str] | None = None,
        groups: tuple[list[str], list[int]] | None = None,
    ) -> None:
        self.examples = examples
        self.prompts = prompts
        self.sources, self.groups = sources or [], groups or ([], [])

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        example = self.examples[index]
        arrays = {"input_ids": example.input_ids, "labels": example.labels}
        if example.position_ids is not None:
            arrays["position_ids"] = example.position_ids
        if example.sources is not None:
            arrays["source"] = example.sources
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}


def build_text_dataset(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, *, block_size: int, packing: bool
) -> TextDataset:
    """Returns the rows as examples of at most block_size tokens, or packed into blocks of that size.

    Longer examples are cut; only packed plain text goes on in another block. What has no label that counts is dropped.
    """
    examples: list[Example] = []
    prompts: list[str] = []
    num_cut = num_dropped = 0
    sources, source_ids = number_sources_of_rows(rows)
    group_names, places = name_sources_of_rows(rows)
    place_of = dict(zip(source_ids, places, strict=True))
    for index, (row, example) in enumerate(zip(rows, tokenize_rows(rows, tokenizer), strict=True)):
        prompt = prompt_of(row)
        if sources:
            example.sources = np.full_like(example.labels, source_ids[index])
        if packing and prompt is None:
            pieces = list(chunk(example, block_size))
        else:
            pieces = [example.cut(0, block_size)]
            num_cut += len(example) > block_size
        kept = [piece for piece in pieces if piece.num_counted > 0]
        examples += kept
        num_dropped += not kept
        if kept and prompt is not None:
            prompts.append(prompt)
    _report(num_rows=len(rows), num_cut=num_cut, num_dropped=num_dropped, block_size=block_size)
    return TextDataset(
        pack(examples, block_size) if packing else examples,
        prompts=prompts,
        sources=sources,
        groups=(group_names, [place_of[number] for number in range(len(sources))]),
    )


def render_prompt(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text that a model is to continue; where there is a template it holds all special tokens."""
    if tokenizer.chat_template is None:
        return prompt
    return _apply_template([{"role": "user", "content": prompt}], tokenizer, is_open=True)


def render_messages(prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text that a model is to continue of a prompt that is text or messages."""
    if isinstance(prompt, str):
        return render_prompt(prompt, tokenizer)
    if tokenizer.chat_template is None:
        raise ConfigError("messages need a chat template and the tokenizer has none; give data.tokenizer with one")
    return _apply_template(prompt, tokenizer, is_open=True)


def tokenize_rows(rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    """Yields one example per row, of any length: labels are the answers' tokens, of plain text all tokens."""
    told = time.monotonic()
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        if time.monotonic() - told > _TELL_EVERY_SECONDS:
            told = time.monotonic()
            log.info("tokenised %d of %d rows", start, len(rows))
        numbered = enumerate(rows[start : start + _ROWS_AT_ONCE], start=start + 1)
        yield from _tokenize([_render(row, tokenizer, number=number) for number, row in numbered], tokenizer)


def tokenize_answers(
    exchanges: Iterable[tuple[str | list[Message], str | list[Message]]], tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """Returns one example per prompt and answer, of any length; of the assistant's turns, the answer's are learnt."""
    rendered = []
    for number, (prompt, answer) in enumerate(exchanges, start=1):
        try:
            rendered.append(_render_answer(prompt, answer, tokenizer))
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error
    return list(_tokenize(rendered, tokenizer))


@dataclass(kw_only=True)
class _Rendered:
    """A row as text, with what stands before each answer and what is there at its end."""

    text: str
    answers: list[tuple[str, str]]
    is_templated: bool


def _render(row: Row, tokenizer: PreTrainedTokenizerBase, *, number: int) -> _Rendered:
    try:
        return _render_row(row, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"row {number}: {error}") from error


def _render_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> _Rendered:
    if not has_format(row):
        raise ConfigError(f"{FORMATS}, found {', '.join(row) or 'nothing'}")
    if is_chat(row):
        # A table gives every message every key of any message; the absent ones are None.
        return _render_chat(
            [{k: v for k, v in message.items() if v is not None} for message in row["messages"]], tokenizer
        )
    if not is_pair(row):
        return _Rendered(text=row["text"], answers=[("", row["text"])], is_templated=False)
    return _render_answer(row["prompt"], row["completion"], tokenizer)


def _render_answer(
    prompt: str | list[Message], answer: str | list[Message], tokenizer: PreTrainedTokenizerBase
) -> _Rendered:
    if isinstance(prompt, str) and isinstance(answer, str) and tokenizer.chat_template is None:
        return _Rendered(text=prompt + answer, answers=[(prompt, prompt + answer)], is_templated=False)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    told = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return _render_chat([*asked, *told], tokenizer, start=len(asked))


def _render_chat(messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, start: int = 0) -> _Rendered:
    """Returns a conversation as text; the assistant's turns from `start` on are its answers."""
    if tokenizer.chat_template is None:
        raise ConfigError("'messages' need a chat template and the tokenizer has none; give data.tokenizer with one")
    text = _apply_template(messages, tokenizer, is_open=False)
    answers: list[tuple[str, str]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn < start:
            continue
        before = _apply_template(messages[:turn], tokenizer, is_open=True)
        is_last = turn == len(messages) - 1
        until = text if is_last else _apply_template(messages[: turn + 1], tokenizer, is_open=False)
        if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
            raise ConfigError(
                f"the chat template renders messages 1 to {turn + 1} differently alone and as part of the whole, so "
                f"that the tokens of answer {len(answers) + 1} cannot be found; give rows with one answer each, or a "
                "tokenizer whose template only appends"
            )
        answers.append((before, until))
    return _Rendered(text=text, answers=answers, is_templated=True)


def _apply_template(messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, is_open: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open))
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template refuses the messages: {error}") from error


def _tokenize(rows: list[_Rendered], tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    encoded = {flag: _encode(rows, tokenizer, is_templated=flag) for flag in (True, False)}
    for rendered in rows:
        yield _label(rendered, encoded[rendered.is_templated], end=tokenizer.eos_token_id)


def _encode(rows: list[_Rendered], tokenizer: PreTrainedTokenizerBase, *, is_templated: bool) -> dict[str, Tokens]:
    """Returns every text of the rows with its tokens, each tokenised once, all in one call: fast ones go parallel."""
    chosen = [row for row in rows if row.is_templated == is_templated]
    texts = list({text for row in chosen for text in (row.text, *chain(*row.answers))})
    if not texts:
        return {}
    # verbose: a text longer than the model's context is cut or chunked later, and reported there.
    encoded = tokenizer(texts, add_special_tokens=not is_templated, verbose=False)["input_ids"]
    return {text: np.array(ids, dtype=np.int32) for text, ids in zip(texts, encoded, strict=True)}


def _label(rendered: _Rendered, encoded: dict[str, Tokens], *, end: int | None) -> Example:
    """Returns the tokens up to the last one that counts: what follows changes nothing in a causal model."""
    ids = encoded[rendered.text]
    if not rendered.is_templated and end is not None and ids[-1:].tolist() != [end]:
        ids = np.append(ids, np.int32(end))
    labels = np.full_like(ids, IGNORED)
    last = 0
    for before, until in rendered.answers:
        # Where the border falls inside a token, that token belongs to the answer.
        start = _common_length(encoded[before], ids)
        last = len(ids) if until == rendered.text else _common_length(encoded[until], ids)
        if rendered.is_templated:
            last = _after_first(end, ids, start=start, stop=last)
        labels[start:last] = ids[start:last]
    return Example(input_ids=ids[:last], labels=labels[:last])


def _common_length(left: Tokens, right: Tokens) -> int:
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size


def _after_first(token: int | None, ids: Tokens, *, start: int, stop: int) -> int:
    """Returns where an answer ends: after its first end-of-sequence token, as in generation, else at `stop`."""
    found = np.flatnonzero(ids[start:stop] == token)
    return start + int(found[0]) + 1 if len(found) else stop


def _report(*, num_rows: int, num_cut: int, num_dropped: int, block_size: int) -> None:
    if num_dropped == num_rows:
        raise ConfigError(
            f"none of {num_rows} examples has a label that counts within data.block_size={block_size} tokens; raise it"
        )
    if num_cut:
        log.info("cut %d of %d examples to %d tokens", num_cut, num_rows, block_size)
    if num_dropped:
        log.warning("dropped %d of %d examples: no label counts within %d tokens", num_dropped, num_rows, block_size)
