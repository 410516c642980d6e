"""Which tokens models share, and under which ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from trainer import ConfigError, ModelHandle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_SHARED = 0.9  # of the smaller vocabulary, and of the tokens of a text: with less, the tokenizers are different
PROBES = (
    "The quick brown fox jumps over the lazy dog; nobody expected 12,345 of them in 2024.",
    "Why do you think that it won't work? Because I've tried it before, and it didn't.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Übung macht den Meister. Où est la bibliothèque? ¿Dónde está? 你好, мир!",
)


def shared_vocabulary(configs: Mapping[str, PreTrainedConfig], *, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Returns how many of the first logits all models share.

    Heads of one family are padded to different sizes (Qwen2.5: 151936 and 152064 rows for 151665 tokens): all are cut
    to the tokenizer's real size. Padding the smaller one instead would give the made-up rows part of the mass.

    Args:
        configs: Name of a model to its configuration.
    """
    sizes: dict[str, int] = {name: config.get_text_config().vocab_size for name, config in configs.items()}
    num_tokens: int | None = None if tokenizer is None else num_ids(tokenizer)
    numbers = ", ".join(f"models.{name} has {size} logits" for name, size in sizes.items())
    if num_tokens is not None and num_tokens > min(sizes.values()):
        raise ConfigError(f"{numbers}, but the tokenizer has {num_tokens} tokens; every model must know all of them")
    if len(set(sizes.values())) == 1:
        return min(sizes.values())
    if num_tokens is None:
        raise ConfigError(f"{numbers}, and no tokenizer says how many of them are tokens; give data.tokenizer")
    return num_tokens


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns one more than the tokenizer's largest id; its ids may have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A model's tokens: what each logit stands for.

    Args:
        name: Of the model.
        num_logits: Rows of its head, those without a token included.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    num_logits: int


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The tokens that a student and a teacher share; S of them.

    Args:
        first: How many of the first logits are the same tokens on both sides; None where they must be gathered.
        student_ids: The student's id of each shared token, (S,), ascending.
        teacher_ids: The teacher's id of the same tokens, (S,).
        student_rest: The student's other tokens, (R,).
        teacher_rest: The teacher's other tokens, (Q,).
        names: Of the student and the teacher.
    """

    first: int | None
    student_ids: Tensor
    teacher_ids: Tensor
    student_rest: Tensor
    teacher_rest: Tensor
    names: tuple[str, str]

    @property
    def has_tail(self) -> bool:
        """Whether one column more than the shared tokens holds the student's other tokens together.

        Without such tokens of the student there is none: the teacher's distribution is then that over the shared
        tokens, since the student could never give its other tokens any probability.
        """
        return len(self.student_rest) > 0

    @property
    def is_one_sided(self) -> bool:
        """Whether only the student can be in the tail, the teacher never: KL(student || teacher) is then infinite."""
        return self.has_tail and len(self.teacher_rest) == 0

    def apply(self, student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns the logits of both over the same columns: the shared tokens, and last, where there is one, the tail.

        With z = T * logsumexp(rest / T), softmax(. / T) gives the tail the probability that softmax gave all of the
        rest at that temperature; so the columns hold for this temperature only. z is -inf where nothing is left. Rows
        of a head that are no token are dropped on both sides.

        Args:
            student: Logits, (N, V) with V of the student's head; keeps its graph.
            teacher: Logits, (N, V) with V of the teacher's head.
        """
        if self.first is not None:
            return student[:, : self.first], teacher[:, : self.first]
        return (
            self._columns(student, self.student_ids, self.student_rest, temperature=temperature),
            self._columns(teacher, self.teacher_ids, self.teacher_rest, temperature=temperature),
        )

    def _columns(self, logits: Tensor, shared: Tensor, rest: Tensor, *, temperature: float) -> Tensor:
        device = logits.device
        columns = logits.index_select(1, shared.to(device))
        if not self.has_tail:
            return columns
        if len(rest) == 0:
            return torch.cat([columns, columns.new_full((len(columns), 1), -torch.inf)], dim=1)
        tail = temperature * torch.logsumexp(logits.index_select(1, rest.to(device)) / temperature, dim=1, keepdim=True)
        return torch.cat([columns, tail], dim=1)

    def column_of(self, tokens: Tensor) -> Tensor:
        """Returns the column of each of the student's token ids, (...); the tail's for one that the teacher lacks."""
        if self.first is not None:
            return tokens
        table = torch.full((self._size,), len(self.student_ids))
        table[self.student_ids] = torch.arange(len(self.student_ids))
        return table.to(tokens.device)[tokens]

    def to_teacher(self, input_ids: Tensor, attended: Tensor | None = None) -> Tensor:
        """Returns a text's token ids for the teacher, (B, T).

        Raises ConfigError for a text with tokens that the teacher lacks.

        Args:
            input_ids: The student's, (B, T).
            attended: 0 where a token is none, (B, T); the teacher's id there is of no meaning.
        """
        if self.first is not None:
            return input_ids
        table = torch.full((self._size,), -1)
        table[self.student_ids] = self.teacher_ids
        ids: Tensor = table.to(input_ids.device)[input_ids]
        missing = ids < 0 if attended is None else (ids < 0) & (attended != 0)
        if missing.any():
            student, teacher = self.names
            examples = sorted(set(input_ids[missing].tolist()))[:5]
            raise ConfigError(
                f"{int(missing.sum())} of {input_ids.numel()} tokens of a batch are unknown to models.{teacher}, such "
                f"as id {', '.join(map(str, examples))} of models.{student}; it cannot read this text: leave these "
                "tokens out of it, or use task=distill_sequence or task=distill_unaligned"
            )
        return ids.clamp(min=0)

    @property
    def _size(self) -> int:
        return int(torch.cat([self.student_ids, self.student_rest]).max()) + 1


def align(student: Vocabulary, teacher: Vocabulary, *, texts: Sequence[str] = PROBES) -> Alignment:
    """Returns which tokens two models share; raises ConfigError where their tokenizers are different ones.

    What is compared is the map from token to id, not its size: vocabularies of one size may be permuted.

    Args:
        texts: What both must cut into the same tokens, for the most part; give some of the data's.
    """
    tokenizers = {side.name: side.tokenizer for side in (student, teacher)}
    problems = find_alignment_problems(tokenizers, student=student.name, teacher=teacher.name, texts=texts)
    for side in (student, teacher):
        if num_ids(side.tokenizer) > side.num_logits:
            problems.append(
                f"models.{side.name} has {side.num_logits} logits, but its tokenizer has {num_ids(side.tokenizer)} "
                "tokens; every model must know all of its own"
            )
    if problems:
        raise ConfigError(*problems)
    left, right = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    first = None
    if left == right:
        # Heads of one size are left whole, as the models were trained; else what is no token is cut.
        is_same = student.num_logits == teacher.num_logits
        first = student.num_logits if is_same else num_ids(student.tokenizer)
    pairs = sorted((left[token], right[token]) for token in left.keys() & right.keys())
    return Alignment(
        first=first,
        student_ids=torch.tensor([pair[0] for pair in pairs]),
        teacher_ids=torch.tensor([pair[1] for pair in pairs]),
        student_rest=torch.tensor(sorted(left[token] for token in left.keys() - right.keys()), dtype=torch.long),
        teacher_rest=torch.tensor(sorted(right[token] for token in right.keys() - left.keys()), dtype=torch.long),
        names=(student.name, teacher.name),
    )


def find_alignment_problems(
    tokenizers: Mapping[str, PreTrainedTokenizerBase | None],
    *,
    student: str,
    teacher: str,
    texts: Sequence[str] = PROBES,
) -> list[str]:
    """Returns why a student's logits cannot be compared with a teacher's; [] where no tokenizer tells.

    Args:
        tokenizers: By model.
        texts: What both must cut into the same tokens, for the most part.
    """
    left, right = tokenizers.get(student), tokenizers.get(teacher)
    if left is None or right is None or left is right:
        return []
    own, other = left.get_vocab(), right.get_vocab()
    if own == other:
        return []
    num_shared = len(own.keys() & other.keys())
    known, same, total = _compare_texts(left, right, texts)
    least = min(len(own), len(other))
    if num_shared >= LEAST_SHARED * least and min(known, same) >= LEAST_SHARED * total:
        return []
    problem = (
        f"models.{student} ({len(own)} tokens) and models.{teacher} ({len(other)} tokens) have different tokenizers: "
        f"they share {num_shared} tokens, {num_shared / least:.1%} of the smaller vocabulary; of {total} tokens of "
        f"text models.{teacher} knows {known} and has {same} in the same place ({LEAST_SHARED:.0%} of each are "
        "needed). "
        f"{_example(left, right, texts, names=(student, teacher))}"
        "Their logits cannot be compared token by token; use task=distill_sequence, where the student learns from text "
        "that the teacher writes, task=distill_unaligned, where it learns from the sorted probabilities, or models of "
        "one family"
    )
    return [problem]


def _compare_texts(
    left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[int, int, int]:
    """Returns how many tokens of the texts the right side knows and would cut alike, and how many there are."""
    vocabulary = right.get_vocab()
    known = same = total = 0
    for text in texts:
        own, other = _tokens(left, text), _tokens(right, text)
        known += sum(token in vocabulary for token in own)
        # Not by position: one token more at the start would move all that follow.
        same += sum(block.size for block in SequenceMatcher(None, own, other, autojunk=False).get_matching_blocks())
        total += len(own)
    return known, same, total


def _example(
    left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase, texts: Sequence[str], *, names: tuple[str, str]
) -> str:
    """Returns a sentence with the beginning of the first text that both cut differently, "" if there is none."""
    for text in texts:
        words = " ".join(text.split()[:4])
        own, other = _tokens(left, words), _tokens(right, words)
        if own != other:
            return f"{words!r} is {own} in models.{names[0]} and {other} in models.{names[1]}. "
    return ""


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]


def vocabulary_of(model: ModelHandle, tokenizer: PreTrainedTokenizerBase | None) -> Vocabulary | None:
    """Returns what a model's logits stand for; None where it is not transformers', or no tokenizer tells."""
    config = getattr(model.module, "config", None)
    if tokenizer is None or not isinstance(config, PreTrainedConfig):
        return None
    return Vocabulary(name=model.name, tokenizer=tokenizer, num_logits=config.get_text_config().vocab_size)


def share_vocabulary(
    models: Sequence[ModelHandle], tokenizers: Mapping[str, PreTrainedTokenizerBase | None]
) -> tuple[int | None, Alignment | None]:
    """Returns which logits mean the same: the first so many of all models (None: all), or those of an alignment.

    Args:
        models: The student first, then its teachers.
        tokenizers: What each reads by.
    """
    sides = [vocabulary_of(model, tokenizers[model.name]) for model in models]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides) or len(sides) == 1:
        return common_vocabulary(models, tokenizer=tokenizers[models[0].name]), None
    student, *teachers = known
    alignments = [align(student, teacher) for teacher in teachers]
    first = [alignment.first for alignment in alignments if alignment.first is not None]
    if len(first) == len(alignments):
        return min(first), None
    if len(alignments) > 1:
        raise ConfigError(
            "task.teacher names several models, and the tokens of one are not all the student's; give one teacher"
        )
    return None, alignments[0]


def common_vocabulary(models: Sequence[ModelHandle], *, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Returns how many of the first logits all models share; None: all, of models that are not transformers'."""
    configs = {model.name: getattr(model.module, "config", None) for model in models}
    known = {name: config for name, config in configs.items() if isinstance(config, PreTrainedConfig)}
    # Of models that are not transformers' the losses refuse logits of different sizes.
    return shared_vocabulary(known, tokenizer=tokenizer) if len(known) == len(configs) else None
