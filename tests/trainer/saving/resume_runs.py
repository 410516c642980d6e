"""Runs that are saved, ended and gone on with, beside the same run undisturbed; several tests read one spawn."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tests.trainer.several_runs import LOSSES, SEEDS, LossTask, difference, make_data, make_net, spec, weights_of, zero
from tests.trainer.test_trainer import reset_accelerate
from trainer import Callback, ConfigError, ModelSpec, MultiModelTrainer, TaskModule, TrainingData, distributed
from trainer.saving.checkpoints import FOLDER, CheckpointPlan, find_all
from trainer.saving.content import take
from trainer.saving.digests import digest_fixed, digest_weights

STEPS, CUT, GLOBAL_BATCH = 10, 4, 12
OFFLOADED = 10  # is added to a stage whose optimizer, and at stage 3 weights, are kept in the host's memory
Case = tuple[int, int, int, str, str, str]  # stages of a and b, accumulation, optimizer, losses, type of the weights
Job = tuple[Case, Path, Case]  # of the run that was saved, its checkpoint, and of the one that goes on


class Counting(Callback):
    """Has a state of every kind, which decides nothing and would differ after a wrong resume."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        self.seen.append(metrics["train/loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen), "last": torch.tensor(self.seen[-1:]), "by": {1: (distributed.rank(), None)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["last"], torch.tensor(state["seen"][-1:]))
        assert isinstance(state["by"][1], tuple)
        self.seen = list(state["seen"])


class Remembering(LossTask):
    """A task with a coefficient that adapts, and so must be saved."""

    coefficient = 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output.losses = {name: loss * self.coefficient for name, loss in output.losses.items()}
        self.coefficient *= 0.9
        return output

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coefficient = state["coefficient"]


class Net(nn.Module):
    """With a running mean, which differs between ranks, and weights that may be bfloat16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = make_net(seed)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return self.net((x + 0.1 * self.mean).to(next(self.parameters()).dtype)).float()


def plugins_of(case: Case) -> dict[str, Any]:
    return {"a": _plugin(case[0]), "b": _plugin(case[1])}


def _plugin(stage: int) -> dict[str, Any]:
    plugin = zero(stage % OFFLOADED)
    if stage >= OFFLOADED:
        plugin["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        plugin["zero_force_ds_cpu_optimizer"] = False  # torch's own, which needs no compiler
    if stage == OFFLOADED + 3:
        plugin["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return plugin


def specs_of(case: Case, *, is_elastic: bool) -> dict[str, ModelSpec]:
    build = make_net if is_elastic else Net
    schedule = functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters="auto"
    )
    return {
        name: replace(
            spec(name, case[3], dtype=getattr(torch, case[5]), scheduler=schedule),
            build=functools.partial(build, SEEDS[name]),
        )
        for name in "ab"
    }


def fit(
    case: Case,
    folder: Path,
    *,
    stop: int | None = None,
    resume: Path | None = None,
    is_elastic: bool = False,
    **options: Any,
) -> MultiModelTrainer:
    """Runs a case.

    Args:
        is_elastic: Without what belongs to a rank or counts micro-batches, and so cannot be the same in another cut.
    """
    reset_accelerate()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = MultiModelTrainer(
        plugins_of(case),
        **{
            "checkpoint": CheckpointPlan(),
            "max_steps": STEPS,
            "log_every": 1,
            "timeout_seconds": 123,
            "callbacks": {"counting": Counting()},
            **options,
        },
        stop_at_step=stop,
        gradient_accumulation_steps=case[2],
        folder=folder,
    )
    batch_size = GLOBAL_BATCH // (case[2] * trainer.world_size)
    data = TrainingData(train=make_data(GLOBAL_BATCH * 4 + 5), batch_size=batch_size)
    task = (LossTask if is_elastic else Remembering)(LOSSES[case[4]])
    trainer.fit(task, models=specs_of(case, is_elastic=is_elastic), data=data, resume=resume)
    return trainer


def state_of(trainer: MultiModelTrainer) -> dict[str, Any]:
    """Everything that a checkpoint would hold of this rank, copied."""
    content = take(trainer).copied()
    texts = {name: text for name, text in content.texts.items() if name.startswith("rank-")}
    tensors = {f"{prefix}:{key}": value for prefix, (part, _) in content.tensors.items() for key, value in part.items()}
    return {"texts": texts, "tensors": tensors}


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Returns the names of what is not the same to the last bit."""
    found = [
        name for name in {**left["texts"], **right["texts"]} if left["texts"].get(name) != right["texts"].get(name)
    ]
    for name in {**left["tensors"], **right["tensors"]}:
        one, other = left["tensors"].get(name), right["tensors"].get(name)
        if one is None or other is None or one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
            found.append(name)
    return found


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def newest(folder: Path) -> Path:
    return find_all(folder / FOLDER)[0]


# Exact resume


def exact_cases() -> list[Case]:
    """Every stage for either model, each with every other value of the rest at least once."""
    rest = itertools.cycle(
        [
            (1, "adamw", "mutual", "float32"),
            (2, "adamw", "joint", "float32"),
            (1, "momentum", "disjoint", "float32"),
            (2, "adamw", "mutual", "bfloat16"),
        ]
    )
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 3), (2, 0), (3, 2), (0, 0), (12, 13)]
    cases = [(*pair, *next(rest)) for pair in pairs]
    return [case for case in cases if not (case[4] == "joint" and 0 in case[:2])]


def resume_exactly(case: Case, folder: Path) -> list[str]:
    """Returns what differs between ten steps, and four, and then the other six by another process's trainer."""
    whole = fit(case, folder / "whole")
    expected, losses = state_of(whole), whole.callbacks["counting"].seen
    fit(case, folder / "cut", stop=CUT)
    resumed = fit(case, folder / "cut", resume=folder / "cut")
    found = differing(expected, state_of(resumed))
    if resumed.callbacks["counting"].seen != losses:
        found.append("losses")
    return found


def run_checks(made: list[Case], jobs: list[Job], folder: Path) -> dict[str, Any]:
    """Returns what is found on this number of ranks, in one spawn.

    Args:
        made: Runs to save for another number of ranks.
        jobs: Checkpoints of another number of ranks to go on from.
    """
    return {
        "exact": {case: resume_exactly(case, folder / f"{number}") for number, case in enumerate(exact_cases())},
        "timeouts": timeouts(),
        "longer": check_longer(folder / "longer"),
        "digests": check_digests(),
        "made": make_elastic(made, folder),
        "differences": check_elastic(jobs, folder),
    }


def check_longer(folder: Path) -> dict[str, Any]:
    """Lengthens a run that was planned for 10 steps; the schedule is laid out over all 20."""
    case = exact_cases()[0]
    fit(case, folder)
    trainer = fit(case, folder, resume=newest(folder), max_steps=2 * STEPS)
    model = trainer.models["a"]
    refused = ""
    try:
        fit(case, folder)
    except ConfigError as error:
        refused = str(error)
    return {
        "refused": refused,
        "steps": trainer.global_step,
        "horizon": model.scheduler.total_iters,
        "updates": model.num_updates,
    }


def timeouts() -> set[float]:
    """Returns how long the groups of ranks wait for a peer, in seconds."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}


# Digests of weights that stay


def check_digests() -> dict[str, str | None]:
    """Returns the digest of one frozen model held in several ways, and after small changes."""
    found: dict[str, str | None] = {}
    for name, plugin in (("whole", {"replicate": True}), ("sharded", zero(3))):
        reset_accelerate()
        trainer = MultiModelTrainer({"a": zero(1), "b": plugin}, max_steps=1)
        models = {"a": spec("a"), "b": spec("b", trainable=False, optimizer=None)}
        trainer.fit(LossTask(regression), models=models, data=TrainingData(train=make_data(), batch_size=4))
        found[name] = digest_fixed(trainer.models["b"])
        found[f"trained {name}"] = digest_fixed(trainer.models["a"])
        found[f"all of {name}"] = digest_weights(trainer.models["b"])
        found[f"all trained {name}"] = digest_weights(trainer.models["a"])
        if name == "whole":
            weight = trainer.models["b"].module[0].weight.data
            for change, other in (("one bit", _with_a_bit_flipped(weight)), ("two swapped", weight.flip(0))):
                kept = weight.clone()
                weight.copy_(other)
                found[change] = digest_fixed(trainer.models["b"])
                weight.copy_(kept)
    return found


def _with_a_bit_flipped(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed.view(torch.int32)[0, 0] ^= 1
    return changed


def regression(models: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": (models["a"](batch["x"]) - models["b"](batch["x"])).pow(2).mean()}


# Elastic resume


def check_elastic(jobs: list[Job], folder: Path) -> list[float]:
    """Goes on from checkpoints of other stages and ranks; returns how far each ends from the undisturbed run."""
    found = []
    for number, (before, checkpoint, after) in enumerate(jobs):
        assert before[3:] == after[3:]
        resumed = fit(after, folder / f"elastic{number}", resume=checkpoint, is_elastic=True)
        weights = weights_of(resumed)
        expected = torch.load(checkpoint.parent.parent / "expected.pt", weights_only=True)
        found.append(difference(weights, expected) if resumed.is_main else 0.0)
    return found


def make_elastic(cases: list[Case], folder: Path) -> list[Path]:
    """Returns a checkpoint in the middle of a run for each case, the undisturbed run's weights beside it."""
    found = []
    for number, case in enumerate(cases):
        own = folder / f"made{number}"
        weights = weights_of(fit(case, own / "whole", checkpoint=None, is_elastic=True))
        fit(case, own, stop=CUT, is_elastic=True)
        if distributed.is_main():
            torch.save(weights, own / "expected.pt")
        found.append(newest(own))
    return found


# The slow tier


class Memory(Callback):
    """Notes this process's resident memory."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_step_end(self, trainer: MultiModelTrainer, task: TaskModule, metrics: dict[str, float]) -> None:
        if trainer.global_step % 20 == 0:
            self.seen.append((trainer.global_step, psutil.Process().memory_info().rss))


def run_long(steps: int, folder: Path) -> list[tuple[int, int]]:
    """Returns steps and bytes of a run that saves every 50 steps."""
    memory = Memory()
    plan = CheckpointPlan(every=50, keep_last=2)
    fit(
        (1, 3, 1, "adamw", "mutual", "float32"),
        folder,
        max_steps=steps,
        checkpoint=plan,
        callbacks={"memory": memory},
        is_elastic=True,
    )
    return memory.seen


def change_adam(folder: Path) -> dict[str, float]:
    """Goes from torch's AdamW to DeepSpeed's on the CPU and back, each at half of the run."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.01}
    adams = {
        "torch": functools.partial(torch.optim.AdamW, **settings),
        "cpu": functools.partial(DeepSpeedCPUAdam, adamw_mode=True, **settings),
    }

    def train(name: str, place: Path, **options: Any) -> MultiModelTrainer:
        reset_accelerate()
        block: dict[str, Any] = {"stage": 2}
        if name == "cpu":
            block["offload_optimizer"] = {"device": "cpu"}
        trainer = MultiModelTrainer(
            {"a": {"zero_optimization": block}, "b": zero(0)},
            max_steps=STEPS,
            folder=place,
            checkpoint=CheckpointPlan(),
            stop_at_step=options.pop("stop", None),
        )
        models = {
            "a": ModelSpec(build=functools.partial(make_net, 1), optimizer=adams[name], dtype=torch.float32),
            "b": spec("b"),
        }
        data = TrainingData(train=make_data(), batch_size=GLOBAL_BATCH // trainer.world_size)
        trainer.fit(LossTask(LOSSES["disjoint"]), models=models, data=data, **options)
        return trainer

    expected = weights_of(train("torch", folder / "whole"))
    found = {}
    for before, after in (("torch", "cpu"), ("cpu", "torch")):
        train(before, folder / before, stop=CUT)
        weights = weights_of(train(after, folder / "after" / after, resume=newest(folder / before)))
        found[f"{before} to {after}"] = difference(weights, expected) if distributed.is_main() else 0.0
    return found
