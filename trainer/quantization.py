"""Frozen language models in 8 or 4 bits: where that may be, and how transformers is told to load them so."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.config import ConfigError

QUANTIZATIONS = ("int8", "nf4")
NF4_BLOCK = 64  # weights that share a scale


def find_quantization_problems(
    key: str, kind: Any, *, trainable: bool, has_engine: bool, init_from: str | None
) -> list[str]:
    """Returns why a model cannot be quantized as it is configured, before anything of it is loaded.

    Args:
        key: Where the model stands, such as models.teacher.
        kind: Its `build.quantization`; None: it is not quantized.
        has_engine: Whether DeepSpeed holds it, which cuts and gathers weights as if they were numbers.
    """
    if kind is None:
        return []
    place = f"{key}.build.quantization"
    if kind not in QUANTIZATIONS:
        near = difflib.get_close_matches(str(kind), QUANTIZATIONS, 1)
        hint = f"did you mean {near[0]}?" if near else f"it is null, {' or '.join(QUANTIZATIONS)}"
        return [f"{place}={kind} is unknown; {hint}"]
    problems = []
    if trainable:
        problems.append(
            f"{place}={kind}, but {key} is trained, and weights of a few bits take no update; drop it, or set "
            f"{key}.trainable=false"
        )
    elif has_engine:
        problems.append(
            f"{place}={kind}: DeepSpeed cannot hold quantized weights in partitions; use plugin@{key}.plugin=replicate"
        )
    if init_from is not None:
        problems.append(f"{place}={kind} beside {key}.init_from={init_from}: start weights are not quantized; drop one")
    if importlib.util.find_spec("bitsandbytes") is None:
        problems.append(
            f"{place}={kind} needs the Python package bitsandbytes, which is missing; "
            'pip install "multi-model-trainer[quantization]"'
        )
    return problems


def find_origin_problem(name: str, init_from: str | None, kinds: Mapping[str, Any]) -> list[str]:
    """Returns the problem of a model whose start weights would come from a quantized one.

    Args:
        kinds: Name of each model to its `build.quantization`.
    """
    if init_from is None or kinds.get(init_from) is None:
        return []
    problem = (
        f"models.{name}.init_from={init_from}: the weights of {init_from} are quantized "
        f"(models.{init_from}.build.quantization={kinds[init_from]}); give models.{name}.build the same name instead"
    )
    return [problem]


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """Returns what `from_pretrained` takes to quantize the linear layers; embeddings, norms and the head stay.

    int8: LLM.int8(), arXiv:2208.07339. nf4: 4-bit normal floats in blocks of 64 weights whose scales are quantized
    too, arXiv:2305.14314; computed in `dtype`.
    """
    from transformers import BitsAndBytesConfig

    # For each layer and call it says that it casts to float16, and that is how it works.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def settle_layout(name: str, module: nn.Module) -> None:
    """Has 4-bit weights stay as they were loaded, and refuses those that a CPU would read wrongly.

    On a CPU with AVX512-BF16, bitsandbytes lays 4-bit weights out anew in the first forward, which a digest takes for
    other weights; and its kernels for a CPU take each row to begin a block of scales.
    """
    for path, layer in module.named_modules():
        if type(layer).__name__ != "Linear4bit":
            continue
        layer.support_avx512bf16_for_cpu = False
        if not torch.cuda.is_available() and layer.in_features % NF4_BLOCK:
            raise ConfigError(
                f"build.name={name}: quantization=nf4 on a CPU needs layers with a multiple of {NF4_BLOCK} inputs, and "
                f"{path} has {layer.in_features}; use quantization=int8"
            )
