"""Builds each model under its own plugin and gives it its engine."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from trainer import distributed
from trainer.adapters import add_lora
from trainer.config import ConfigError, find_name_problems
from trainer.handle import ModelHandle
from trainer.plugin_keys import AUTO
from trainer.plugins import (
    Config,
    Facts,
    check_values,
    dtype_name,
    dtype_of,
    log_rewrites,
    read_plugin,
    resolve,
    stage_of,
    uses_engine,
)
from trainer.quantization import find_origin_problem
from trainer.seeds import seed_everything
from trainer.specs import (
    ModelSpec,
    RunFacts,
    build_module,
    check_spec,
    check_window,
    facts_of,
    keywords_of,
    name_of,
    quantization_of,
    tell_idle,
    tell_unreached,
)
from trainer.start_weights import copy_start_weights, find_origin_problems
from trainer.updates import UpdatePlan

log = logging.getLogger(__name__)

REPLICATED = ""  # a name without a plugin, as of a model without an engine
Plugin: TypeAlias = DeepSpeedPlugin | Mapping[str, Any] | str | Path
Finish: TypeAlias = Callable[[nn.Module], nn.Module]


class Engines:
    """The plugins of all models and the one Accelerator that knows them."""

    def __init__(self, plugins: Mapping[str, Plugin], *, timeout_seconds: int) -> None:
        distributed.ensure_environment()
        _clear_launcher_settings()
        self.configs: dict[str, Config] = {name: _config_of(name, plugin) for name, plugin in plugins.items()}
        self.plugins = {
            name: given if isinstance(given := plugins[name], DeepSpeedPlugin) else _plugin_of(config)
            for name, config in self.configs.items()
            if uses_engine(config)
        }
        self.accelerator, self.timeout_seconds = _accelerator(self.plugins, timeout_seconds), timeout_seconds
        self._seen: dict[str, Config] = {}  # the configurations that transformers' views of the plugins are of

    @contextmanager
    def selected(self, name: str) -> Iterator[None]:
        """Makes a model's plugin the active one of Accelerate and transformers, and restores the one before."""
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        before = next((key for key, plugin in self.plugins.items() if plugin.selected), None)
        if name in self.plugins:
            self._select(name)
        else:
            # or transformers would shard a model that has no engine
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if before is not None:
                self._select(before)

    def _select(self, name: str) -> None:
        """Does what `select_deepspeed_plugin` does, but makes transformers' view of a plugin only when it has changed.

        To make one, versions of packages are read from files, which takes milliseconds; hooks select several times a
        step.
        """
        from transformers.integrations.deepspeed import set_hf_deepspeed_config

        plugin = self.plugins[name]
        if self._seen.get(name) != plugin.deepspeed_config:
            self.accelerator.state.select_deepspeed_plugin(name)
            self._seen[name] = copy.deepcopy(plugin.deepspeed_config)
            return
        for other in self.plugins.values():
            other._set_selected(other is plugin)
        set_hf_deepspeed_config(plugin.dschf)  # type: ignore[no-untyped-call]

    def check(self, models: Mapping[str, ModelSpec], run: RunFacts) -> list[str]:
        """Returns every problem of the models and their plugins, before any of them is built."""
        unpaired = set(models) ^ set(self.configs)
        places = {True: "plugin; add it to MultiModelTrainer(plugins=...)", False: "model; add it to fit(models=...)"}
        problems = [f"'{name}' has no {places[name in models]}" for name in sorted(unpaired)]
        problems += find_name_problems({name: spec.trainable for name, spec in models.items()})
        problems += find_origin_problems({name: spec.init_from for name, spec in models.items()})
        kinds = {name: quantization_of(spec) for name, spec in models.items()}
        for name in (name for name in models if name not in unpaired):
            problems += self._check_model(name, models[name], run)
            problems += find_origin_problem(name, models[name].init_from, kinds)
        if not problems and run.trains:
            tell_idle(models, run)
            tell_unreached(models, self.configs, run)
        return problems

    def _check_model(self, name: str, spec: ModelSpec, run: RunFacts) -> list[str]:
        config, dtype = self.configs[name], self._dtype(name, spec)
        problems = check_spec(name, spec, config, dtype, self.accelerator.device) + check_window(name, spec, run)
        if not problems and uses_engine(config):
            facts = facts_of(spec, run, dtype, self.accelerator.device)
            problems = check_values(f"models.{name}.plugin", config, facts)
        return problems

    def _dtype(self, name: str, spec: ModelSpec) -> torch.dtype:
        return spec.dtype or dtype_of(self.configs[name]) or automatic_dtype(self.accelerator.device)

    def prepare(self, name: str, spec: ModelSpec, run: RunFacts, *, origin: ModelHandle | None = None) -> ModelHandle:
        """Returns the model, built and wrapped under its own plugin; `check` found nothing wrong with it.

        Args:
            origin: The model whose start weights it takes, where it does.
        """
        config, dtype = self.configs[name], self._dtype(name, spec)
        seed_everything(run.seed, name)  # by name, or two models of one class would start alike
        with self.selected(name):
            if not uses_engine(config):
                return self._replicate(name, spec, dtype, _finish(name, spec, run, origin))
            facts = facts_of(spec, run, dtype, self.accelerator.device)
            log_rewrites(f"models.{name}.plugin", config, facts)
            self._apply(name, resolve(f"models.{name}.plugin", config, facts))
        with self.selected(name):  # anew: transformers must see the configuration as it is now
            module = _build(name, spec, dtype, self._sharding_at_birth(name), _finish(name, spec, run, origin))
            # Now that the module tells its size: the final values of what depends on it.
            facts.hidden_size = _hidden_size(module)
            self._apply(name, resolve(f"models.{name}.plugin", config, facts))
            handle = self._initialize(name, spec, module, facts)
        distributed.set_timeouts(self.timeout_seconds)
        gc.collect()
        return handle

    def _apply(self, name: str, resolved: Config) -> None:
        # In place: Accelerate and the user hold this very dict.
        active = self.plugins[name].deepspeed_config
        active.clear()
        active.update(resolved)

    @contextmanager
    def _sharding_at_birth(self, name: str) -> Iterator[None]:
        import deepspeed

        config = self.plugins[name].deepspeed_config
        if stage_of(config) != 3:
            yield
            return
        # Where torch first needs it, it imports this, which fails within zero.Init.
        importlib.import_module("torch._dynamo")
        # from_pretrained opens another one inside; DeepSpeed counts them.
        with _initializing_gathered(), deepspeed.zero.Init(config_dict_or_path=config):
            yield

    def _replicate(self, name: str, spec: ModelSpec, dtype: torch.dtype, finish: Finish | None = None) -> ModelHandle:
        module = _build(name, spec, dtype, nullcontext(), finish)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        module.to(self.accelerator.device)
        return _frozen_handle(name, module, module, config=None, select=self.selected)

    def reload(
        self, handle: ModelHandle, build: Callable[..., nn.Module], *, sharded: bool, finish: Finish | None = None
    ) -> ModelHandle:
        """Returns another copy of a model, frozen: under the first one's ZeRO-3 plugin, or whole on every rank.

        Args:
            finish: What is done to the built module outside zero.Init, such as loading adapters onto it.
        """
        spec = ModelSpec(build=build, trainable=False)
        if not sharded:
            with self.selected(REPLICATED):
                return self._replicate(handle.name, spec, handle.dtype, finish)
        import deepspeed

        assert handle.config is not None
        config = {key: value for key, value in handle.config.items() if key not in ("optimizer", "scheduler")}
        with self.selected(handle.name):
            module = _build(handle.name, spec, handle.dtype, self._sharding_at_birth(handle.name), finish)
            engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
        return _frozen_handle(handle.name, engine, engine.module, config=config, select=self.selected)

    def _initialize(self, name: str, spec: ModelSpec, module: nn.Module, facts: Facts) -> ModelHandle:
        import deepspeed

        config = self.plugins[name].deepspeed_config
        optimizer = _make_optimizer(name, spec, module, config)
        engine, _, _, engine_scheduler = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=_trainable_parameters(module) if spec.trainable and optimizer is None else None,
            config=config,
            dist_init_required=False,
        )
        if spec.trainable and optimizer is None:
            optimizer = engine.basic_optimizer
        scheduler = None
        if spec.trainable and engine_scheduler is None and spec.scheduler is not None:
            assert optimizer is not None
            scheduler = _fill_autos(spec.scheduler, facts.num_updates)(optimizer)
        return ModelHandle(
            name,
            engine=engine,
            module=engine.module,
            trainable=spec.trainable,
            config=config,
            accumulation=facts.accumulation,
            plan=spec.plan,
            optimizer=optimizer if spec.trainable else None,
            scheduler=scheduler,
            schedule=name_of(engine_scheduler or spec.scheduler),
            select=self.selected,
        )


def _frozen_handle(
    name: str, engine: nn.Module, module: nn.Module, *, config: Config | None, select: Callable[[str], Any]
) -> ModelHandle:
    return ModelHandle(
        name,
        engine=engine,
        module=module,
        trainable=False,
        config=config,
        accumulation=1,
        plan=UpdatePlan(),
        optimizer=None,
        scheduler=None,
        schedule="none",
        select=select,
    )


def automatic_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where the hardware computes in it, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type == "cpu":
        # Without these instructions a CPU is 20 times slower in bfloat16 than in float32.
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return torch.bfloat16


def _clear_launcher_settings() -> None:
    """Removes what `accelerate launch` left for a single plugin: here each model has its own."""
    if os.environ.pop("ACCELERATE_USE_CPU", None) and torch.cuda.is_available():
        raise ConfigError(
            "ACCELERATE_USE_CPU is set, which switches DeepSpeed off; to run on the CPU, unset it and set "
            "CUDA_VISIBLE_DEVICES= (empty)"
        )
    for name in [key for key in os.environ if key.startswith("ACCELERATE_")]:
        if any(word in name for word in ("DEEPSPEED", "CONFIG_DS", "GRADIENT", "MIXED_PRECISION")):
            value = os.environ.pop(name)
            if name != "ACCELERATE_USE_DEEPSPEED" and value not in ("", "no", "1"):
                log.info("ignoring %s=%s of the launcher: each model has its own plugin", name, value)


def _config_of(name: str, plugin: Plugin) -> Config:
    if isinstance(plugin, DeepSpeedPlugin):
        # A copy: Accelerate writes into it, and `auto` must still be seen when the models are known.
        config = read_plugin(f"models.{name}.plugin", plugin.deepspeed_config)
        if config.get("gradient_accumulation_steps") == 1:
            config["gradient_accumulation_steps"] = AUTO  # Accelerate has put its 1 where there was `auto` or nothing
        if config.get("steps_per_print") == math.inf:
            del config["steps_per_print"]  # Accelerate's word for never; DeepSpeed's is a large number
        return config
    return read_plugin(f"models.{name}.plugin", plugin)


def _plugin_of(config: Config) -> DeepSpeedPlugin:
    plain = {"zero_optimization": {"stage": 0}, **{key: value for key, value in config.items() if value != AUTO}}
    return DeepSpeedPlugin(hf_ds_config=plain)


def _skip_unused_kernel() -> None:
    """Keeps DeepSpeed from compiling, on a CPU, a kernel that training never calls.

    It takes a minute or more of a fresh machine's time without a word and needs a compiler. Only tensor-parallel
    inference uses it.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _accelerator(plugins: dict[str, DeepSpeedPlugin], timeout_seconds: int) -> Accelerator:
    on_gpu = torch.cuda.is_available()
    _skip_unused_kernel()
    # Without a backend Accelerate believes, on a CPU, that there is one process.
    group = InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout_seconds))
    return Accelerator(
        deepspeed_plugins=plugins or None,
        kwargs_handlers=[group],
        mixed_precision="no",  # each model's plugin says its own
    )


def _fill_autos(function: Callable[..., Any], num_updates: int) -> Callable[..., Any]:
    filled = {key: num_updates for key, value in keywords_of(function).items() if value == AUTO}
    return functools.partial(function, **filled)


@contextmanager
def _initializing_gathered() -> Iterator[None]:
    """Makes a transformers model that its class builds, within zero.Init, initialize whole weights.

    At the end of such a constructor the weights are empty: a padding index fails, and else torch's default
    distribution stays, without a word. `from_pretrained` and `from_config` replace the method for themselves.
    """
    from transformers import PreTrainedModel
    from transformers.integrations.deepspeed import initialize_weights_zero3

    def initialize(model: PreTrainedModel) -> None:
        initialize_weights_zero3(model)  # type: ignore[no-untyped-call]
        model.tie_weights(recompute_mapping=False)

    original = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.init_weights = original  # type: ignore[method-assign]


def _finish(name: str, spec: ModelSpec, run: RunFacts, origin: ModelHandle | None) -> Finish:
    """Returns what is done to a built module outside zero.Init: another model's weights, then adapters."""

    def finish(module: nn.Module) -> nn.Module:
        if origin is not None:
            copy_start_weights(module, origin.module, name=name, origin=origin.name)
        return add_lora(name, module, settings=spec.lora, seed=run.seed) if spec.lora else module

    return finish


def _build(
    name: str, spec: ModelSpec, dtype: torch.dtype, sharding: AbstractContextManager[None], finish: Finish | None
) -> nn.Module:
    try:
        with sharding:
            module = build_module(spec.build, dtype)
        if finish is not None and isinstance(module, nn.Module):
            module = finish(module)
    except Exception as error:
        error.add_note(f"raised while building models.{name}")
        raise
    if not isinstance(module, nn.Module):
        raise ConfigError(f"models.{name}.build must return a torch.nn.Module, but returned {type(module).__name__}")
    if spec.trainable:
        if spec.freeze:
            from trainer.freezing import freeze

            freeze(module, spec.freeze, key=f"models.{name}.freeze")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(f"models.{name} is trainable, but none of its parameters requires a gradient")
        return module.train()
    return module.requires_grad_(False).eval()


def _hidden_size(module: nn.Module) -> int | None:
    config = getattr(module, "config", None)
    size = getattr(config, "hidden_size", None)
    return int(size) if isinstance(size, int) else None


def _trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _make_optimizer(name: str, spec: ModelSpec, module: nn.Module, config: Config) -> Optimizer | None:
    if not spec.trainable or "optimizer" in config:
        return None
    assert spec.optimizer is not None
    try:
        return spec.optimizer(_trainable_parameters(module))
    except (TypeError, ValueError) as error:
        error.add_note(f"raised while making models.{name}.optimizer for {dtype_name(next(module.parameters()).dtype)}")
        raise
