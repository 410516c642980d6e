"""What a small student has learnt after equal steps from different losses, over several seeds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.table import Table

TOP_K = "tests.benchmarks.distill.top_k"
LAYERS = "{model.layers.0: model.layers.1, model.layers.1: model.layers.2}"  # of the student: of the teacher
# What tells the runs apart; all else is the same, the seed of a repeat too: its split, order and start weights.
CASES = {
    "cross-entropy only": ["task.terms.forward_kl.weight=0", "task.terms.cross_entropy.weight=1"],
    "forward KL": [],
    "top 8, truncated": [f"task.terms.forward_kl.function={TOP_K}.truncated"],
    "top 8, both renormalised": [f"task.terms.forward_kl.function={TOP_K}.renormalised"],
    "top 8 with a tail": ["task.terms.forward_kl.top_k=8"],
    "forward KL, hidden states": [
        "experiment=distill_states",  # brings a projection; its layers are of deeper models
        "models.projection.build={student_size: 128, teacher_size: 256, count: 2}",
        "models.projection.dtype=float32",
        "task.terms.hidden_mse.weight=0",
        f"task.terms.states={{function: hidden_mse, projection: projection, weight: 1.0, layers: {LAYERS}}}",
    ],
}
METRICS = {
    "val/forward_kl": "KL(teacher || student)",
    "val/reverse_kl": "KL(student || teacher)",
    "val/top1_agreement": "top-1 agreement",
    "val/cross_entropy": "cross-entropy",
}
COMMON = [
    "logger=[jsonl]",
    "callbacks=[]",
    "checkpoint.enabled=false",
    "data.tokenizer=embedded:bpe-4k",
    "data.batch_size=8",
]
Scores = dict[str, float]


def train_teacher(folder: Path, *, seed: int, num_steps: int) -> Path:
    """Returns the folder of a small Llama that was trained on the embedded conversations."""
    model = folder / "export" / "large"
    if not model.exists():
        run("task=disjoint", *COMMON, "~models.small", f"trainer.max_steps={num_steps}", f"seed={seed}", folder=folder)
    return model


def train_student(folder: Path, teacher: Path, case: str, *, seed: int, num_steps: int) -> tuple[Scores, Scores]:
    """Returns the metrics of a tiny Llama on held-out conversations, before and after its training."""
    end = folder / "summary.json"
    if not end.exists():  # else an earlier call has come so far
        run(
            *("task=distill", *COMMON, "~callbacks.samples", *CASES[case]),
            *("model@models.student.build=tiny_llama", "models.student.optimizer.lr=0.003"),
            *("model@models.teacher.build=causal_lm", f"models.teacher.build.name={teacher}"),
            *("models.student.dtype=float32", "models.teacher.dtype=float32", "export.enabled=false"),
            *(f"trainer.max_steps={num_steps}", f"seed={seed}"),
            folder=folder,
        )
    summary = json.loads(end.read_text(encoding="utf-8"))
    return summary["before"], summary["after"]


def run(*overrides: str, folder: Path) -> None:
    """Runs the trainer as a user does, in a fresh process."""
    command = [sys.executable, "-m", "trainer", *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def compare(folder: Path, *, seeds: list[int], teacher_steps: int, student_steps: int) -> Table:
    """Returns a row per loss: mean and standard deviation over the seeds of what the students have learnt."""
    found: dict[str, list[Scores]] = {name: [] for name in ("before", *CASES)}
    for seed in seeds:
        teacher = train_teacher(folder / f"teacher-{seed}", seed=seed, num_steps=teacher_steps)
        for number, case in enumerate(CASES):
            place = folder / f"student-{seed}-{number}"
            before, after = train_student(place, teacher, case, seed=seed, num_steps=student_steps)
            found[case].append(after)
        found["before"].append(before)
    title = f"held-out conversations after {student_steps} steps; mean ± standard deviation of {len(seeds)} seeds"
    table = Table("", *METRICS.values(), title=title)
    for name, scores in found.items():
        table.add_row(name, *(spread([score[key] for score in scores]) for key in METRICS))
    return table


def spread(values: list[float]) -> str:
    """Returns "mean ± standard deviation", of one value the value."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"
