"""The loggers that come with the trainer, each imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.loggers.jsonl import JsonlLogger
    from trainer.loggers.logger import Logger
    from trainer.loggers.tensorboard import TensorBoardLogger
    from trainer.loggers.wandb import WandbLogger

__all__ = ["JsonlLogger", "Logger", "TensorBoardLogger", "WandbLogger"]

_MODULES = {"JsonlLogger": "jsonl", "Logger": "logger", "TensorBoardLogger": "tensorboard", "WandbLogger": "wandb"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
