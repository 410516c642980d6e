"""What is scored of an export is the model that was loaded again, by every task: one with wrong weights is refused."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file

from tests.ranks import run_ranks
from tests.trainer.test_trainer import reset_accelerate
from trainer.__main__ import main
from trainer.export import export_model

RUN = ["data.tokenizer=embedded:bpe-4k", "trainer.max_steps=1", "trainer.limit_val_batches=1", "logger=null"]
STUDENT, TEACHER = "model@models.student.build=tiny_llama", "model@models.teacher.build=small_llama"
PAIR = [STUDENT, TEACHER, "data.batch_size=2", "task.preflight.teacher_is_trained=false"]
ACTOR = ["model@models.actor.build=tiny_llama", "data.batch_size=1"]
CRITIC = "vocab_size: 4096, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4"
COMMANDS = {
    "distill": PAIR,
    "gkd": PAIR,
    "sft": [STUDENT, "data.batch_size=2"],
    "dpo": ["model@models.policy.build=tiny_llama", "data.batch_size=2"],
    "grpo": ACTOR,
    "ppo": [
        *ACTOR,
        "model@models.critic.build=critic_from_config",
        f"models.critic.build.config={{model_type: llama, {CRITIC}, pad_token_id: 0}}",
    ],
}


def export_wrong(handle: Any, folder: Path, **options: Any) -> None:
    """Writes an export whose matrices have their rows in another order."""
    export_model(handle, folder, **options)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    wrong = {name: value.flip(0).contiguous() if value.ndim == 2 else value for name, value in weights.items()}
    save_file(wrong, file, metadata={"format": "pt"})


def run_all(folder: Path) -> dict[str, tuple[int, str]]:
    """Returns, for each task, the exit status of a run with such an export, and its last words."""
    os.chdir(folder)
    found = {}
    for task, words in COMMANDS.items():
        reset_accelerate()
        said = io.StringIO()
        with mock.patch("trainer.run.export_model", export_wrong), redirect_stderr(said):
            status = main([f"task={task}", *words, *RUN, f"hydra.run.dir={task}"])
        found[task] = (status, said.getvalue()[-2000:])
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("rescoring")
    found: dict[str, tuple[int, str]] = run_ranks(run_all, folder, folder=folder, world_size=1)[0]
    return found


@pytest.mark.parametrize("task", COMMANDS)
def test_an_export_with_wrong_weights_is_refused(runs: dict[str, tuple[int, str]], task: str) -> None:
    status, said = runs[task]

    assert status == 1, said
    assert "ExportError" in said and " in memory, but " in said, said
