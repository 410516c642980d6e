"""What can be told of a run before its first update: whether the ranks agree, and whose weights a loss reaches."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from trainer import distributed
from trainer.config import ConfigError
from trainer.data.device import to_device
from trainer.data.loader import data_key
from trainer.handle import ModelHandle
from trainer.task import JOINT, Batch
from trainer.window import owner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.trainer import MultiModelTrainer

log = logging.getLogger("trainer.preflight")

_LISTED = 3  # names in a message


@dataclass(kw_only=True)
class Finding:
    """What one check found on this rank.

    Args:
        fact: What holds, in one line.
        problems: What stops the run.
        warnings: What does not.
    """

    fact: str = ""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run_checks(checks: Mapping[str, Callable[[], Finding]]) -> None:
    """Runs checks by name and logs a line for each; every rank must call it with the same.

    Raises one ConfigError with the problems of all checks and ranks, on every rank: one that goes on alone would wait
    for the others forever.
    """
    problems: list[str] = []
    for name, check in checks.items():
        finding = check()
        if finding.fact:
            log.info("preflight: %s: %s", name, finding.fact)
        for warning in finding.warnings if distributed.is_main() else ():
            log.warning("preflight: %s: %s", name, warning)
        own = finding.problems
        problems += [f"preflight: {problem} (task.preflight.{name}=false skips this check)" for problem in own]
    refuse_together(problems)


def refuse_together(problems: Sequence[str]) -> None:
    """Raises one ConfigError on every rank with the problems of all, if there are any; every rank must call it."""
    found = merge(distributed.gather(list(problems)))
    if found:
        raise ConfigError(*found)


def merge(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Returns the sentences of all ranks, each once, with the ranks that said it where not all did."""
    sentences = dict.fromkeys(sentence for theirs in by_rank for sentence in theirs)
    merged = []
    for sentence in sentences:
        ranks = [str(rank) for rank, theirs in enumerate(by_rank) if sentence in theirs]
        merged.append(sentence if len(ranks) == len(by_rank) else f"rank {', '.join(ranks)}: {sentence}")
    return merged


# --- whether all ranks are in the same run ---


def rank_facts(trainer: MultiModelTrainer) -> dict[str, str]:
    """Returns what all ranks must have alike: what to name it by, and the value or a digest of it."""
    facts = {"task": f"{type(trainer.task).__module__}.{type(trainer.task).__qualname__}"}
    for part, sources in (("train", trainer.train_loader), ("validation", trainer.validation_loader)):
        for name, loader in sources.loaders.items() if sources is not None else ():
            facts[f"examples of {data_key(name, part)}"] = str(len(loader.dataset))  # type: ignore[arg-type]
    for name, tokenizer in trainer.tokenizers.items():
        if tokenizer is not None:
            facts[f"tokenizer of models.{name}"] = tokenizer_digest(tokenizer)
    for name, text in trainer.checkpoint_texts.items():
        facts |= {f"{name}, {key}": value for key, value in _flat(yaml.safe_load(text))}
    return facts


def find_rank_differences(facts: Mapping[str, str]) -> list[str]:
    """Returns what the ranks do not have alike, the same on every rank; every rank must call it."""
    digest = _digest(json.dumps(facts, sort_keys=True))
    if len(set(distributed.gather(digest))) == 1:
        return []
    by_rank = distributed.gather(dict(facts))
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)
    problems = []
    for name in names:
        groups: dict[str, list[str]] = {}
        for rank, theirs in enumerate(by_rank):
            groups.setdefault(theirs.get(name, "absent"), []).append(str(rank))
        if len(groups) > 1:
            shown = "; ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in groups.items())
            problems.append(f"the ranks differ in {name}: {shown}; start all of them from the same files")
    return problems


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of the tokens, their ids and the chat template."""
    content = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    return _digest(json.dumps(content))


def _flat(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of a configuration by key, as digests: a value may be secret."""
    if isinstance(node, Mapping) and node:
        for name, child in node.items():
            yield from _flat(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, _digest(json.dumps(node, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- what the run will read ---


def sample_windows(trainer: MultiModelTrainer, *, limit: int) -> Iterator[list[Batch]]:
    """Yields the micro-batches of the next windows, those that count on this rank, as training will read them.

    Neither its order nor its workers are touched. For tasks whose models read one set of examples.
    """
    assert trainer.train_loader is not None
    loader = next(iter(trainer.train_loader.loaders.values()))
    for *_, window in islice(loader.plan.windows(trainer.global_step), limit):
        examples = [[loader.dataset[index] for index in micro.indices] for micro in window if not micro.is_filler]
        yield [to_device(loader.collate(items), trainer.device) for items in examples]


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Gives Python's, NumPy's and torch's random states back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


# --- whose weights a loss reaches ---


class GradientCheck:
    """Looks, within the first window, at the very graphs that are backpropagated, and says what they do not reach.

    A forward of its own before the first step would leave hooks, traces and counters in DeepSpeed's engines; the graph
    of the first backward costs nothing and is what training uses. No weight has changed when `before_update` raises.
    """

    def __init__(self, trained: Sequence[ModelHandle], frozen: Sequence[ModelHandle]) -> None:
        self.trained, self.frozen = list(trained), list(frozen)
        self._seen: set[int] = set()  # weights, by id, that a loss of this window depends on
        self._judged: set[str] = set()

    def before_backward(self, name: str, loss: Tensor) -> None:
        """Looks at one loss; every rank must call it.

        Args:
            name: A trained model's, or "joint".
        """
        weights = reached_weights(loss)
        self._seen |= {id(weight) for weight in weights}
        if name != JOINT:
            run_checks({"gradients": lambda: Finding(problems=self._missed(owner(name)))})

    def before_update(self, name: str) -> None:
        """Judges a model once all of its losses of the window were seen; every rank must call it."""
        if name not in self._judged:  # with its second update of a window all has been said
            self._judged.add(name)
            run_checks({"gradients": lambda: self._judge(name)})

    def _missed(self, name: str) -> list[str]:
        model = self._model(name)
        if any(id(weight) in self._seen for weight in model.trained_weights):
            return []
        problem = (
            f"models.{name} gets no gradient: its loss depends on none of its {len(model.trained_weights)} weights; "
            f"compute it from self.models['{name}'](...), with nothing detached in between"
        )
        return [problem]

    def _judge(self, name: str) -> Finding:
        model = self._model(name)
        problems = self._missed(name) + [
            f"models.{other.name} is frozen, but a loss depends on its weight {key}; set "
            f"models.{other.name}.trainable=true, or leave requires_grad as it is"
            for other in self.frozen
            for key, weight in islice(_of(other.module, self._seen), 1)
        ]
        trained = [(key, weight) for key, weight in model.module.named_parameters() if weight.requires_grad]
        # A weight that one rank's examples leave out, such as an expert's, is reached on another.
        unreached = distributed.gather([key for key, weight in trained if id(weight) not in self._seen])
        left = [key for key in unreached[0] if all(key in theirs for theirs in unreached)]
        warnings = []
        if left and not problems:
            more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
            warning = (
                f"{len(left)} of {len(trained)} trained weights of models.{name} get no gradient: "
                f"{', '.join(left[:_LISTED])}{more}; freeze them (models.{name}.freeze) if that is meant"
            )
            warnings = [warning]
        fact = f"{len(trained) - len(left)} of {len(trained)} trained weights of models.{name} get a gradient"
        if self.frozen:
            fact += f", none of {', '.join(other.name for other in self.frozen)}"
        return Finding(fact="" if problems else fact, problems=problems, warnings=warnings)

    def _model(self, name: str) -> ModelHandle:
        return next(model for model in self.trained if model.name == name)


def reached_weights(loss: Tensor) -> list[Tensor]:
    """Returns the leaves of a loss's graph: the tensors that its backward would add a gradient to."""
    start = get_gradient_edge(loss).node
    queue, seen, leaves = deque([start]), {start}, []
    while queue:
        node = queue.popleft()
        leaf = _leaf(node)
        if leaf is not None:
            leaves.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return leaves


def _leaf(node: Node) -> Tensor | None:
    # torch has no public class for the nodes that accumulate gradients; they alone hold their variable.
    return node.variable if node.name().endswith("AccumulateGrad") else None  # type: ignore[attr-defined]


def _of(module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    return ((key, weight) for key, weight in module.named_parameters() if id(weight) in seen)
