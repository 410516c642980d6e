"""An exported model is scored by the lm-eval harness, offline: `pip install -e '.[test,eval]' && pytest -m slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
TASK = ROOT / "examples" / "lm_eval"
TINY = ["task=disjoint", "callbacks=[]", "logger=[jsonl]", "checkpoint.enabled=false", "trainer.max_steps=20"]

pytestmark = pytest.mark.slow


def test_harness_counts_the_answers_that_the_exported_model_finds_likeliest(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval: pip install -e '.[test,eval]'")
    run("-m", "trainer", *TINY, f"hydra.run.dir={tmp_path}/run")
    model = tmp_path / "run" / "export" / "small"

    run(
        *("-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"),
        *("--include_path", str(TASK), "--tasks", "capitals", "--output_path", str(tmp_path / "scores")),
    )

    (file,) = (tmp_path / "scores").rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))["results"]["capitals"]
    assert found["acc,none"] == pytest.approx(accuracy(model))


def accuracy(folder: Path) -> float:
    """Returns the share of questions whose right answer has the highest log-likelihood."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (TASK / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]

    def likelihood(question: str, answer: str) -> float:
        start, whole = (tokenizer(text)["input_ids"] for text in (question, f"{question} {answer}"))
        with torch.no_grad():
            log_p = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(log_p[place - 1, whole[place]].item() for place in range(len(start), len(whole)))

    right = [
        max(range(3), key=lambda n: likelihood(row["question"], row["choices"][n])) == row["answer"] for row in rows
    ]
    return sum(right) / len(right)


def run(*arguments: str) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
