"""The reference of a policy: what a recording holds and refuses, and a policy with its adapters switched off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tasks.logits.log_probs import row_sums
from tasks.policy import reference
from tasks.policy.reference import AdapterOff, FrozenReference, NoReference, Recording, digests_of, record_reference
from tasks.text.language import completion_mask, counted_logits, next_tokens
from tasks.text.preferences import both_sides
from tests.tasks.dpo_runs import LORA, held_out_pairs, train_pairs
from tests.tasks.task_runs import PAD, llama
from trainer import IGNORED, Batch, ConfigError, ModelHandle, TrainingData
from trainer.adapters import add_lora
from trainer.data.preferences import PreferenceCollator


class Handle:
    """What a reference sees of a model, without an engine."""

    name, dtype = "policy", torch.float32

    def __init__(self, module: nn.Module) -> None:
        self.module, self.asked = module, 0

    def __call__(self, **kwargs: Any) -> Any:
        self.asked += 1
        return self.module(**kwargs)

    def set_training(self, mode: bool) -> None:
        self.module.train(mode)

    evaluating = ModelHandle.evaluating


def ask(model: Any, answers: Batch) -> Tensor:
    counted = completion_mask(answers)
    log_probs = counted_logits(model, answers, counted).log_softmax(-1)
    return row_sums(log_probs.gather(-1, next_tokens(answers, counted)[:, None]).squeeze(-1), counted)


def run_of(train: Any, *, size: int = 4) -> Any:
    data = TrainingData(train=train, validation=held_out_pairs(), batch_size=size, collate=PreferenceCollator(PAD))  # type: ignore[arg-type]
    return SimpleNamespace(sources={"": data}, rank=0, world_size=1, is_main=True, device=torch.device("cpu"))


def record(model: Any, path: Path | None, *, count: int = 6, size: int = 4) -> Recording:
    return record_reference(run_of(train_pairs(count), size=size), model, ask, answers=both_sides, path=path)


def answers_of(pairs: Any) -> Batch:
    return both_sides(PreferenceCollator(PAD)(pairs))


def test_a_recording_says_what_the_model_does_in_any_batch(tmp_path: Path) -> None:
    model: Any = Handle(llama("small"))
    recording = record(model, tmp_path / "a" / "x.safetensors")

    for pairs in (train_pairs(6)[3:5], held_out_pairs()[::-1]):
        with torch.no_grad():
            expected = ask(model, answers_of(pairs))
        found = recording.log_probs(answers_of(pairs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(recording.values) == 2 * (6 + 7)


def test_a_file_is_read_once_it_is_there_and_extended_by_what_it_lacks(tmp_path: Path) -> None:
    model, path = Handle(llama("small")), tmp_path / "x.safetensors"
    first = record(model, path)
    asked = model.asked

    again = record(model, path, size=5)

    assert model.asked == asked  # nothing was computed
    assert np.array_equal(again.values, first.values)
    more = record(model, path, count=9)
    assert model.asked == asked + 1 + 1  # of three batches of four the one with pairs 5 to 8, and the last
    assert len(more.values) == len(first.values) + 2 * 3
    assert np.array_equal(record(model, path, count=9).digests, more.digests)


class Counted(list[Any]):
    """Examples, and how often each was read."""

    def __init__(self, pairs: Any) -> None:
        super().__init__(pairs)
        self.reads = [0] * len(self)

    def __getitem__(self, index: Any) -> Any:
        self.reads[index] += 1
        return super().__getitem__(index)


def test_each_example_is_read_and_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, hashed = Counted(train_pairs(6)), list[int]()

    def count(batch: Batch) -> Any:
        hashed.append(len(batch["input_ids"]))
        return digests_of(batch)

    monkeypatch.setattr(reference, "digests_of", count)
    record_reference(run_of(pairs), Handle(llama("small")), ask, answers=both_sides, path=None)  # type: ignore[arg-type]

    assert pairs.reads == [1] * 6
    assert hashed == [8, 4, 8, 6]  # both sides of batches of 4, 2, 4 and 3 pairs


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    assert len(record(Handle(llama("small")), None).values) == 26
    assert list(tmp_path.iterdir()) == []


def refusal(model: Any, path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        record(model, path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"task.cache={path}: ")
    return problem


def test_files_that_are_not_of_this_run_are_refused(tmp_path: Path) -> None:
    model, path = Handle(llama("small")), tmp_path / "x.safetensors"
    record(model, path)

    with torch.no_grad():
        next(model.module.parameters()).view(-1)[0] += 1e-4
    assert "was recorded with other weights" in refusal(model, path)
    other = Handle(llama("small"))
    other.dtype = torch.bfloat16
    assert "was recorded with other dtype, float32, than models of this run start with, bfloat16" in refusal(
        other, path
    )
    path.write_bytes(path.read_bytes()[:-9])
    assert "cannot be read" in refusal(Handle(llama("small")), path)
    path.write_text("{}")
    assert "cannot be read" in refusal(Handle(llama("small")), path)
    blocked = tmp_path / "x.safetensors" / "y.safetensors"
    assert "cannot be written to" in refusal(Handle(llama("small")), blocked)


def test_an_answer_that_is_not_in_it_is_no_zero(tmp_path: Path) -> None:
    recording = record(Handle(llama("small")), tmp_path / "x.safetensors")
    pair = dict(train_pairs(1)[0])
    labels = pair["chosen_labels"].clone()
    labels[-1] = IGNORED
    pair["chosen_labels"] = labels  # the same tokens, of which one does not count
    batch = answers_of([pair])

    with pytest.raises(ConfigError, match="an answer of this batch is not in it"):
        recording.log_probs(batch)
    assert recording.lacks(digests_of(batch)).tolist() == [True, False]


def test_adapters_that_are_off_leave_the_base_and_are_on_again() -> None:
    base = llama("small").eval()
    adapted = add_lora("policy", llama("small"), settings=LORA, seed=0).train()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.3)
    trainable = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    model: Any = Handle(adapted)
    batch = answers_of(train_pairs(3))

    found = AdapterOff(models={"policy": model}, name="policy", ask=ask).log_probs(batch)

    expected = FrozenReference(model=Handle(base), ask=ask).log_probs(batch)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    assert found is not None and not found.requires_grad
    assert adapted.training
    assert [name for name, weight in adapted.named_parameters() if weight.requires_grad] == trainable
    assert not torch.allclose(ask(model, batch), found)
    assert NoReference().log_probs(batch) is None
