"""The callbacks that come with the trainer, each imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.callbacks.callback import Callback
    from trainer.callbacks.early_stopping import EarlyStopping
    from trainer.callbacks.model_summary import ModelSummary
    from trainer.callbacks.monitor import ModelMonitor
    from trainer.callbacks.progress import ProgressBar
    from trainer.callbacks.samples import SampleTable
    from trainer.callbacks.throughput import Throughput

__all__ = [
    "Callback",
    "EarlyStopping",
    "ModelMonitor",
    "ModelSummary",
    "ProgressBar",
    "SampleTable",
    "Throughput",
]

_MODULES = {
    "Callback": "callback",
    "EarlyStopping": "early_stopping",
    "ModelMonitor": "monitor",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress",
    "SampleTable": "samples",
    "Throughput": "throughput",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
