"""Quantized frozen models: refused where they cannot be, and else near the float model in a part of its memory."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from tasks.distill import DistillTask
from tests.tasks.task_runs import llama, shared_data, trained
from tests.trainer.engine_runs import zero
from tests.trainer.test_check import problems_of
from tests.trainer.test_trainer import reset_accelerate
from trainer import ConfigError, ModelSpec, MultiModelTrainer
from trainer.handle import ModelHandle
from trainer.models import causal_lm
from trainer.quantization import find_quantization_problems
from trainer.saving.digests import digest_fixed

needs_library = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
# The quantiles of a normal distribution that arXiv:2305.14314, appendix E, lists.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "teacher"
    torch.manual_seed(7)
    config = llama("large").config
    # On a CPU 4 bits need inputs of whole blocks.
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def teacher_of(folder: Path, kind: str | None) -> ModelSpec:
    build = functools.partial(causal_lm, str(folder), quantization=kind)
    return ModelSpec(build=build, trainable=False, dtype=torch.float32)


def fit(folder: Path, kind: str | None, **fields: Any) -> MultiModelTrainer:
    reset_accelerate()
    trainer = MultiModelTrainer({"student": zero(1), "teacher": {"replicate": True}}, max_steps=2, log_every=1)
    models = {"student": trained(llama, "small", **fields), "teacher": teacher_of(folder, kind)}
    trainer.fit(
        DistillTask(terms={"forward_kl": {}}, preflight={"teacher_is_trained": False}),
        models=models,
        data=shared_data(1),
    )
    return trainer


def problems(kind: Any, **changed: Any) -> list[str]:
    given = {"trainable": False, "has_engine": False, "init_from": None, **changed}
    return [p for p in find_quantization_problems("models.teacher", kind, **given) if "bitsandbytes" not in p]


def test_what_cannot_be_quantized_is_refused() -> None:
    assert problems(None, trainable=True) == problems("int8") == problems("nf4") == []
    assert problems("int4") == ["models.teacher.build.quantization=int4 is unknown; did you mean int8?"]
    assert "set models.teacher.trainable=false" in problems("nf4", trainable=True)[0]
    assert "plugin@models.teacher.plugin=replicate" in problems("nf4", has_engine=True)[0]
    assert "drop one" in problems("nf4", init_from="student")[0]


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    (problem,) = find_quantization_problems("models.t", "nf4", trainable=False, has_engine=False, init_from=None)

    assert 'pip install "multi-model-trainer[quantization]"' in problem


def test_the_command_line_is_checked() -> None:
    named = ("model@models.teacher.build=causal_lm", "models.teacher.build.name=some/model")

    sharded = problems_of(
        *named, "models.teacher.build.quantization=nf4", "plugin@models.teacher.plugin=zero3_inference"
    )
    copied = problems_of(*named, "models.teacher.build.quantization=nf4", "models.student.init_from=teacher")

    assert any("plugin@models.teacher.plugin=replicate" in problem for problem in sharded)
    assert any("give models.student.build the same name instead" in problem for problem in copied)


def test_the_trainer_checks_it_too(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.student\.init_from=teacher: the weights of teacher are quantized"):
        fit(folder, "nf4", init_from="teacher")


def block_rounded(weight: torch.Tensor) -> torch.Tensor:
    """Returns the nearest normal floats, in blocks of 64 weights times their largest size."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    return (NF4[(blocks / scale)[..., None].sub(NF4).abs().argmin(-1)] * scale).view_as(weight)


@needs_library
def test_four_bits_are_normal_floats(folder: Path) -> None:
    import bitsandbytes.functional as functional

    plain, quantized = (causal_lm(str(folder), dtype=torch.float32, quantization=kind) for kind in (None, "nf4"))

    weight = plain.model.layers[0].mlp.up_proj.weight.detach()
    packed: Any = quantized.model.layers[0].mlp.up_proj.weight
    found = functional.dequantize_4bit(packed.data, packed.quant_state)
    # The scales themselves are rounded to 8 bits.
    assert (found - block_rounded(weight)).abs().max() < 0.02 * weight.abs().max()
    assert (found - weight).abs().max() > 0.05 * weight.abs().max()


@needs_library
def test_four_bits_stay_as_they_were_loaded(folder: Path) -> None:
    model = causal_lm(str(folder), dtype=torch.bfloat16, quantization="nf4").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])

    weight: Any = model.model.layers[0].mlp.up_proj.weight
    assert not getattr(weight.quant_state, "packing_format_for_cpu", False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of a GPU read any size")
def test_four_bits_that_a_cpu_reads_wrongly_are_refused(tmp_path: Path) -> None:
    llama("large").save_pretrained(tmp_path)  # of width 48

    with pytest.raises(ConfigError, match=r"a multiple of 64 inputs, and model\.layers\.0\..* has 48"):
        causal_lm(str(tmp_path), dtype=torch.float32, quantization="nf4")


@needs_library
def test_eight_bits_are_rows_of_integers(folder: Path) -> None:
    plain, quantized = (causal_lm(str(folder), dtype=torch.float32, quantization=kind) for kind in (None, "int8"))

    weight = plain.model.layers[0].mlp.up_proj.weight.detach()
    packed: Any = quantized.model.layers[0].mlp.up_proj.weight
    assert packed.dtype == torch.int8
    row = weight.abs().amax(1, keepdim=True)
    # Half a step, and what float16, which the library rounds from, leaves out.
    assert ((packed.data * row / 127 - weight).abs() <= row / 254 + row * 2**-11).all()


@needs_library
@pytest.mark.parametrize(("kind", "bits", "most"), [("int8", 8, 0.01), ("nf4", 4, 0.3)])
def test_a_quantized_teacher_teaches(folder: Path, kind: str, bits: int, most: float) -> None:
    plain, quantized = fit(folder, None), fit(folder, kind)

    ours, theirs = (trainer.models["teacher"] for trainer in (quantized, plain))
    linear = [part for part in theirs.module.modules() if isinstance(part, nn.Linear)]
    packed = sum(part.weight.numel() for part in linear) - theirs.module.lm_head.weight.numel()  # type: ignore[union-attr,operator]
    assert ours.num_parameters == theirs.num_parameters
    assert ours.local_bytes() == theirs.local_bytes() - packed * (32 - bits) // 8
    assert ours.dtype == torch.float32
    assert quantized.fixed_weights["teacher"] == digest_fixed(ours) != plain.fixed_weights["teacher"]
    gap = abs(quantized.before["val/forward_kl"] - plain.before["val/forward_kl"])
    assert 0 < gap < most
    assert kl_between(theirs, ours) < most
    assert quantized.after["val/forward_kl"] < quantized.before["val/forward_kl"]


def kl_between(teacher: ModelHandle, other: ModelHandle) -> float:
    tokens = torch.arange(1, 33).view(2, 16)
    ours, theirs = (model(input_ids=tokens).logits.double().log_softmax(-1) for model in (teacher, other))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@needs_library
def test_the_digest_sees_one_bit(folder: Path) -> None:
    trainer = fit(folder, "nf4")
    teacher = trainer.models["teacher"]

    before = digest_fixed(teacher)
    teacher.module.model.layers[0].mlp.up_proj.weight.data[3] ^= 1  # type: ignore[union-attr,index,operator]

    assert before == trainer.fixed_weights["teacher"] != digest_fixed(teacher)
