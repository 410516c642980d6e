"""Nothing lost: runs that are killed, interrupted and damaged end like one that nobody disturbed, or say why not."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.trainer.trio_runs import (
    assert_same_run,
    end_of,
    kill_at_random,
    newest,
    num_lines,
    numbers,
    ranks_of,
    read_summary,
    run,
    shared_memory,
    start,
    wait_for,
)
from trainer.saving.checkpoints import find_all, step_of


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 40 steps on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    status, output = run(folder)
    assert status == 0, output[-3000:]
    return folder


def soak(folder: Path, *overrides: str, kills: int, longest: float, seed: int) -> list[str]:
    """Lets ranks be killed until the run has come to its end; returns when each was."""
    memory, draw = shared_memory(), random.Random(seed)
    process = start(folder, "checkpoint.every=1", f"launch.max_restarts={kills}", *overrides)
    moments = kill_at_random(process, folder, kills=kills, longest=longest, draw=draw)
    status, output = end_of(process, folder, timeout=600)
    assert status == 0, output[-3000:]
    assert output.count("killed by SIGKILL") == len(moments) == kills, f"{moments}: {output[-3000:]}"
    assert processes_of(folder) == []
    assert shared_memory() <= memory
    return moments


def processes_of(folder: Path) -> list[int]:
    """Returns the processes that still have to do with a run."""
    found = psutil.process_iter(["pid", "cmdline"])
    return [process.info["pid"] for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


def test_a_run_whose_ranks_are_killed_comes_to_the_same_end(undisturbed: Path, tmp_path: Path):
    moments = soak(tmp_path / "run", "task.step_seconds=0.2", kills=3, longest=1.5, seed=0)

    assert len(set(moments)) >= 2, f"at different moments: {moments}"
    assert_same_run(tmp_path / "run", undisturbed)


def test_an_interrupted_and_then_damaged_run_ends_as_if_nothing_had_been(undisturbed: Path, tmp_path: Path):
    folder = tmp_path / "run"
    process = start(folder, "task.step_seconds=0.1", "checkpoint.every=1", "checkpoint.keep_last=3")
    wait_for(lambda: num_lines(folder) > 8)

    ranks_of(process)[1].send_signal(signal.SIGTERM)  # one rank alone: all end together
    status, output = end_of(process, folder, timeout=60)

    assert status == 143, output[-3000:]
    assert "resume=auto" in output, "how to go on"
    assert read_summary(folder)["status"] == "interrupted"
    saved = find_all(folder / "checkpoints")
    assert read_summary(folder)["global_step"] == step_of(saved[0])
    cut, altered, whole = saved
    truncate(shard_of(cut))  # seen before the ranks start
    flip_a_bit(shard_of(altered))  # seen by the ranks
    status, output = run(folder, "resume=auto")
    assert status == 0, output[-3000:]
    assert f"resumed at step {step_of(whole)}" in output
    assert all(path.name in output for path in saved), "which were damaged, and which was taken"
    assert f"{cut.name}.superseded" in {path.name for path in (folder / "checkpoints").iterdir()}
    assert_same_run(folder, undisturbed)


def shard_of(checkpoint: Path) -> Path:
    return checkpoint / "models" / "second" / "rank-00001-000.safetensors"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_cannot_go_on_is_refused_and_nothing_is_touched(undisturbed: Path, tmp_path: Path):
    before = content_of(undisturbed)

    by_launcher = {
        "data.train.num_points=999": "data.train.num_points=999: the run that is resumed has 1000",
        "task.step_seconds=1": "task.step_seconds=1: the run that is resumed has ",
        "seed=1": "seed=1: the run that is resumed has 0",
    }
    by_ranks = {"checkpoint.monitor=val/nope": "val/nope is no metric of the validation"}
    for refused in (by_launcher, by_ranks):
        status, output = run(undisturbed, "resume=last", *refused)
        assert status == 2 and "Traceback" not in output, output[-2000:]
        assert all(said in output for said in refused.values()), output[-2000:]

    assert content_of(undisturbed) == before


def content_of(folder: Path) -> dict[Path, bytes]:
    """Returns what a run has left, besides what it tells of its attempts."""
    told = ("run.log", "plan.txt")
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in told}


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path):
    """A bind mount, since root passes over modes."""
    place = tmp_path / "place"
    place.mkdir()
    mounted = subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("only root mounts")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        status, output = run(tmp_path / "run", f"hydra.run.dir={place}/run")
    finally:
        subprocess.run(["umount", place], check=True)

    assert status == 2 and "cannot be written to" in output and "Traceback" not in output, output[-2000:]


# The slow tier -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_hundred_steps_with_fifty_kills(tmp_path: Path):
    long = ("trainer.max_steps=300", "data.train.num_points=5000", "trainer.val_every=50")
    status, output = run(tmp_path / "undisturbed", *long)
    assert status == 0, output[-3000:]

    moments = soak(tmp_path / "run", "task.step_seconds=0.2", *long, kills=50, longest=0.8, seed=1)

    print("\n".join(moments))
    assert any("saving" in moment for moment in moments)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_its_place(tmp_path: Path):
    status, output = run(
        tmp_path / "run", "task.hang_at=5", "launch.timeout_seconds=8", "checkpoint.every=2", timeout=120
    )

    assert status == 1
    assert "Timed out" in output
    assert "rank 1 stood at" in output and "trio.py" in output and "in training_step" in output
    assert step_of(newest(tmp_path / "run")) == 4


LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "pad_token_id": 0,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
BPE, SHORT = "data.tokenizer=embedded:bpe-4k", "task.generation.max_new_tokens=4"
UNTRAINED = "task.preflight.teacher_is_trained=false"


def build(name: str, preset: str = "tiny_llama") -> list[str]:
    """Returns how a small model with random weights is chosen; a scorer's is given by a configuration."""
    config = [f"models.{name}.build.config={LLAMA}".replace("'", "")] if preset.endswith("_from_config") else []
    return [f"model@models.{name}.build={preset}", *config]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        ("distill", [*build("student"), *build("teacher", "small_llama"), BPE, UNTRAINED, "~callbacks.samples",
                     "trainer.gradient_accumulation_steps=2"]),
        ("disjoint", ["models.small.update_every=2"]),
        ("mutual", ["plugin@models.small.plugin=zero0", "plugin@models.large.plugin=zero3"]),
        ("dual_encoder", []),
        ("distill_encoder", [*build("student", "tiny_bert"), *build("teacher", "tiny_bert"), BPE]),
        ("sft", [*build("student"), BPE]),
        ("reward", [*build("reward", "reward_model_from_config"), BPE]),
        ("dpo", [*build("policy"), BPE, "plugin@models.policy.plugin=zero3"]),
        ("gkd", [*build("student"), *build("teacher"), BPE, SHORT, UNTRAINED]),
        ("grpo", [*build("actor"), BPE, SHORT, "task.epochs=3", "trainer.gradient_accumulation_steps=2"]),
        ("ppo", [*build("actor"), *build("critic", "critic_from_config"), BPE, SHORT, "task.epochs=3"]),
    ],
)  # fmt: skip
def test_every_task_resumes_to_the_last_bit(task: str, overrides: list[str], ranks: int, tmp_path: Path):
    common = [f"task={task}", "trainer.max_steps=10", "trainer.val_every=3", "trainer.limit_val_batches=2",
              "export.enabled=false", *overrides]  # fmt: skip
    status, output = run(tmp_path / "whole", *common, ranks=ranks)
    assert status == 0, output[-3000:]

    status, output = run(tmp_path / "cut", *common, "trainer.stop_at_step=4", ranks=ranks)
    assert status == 0, output[-3000:]
    status, output = run(tmp_path / "cut", *common, "resume=last", ranks=ranks)

    assert status == 0, output[-3000:]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert len(numbers(tmp_path / "cut")) > 4
    shutil.rmtree(tmp_path / "whole")
