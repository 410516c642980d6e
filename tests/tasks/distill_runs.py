"""Runs of the distillation task on real engines; one spawn serves all cases."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.distill import DistillTask
from tasks.projection import Projection
from tests.tasks.normalisation_runs import Weights
from tests.tasks.task_runs import (
    LR,
    fit,
    frozen,
    llama,
    shared_data,
    shared_texts,
    trained,
    windows,
    zero,
)
from trainer import IGNORED, ModelSpec

QUIET = dict.fromkeys(("teacher_is_trained", "teacher_is_not_student", "tokenization"), False)  # of random models
LAYERS = {"model.layers.0": "model.layers.-1"}  # one layer of 32 features against the second of two, of 48
QUERIES = {"model.layers.0.self_attn.q_proj": "model.layers.1.self_attn.q_proj"}
RAMP = {"start": 1.0, "end": 0.2, "steps": 3}

TERMS: dict[str, dict[str, Any]] = {
    "tokens": {
        "kl": {"function": "forward_kl", "temperature": 2.0, "weight": RAMP},
        "jsd": {"function": "generalised_jsd", "beta": 0.3, "mask": "all", "weight": 0.5},
        "ce": {"function": "cross_entropy", "weight": 0.3, "mask": "prompt"},
    },
    "states": {
        "forward_kl": {},
        "hidden_mse": {"layers": LAYERS, "projection": "projection", "weight": 2.0, "mask": "all"},
        "attention_relations": {"layers": QUERIES, "heads": 4, "weight": 3.0},
    },
    "mixed": {"forward_kl": {"temperature": 2.0}},
}
# Case: terms, student's stage, teacher's plugin, options
CASES: dict[str, tuple[str, int, int | None, dict[str, Any]]] = {
    "fused, zero0": ("tokens", 0, None, {"fused": True}),
    "fused, zero2, sharded teacher": ("tokens", 2, 3, {"fused": True}),
    "fused, zero3": ("tokens", 3, None, {"fused": True}),
    "dense, zero1": ("tokens", 1, None, {"fused": False}),
    "states, zero2": ("states", 2, None, {"fused": True}),
    "states, zero3, sharded teacher": ("states", 3, 3, {"fused": True}),
    "mixed, zero1, sharded teacher": ("mixed", 1, 3, {"teacher": {"teacher": 3, "second": 1}}),
    "host, zero2": ("tokens", 2, None, {"keep_teachers": "host"}),
}


def model_of(role: str) -> nn.Module:
    """Returns the model of a role: the student is thin, the teacher is not."""
    return llama("large" if role == "teacher" else role)


def make_projection() -> Projection:
    torch.manual_seed(5)
    projection = Projection(student_size=32, teacher_size=48)
    with torch.no_grad():
        for parameter in projection.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return projection


def run_case(name: str, world_size: int) -> dict[str, Any]:
    terms, stage, teacher_stage, options = CASES[name]
    teacher = {"replicate": True} if teacher_stage is None else zero(teacher_stage)
    models: dict[str, ModelSpec] = {"student": trained(model_of, "student"), "teacher": frozen("large")}
    plugins = {"student": zero(stage), "teacher": teacher}
    if terms == "states":
        models["projection"] = ModelSpec(
            build=make_projection, optimizer=functools.partial(torch.optim.SGD, lr=LR), dtype=torch.float32
        )
        plugins["projection"] = zero(1)
    if terms == "mixed":
        models["second"], plugins["second"] = frozen("third"), {"replicate": True}
    task = DistillTask(terms=TERMS[terms], preflight=QUIET, **options)
    trainer, found = fit(task, models, plugins, shared_data(world_size))
    found["evaluated"] = trainer.evaluate()
    return found


def run_cases(folder: Path) -> dict[str, Any]:
    from trainer import distributed

    return {name: run_case(name, distributed.world_size()) for name in CASES}


# The plain reference: an example at a time, in float64


def reference(terms: str) -> dict[str, Weights]:
    """Returns the trained weights of each model after the same steps, by plain PyTorch."""
    student, teacher, second = (model_of(role).double() for role in ("student", "teacher", "third"))
    projection = make_projection().double()
    models = {"student": student, **({"projection": projection} if terms == "states" else {})}
    texts = [(torch.tensor(t.input_ids).long(), torch.tensor(t.labels).long()) for t in shared_texts()]
    for step, window in enumerate(windows(len(texts), 6), start=1):
        sums: dict[str, list[Tensor]] = {}
        for index in window:
            for name, values in _values(terms, *texts[index], student, teacher, second, projection).items():
                sums.setdefault(name, []).append(values)
        weights = {name: _weight(term.get("weight", 1.0), step) for name, term in TERMS[terms].items()}
        loss = sum(weights[name] * torch.cat(values).mean() for name, values in sums.items())
        loss.backward()
        with torch.no_grad():
            for model in models.values():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
                        parameter.grad = None
    return {name: {key: value.detach() for key, value in model.named_parameters()} for name, model in models.items()}


def _weight(weight: Any, step: int) -> float:
    if not isinstance(weight, dict):
        return float(weight)
    return {1: 1.0, 2: 0.6, 3: 0.2}[step]


def _values(
    terms: str,
    tokens: Tensor,
    labels: Tensor,
    student: nn.Module,
    teacher: nn.Module,
    second: nn.Module,
    projection: nn.Module,
) -> dict[str, Tensor]:
    """Returns each term's losses of one example."""
    own, theirs = (model(tokens[None]) for model in (student, teacher))
    answered = labels[1:] != IGNORED
    z, w = own.logits[0, :-1], theirs.logits[0, :-1].detach()
    if terms == "tokens":
        q, p = z.softmax(-1), w.softmax(-1)
        m = 0.3 * p + 0.7 * q
        jsd = 0.3 * _kl(p, m) + 0.7 * _kl(q, m)
        right = z.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1)
        return {"kl": 4 * _kl((w / 2).softmax(-1), (z / 2).softmax(-1))[answered], "jsd": jsd, "ce": -right[~answered]}
    if terms == "mixed":
        other = second(tokens[None]).logits[0, :-1].detach()
        p = 0.75 * (w / 2).softmax(-1) + 0.25 * (other / 2).softmax(-1)
        return {"forward_kl": 4 * _kl(p, (z / 2).softmax(-1))[answered]}
    mapped = projection.maps[0](_outputs(student, tokens, "model.layers.0")[0])
    mse = (mapped - _last_layer(teacher, tokens)).pow(2).mean(-1)[:-1]
    relations = _relations(student, teacher, tokens)[:-1]
    kl = _kl(w.softmax(-1), z.softmax(-1))
    return {"forward_kl": kl[answered], "hidden_mse": mse, "attention_relations": relations[answered]}


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def _outputs(model: nn.Module, tokens: Tensor, path: str) -> Tensor:
    kept: list[Any] = []
    hook = model.get_submodule(path).register_forward_hook(lambda module, inputs, output: kept.append(output))
    model(tokens[None])
    hook.remove()
    return kept[0] if isinstance(kept[0], Tensor) else kept[0][0]


def _last_layer(teacher: nn.Module, tokens: Tensor) -> Tensor:
    return _outputs(teacher, tokens, "model.layers.1")[0].detach()


def _relations(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> Tensor:
    own = _outputs(student, tokens, "model.layers.0.self_attn.q_proj")[0]
    theirs = _outputs(teacher, tokens, "model.layers.1.self_attn.q_proj")[0].detach()
    length = len(tokens)
    values = torch.zeros(length, dtype=torch.float64)
    for head in range(4):
        mine, given = (states.unflatten(-1, (4, -1))[:, head] for states in (own, theirs))
        rows = []
        for t in range(length):
            q, p = ((rows_[t] @ rows_[: t + 1].T / rows_.shape[-1] ** 0.5).softmax(-1) for rows_ in (mine, given))
            rows.append(_kl(p, q))
        values = values + torch.stack(rows) / 4
    return values
