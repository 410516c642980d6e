"""Short runs of one model on one rank, whose slices are held against DeepSpeed's and torch's own; one spawn for all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.trainer.saving.resume_runs import differing, newest, state_of
from tests.trainer.several_runs import EXAMPLES, OPTIMIZERS, global_batches, make_data, make_net, zero
from tests.trainer.test_trainer import reset_accelerate
from trainer import ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.handle import ModelHandle
from trainer.saving.checkpoints import CheckpointError, CheckpointPlan
from trainer.saving.fragments import slices_of
from trainer.updates import UpdatePlan

STEPS, CUT = 4, 2
ADAFACTORS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": functools.partial(torch.optim.Adafactor, lr=0.01),
    "transformers": functools.partial(transformers.Adafactor, lr=0.01, relative_step=False, scale_parameter=True),
}


class Regression(TaskModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> StepOutput:
        return StepOutput(losses={"a": (self.models["a"](batch["x"]) - batch["y"]).pow(2).mean()})


class Net(nn.Module):
    """Three layers; with `is_unusual` also what optimizers and ZeRO treat in their own ways."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, is_unusual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.is_unusual = is_unusual
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 4)
        self.middle = nn.Linear(5, 5)
        if is_unusual:
            self.tied, self.unused = nn.Linear(5, 5), nn.Linear(3, 2)
            self.tied.weight = self.middle.weight
            self.mixer = nn.Conv1d(4, 4, 3, padding=1)
            weight = self.mixer.weight
            if weight.ndim == 3:  # not yet sharded; DeepSpeed takes no channels_last, of which the last stride is not 1
                weight.data = weight.data.transpose(0, 1).contiguous().transpose(0, 1)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        if self.is_unusual:
            x = self.mixer(x[:, :, None]).flatten(1)
        hidden = self.middle(self.first(x).tanh())
        if self.is_unusual:
            hidden = self.tied(hidden)
        return self.last(hidden).float()


UNUSUAL: dict[str, dict[str, Any]] = {
    "unusual": {"build": functools.partial(Net, is_unusual=True)},
    "freeze": {"freeze": ["first.*", "*.bias"]},
    "lora": {"lora": {"r": 2, "target_modules": ["first", "middle"]}},
    "late": {"plan": UpdatePlan(start_step=CUT + 2)},  # saved before the first update
}
RESUMED = [*(("unusual", stage) for stage in range(4)), *(("late", stage) for stage in (0, 1, 3)),
           ("freeze", 1), ("freeze", 3), ("lora", 0), ("lora", 2)]  # fmt: skip


def make_first() -> nn.Module:
    return make_net(1)


def fit(
    folder: Path,
    *,
    stage: int = 0,
    build: Callable[..., nn.Module] = make_first,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    stop: int | None = None,
    resume: Path | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> MultiModelTrainer:
    reset_accelerate()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = MultiModelTrainer(
        {"a": zero(stage)},
        max_steps=STEPS,
        stop_at_step=stop,
        log_every=1,
        folder=folder,
        checkpoint=CheckpointPlan(),
    )
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    spec = ModelSpec(build=build, optimizer=make, dtype=dtype, **options)
    trainer.fit(
        Regression(), models={"a": spec}, data=TrainingData(train=make_data(), batch_size=EXAMPLES), resume=resume
    )
    return trainer


def slices_against_deepspeed(folder: Path, stage: int, dtype: torch.dtype) -> list[str]:
    """Returns the names of slices that are not what DeepSpeed gives out for the same weight."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    handle = fit(folder, stage=stage, build=Net, dtype=dtype).models["a"]
    found = slices_of(handle)
    wrong = [key for key, start in found.starts.items() if start != 0]
    for name, weight in handle.module.named_parameters():
        wanted = {"weight": safe_get_full_fp32_param(weight)} | {
            f"state/{key}": safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")
        }
        for kind, expected in wanted.items():
            own = found.tensors.pop(f"{kind}/{name}")
            if expected is None or own.dtype != torch.float32 or not torch.equal(own, expected.reshape(-1)):
                wrong.append(f"{kind}/{name}")
        if found.numels.pop(name) != wanted["weight"].numel() or set(found.scalars.pop(name)) != {"step"}:
            wrong.append(name)
    return [*wrong, *found.tensors, *found.numels, *found.scalars]


def slices_of_half_weights(folder: Path) -> dict[str, bool]:
    """Stage 0 in bfloat16: whether each slice in float32 rounds to the weight that the forward uses."""
    handle = fit(folder, stage=0, build=Net, dtype=torch.bfloat16).models["a"]
    found, weights = slices_of(handle), dict(handle.module.named_parameters())
    is_right = {
        name: found.tensors[f"weight/{name}"].dtype == torch.float32
        and torch.equal(found.tensors[f"weight/{name}"].bfloat16(), weight.detach().reshape(-1))
        for name, weight in weights.items()
    }
    is_finer = [bool((found.tensors[f"weight/{name}"] != w.float().reshape(-1)).any()) for name, w in weights.items()]
    return {**is_right, "some are finer than bfloat16": any(is_finer)}


def slices_against_torch(folder: Path) -> float:
    """Returns how far the slices at stage 0 are from those of torch's own optimizer in a plain loop."""
    found = slices_of(fit(folder).models["a"])
    data, module = make_data(), make_net(1)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    for indices in global_batches(STEPS):
        x, y = (torch.stack([data[index][key] for index in indices]) for key in ("x", "y"))
        optimizer.zero_grad()
        (module(x) - y).pow(2).mean().backward()
        optimizer.step()
    expected = {}
    for name, weight in module.named_parameters():
        state = optimizer.state[weight]
        expected |= {f"weight/{name}": weight.detach(), f"state/exp_avg/{name}": state["exp_avg"]}
        expected[f"state/exp_avg_sq/{name}"] = state["exp_avg_sq"]
        assert found.scalars[name] == {"step": {"value": float(state["step"]), "dtype": "float32"}}
    assert expected.keys() == found.tensors.keys()
    return max(float((found.tensors[key] - value.reshape(-1)).abs().max()) for key, value in expected.items())


def resumes(folder: Path, *, after: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Returns what differs between a run and the same run resumed half-way, and which slices there are."""
    whole = fit(folder / "whole", **options)
    fit(folder / "cut", stop=CUT, **options)
    resumed = fit(folder / "cut", resume=newest(folder / "cut"), **{**options, **(after or {})})
    found = slices_of(resumed.models["a"])
    return {
        "differing": differing(state_of(whole), state_of(resumed)),
        "slices": sorted(found.tensors),
        "numels": found.numels,
        "contiguous": [w.is_contiguous() for w in resumed.models["a"].module.parameters()],
    }


def refusal(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    fit(folder, stop=CUT, **before)
    try:
        fit(folder, resume=newest(folder), **after)
    except CheckpointError as error:
        return str(error)
    return "was not refused"


def moved_between(folder: Path) -> dict[tuple[int, int], float]:
    """Returns the largest difference of the weights after a run was saved at one stage and went on at another."""
    weights, found = _flat_weights(fit(folder / "whole").models["a"]), {}
    for before, after in ((0, 3), (3, 2), (2, 1), (1, 0)):
        fit(folder / f"{before}", stage=before, stop=CUT)
        trainer = fit(folder / f"{before}{after}", stage=after, resume=newest(folder / f"{before}"))
        found[before, after] = float((_flat_weights(trainer.models["a"]) - weights).abs().max())
    return found


def _flat_weights(handle: ModelHandle) -> Tensor:
    tensors = slices_of(handle).tensors
    return torch.cat([tensors[key] for key in sorted(tensors) if key.startswith("weight/")]).clone()


def run_all(folder: Path) -> dict[str, Any]:
    cases: dict[str, Callable[[Path], Any]] = {
        **{
            f"deepspeed {stage} {dtype}": functools.partial(slices_against_deepspeed, stage=stage, dtype=dtype)
            for stage in (1, 2, 3)
            for dtype in (torch.float32, torch.bfloat16)
        },
        "half weights": slices_of_half_weights,
        "torch": slices_against_torch,
        "moved": moved_between,
        **{
            f"{kind} {stage}": functools.partial(resumes, stage=stage, **{"build": Net, **UNUSUAL[kind]})
            for kind, stage in RESUMED
        },
    }
    for name, optimizer in ADAFACTORS.items():
        factored = {"build": Net, "optimizer": optimizer}
        cases[f"adafactor {name}"] = functools.partial(resumes, **factored)
        flat = {**factored, "stage": 2}
        cases[f"adafactor {name} from 0 to 2"] = functools.partial(refusal, before=factored, after=flat)
        cases[f"adafactor {name} from 2 to 0"] = functools.partial(refusal, before=flat, after=factored)
    cases["another size"] = functools.partial(refusal, before={}, after={"build": Net})
    cases["fewer trained"] = functools.partial(refusal, before={}, after={"freeze": ["0.*"]})
    return {name: _outcome(case, folder / name.replace(" ", "_")) for name, case in cases.items()}


def _outcome(case: Callable[[Path], Any], folder: Path) -> Any:
    import traceback

    try:
        return case(folder)
    except Exception:
        return traceback.format_exc()
