"""What a run leaves behind besides its numbers: run.log, a quiet console, and summary.json."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Collection, Mapping
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import rich
from rich.text import Text

from trainer import distributed
from trainer.redact import RedactingFormatter, redact
from trainer.saving.checkpoints import write_text

# Logging -------------------------------------------------------------------------------------------------------------

LAYOUT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STYLES = {logging.WARNING: "yellow", logging.ERROR: "bold red", logging.CRITICAL: "bold red"}


def setup_logging(folder: Path | None, *, is_main: bool, secrets: Collection[str] = ()) -> None:
    """Sends log records to stderr, and on rank 0 to run.log; other ranks show warnings only, with their rank.

    Called again, it replaces what it set up before: first without a folder, then with it. Warnings of Python and of
    third parties come the same way. A record with `extra={"file_only": True}` stays off the console.

    Args:
        secrets: Values that are hidden besides those that `redact` knows.
    """
    rich.reconfigure(stderr=True)
    root = logging.getLogger()
    early = next((h for h in root.handlers if isinstance(h, EarlyRecords)), None)
    for handler in [h for h in root.handlers if isinstance(h, ConsoleHandler | RunLogHandler | EarlyRecords)]:
        root.removeHandler(handler)
        if handler is not early:
            handler.close()
    root.setLevel(logging.INFO)
    root.addHandler(ConsoleHandler(prefix="" if is_main else f"[rank {distributed.rank()}] "))
    root.handlers[-1].setFormatter(RedactingFormatter(secrets=secrets))
    if not is_main:
        root.handlers[-1].setLevel(logging.WARNING)
    elif folder is None:
        root.addHandler(EarlyRecords())
    else:
        root.addHandler(RunLogHandler(folder / "run.log"))
        root.handlers[-1].setFormatter(RedactingFormatter(LAYOUT, secrets=secrets))
        if early is not None:
            early.setTarget(root.handlers[-1])
            early.close()
    logging.captureWarnings(True)


class ConsoleHandler(logging.Handler):
    """Writes bare messages through rich's global console, so that a live display stays below them."""

    def __init__(self, *, prefix: str) -> None:
        super().__init__(logging.INFO)
        self.prefix = prefix
        self.addFilter(is_no_chatter)
        self.addFilter(concerns_the_user)

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = Text(f"{self.prefix}{level}{self.format(record).rstrip()}", style=STYLES.get(record.levelno, ""))
        rich.get_console().print(text, soft_wrap=True)


class EarlyRecords(MemoryHandler):
    """Keeps what was said before the run had a folder, for its run.log."""

    def __init__(self) -> None:
        super().__init__(capacity=10_000, flushLevel=logging.CRITICAL + 1)


class RunLogHandler(logging.FileHandler):
    """Writes run.log, with times and levels, and with the warnings that the console leaves out."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self.addFilter(is_no_chatter)
        self.addFilter(lambda record: record.name != "trainer.heartbeat")  # for those who wait


# Third parties -------------------------------------------------------------------------------------------------------

# Libraries whose INFO is about themselves. Their warnings are shown.
CHATTY = ("accelerate", "datasets", "deepspeed", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub", "torch",
          "transformers", "urllib3")  # fmt: skip

# Logger to those of its warnings that a user of this trainer can do nothing about; they still reach run.log.
ADVISORY: dict[str, re.Pattern[str]] = {
    # All of them: memory cache flushes, untested optimizers, skipped steps (which trainer/non_finite.py reports).
    "DeepSpeed": re.compile(""),
    "transformers": re.compile(
        r"is incompatible with gradient checkpointing"  # it switches the cache off by itself
        r"|generation flags are not valid"  # a hub model's sampling defaults, unused when greedy
        r"|Token indices sequence length is longer"  # long documents are cut into blocks after tokenizing
        r"|tokenizer has new PAD/BOS/EOS tokens"  # the model's config follows its tokenizer
        r"|`loss_type=None` was set in the config"
    ),
}

# Python warnings: message, category.
HARMLESS: list[tuple[str, type[Warning]]] = [
    # DeepSpeed 0.19 calls names that torch 2.13 renames; ours are none of these.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is a private function", FutureWarning),
    # Accelerate gives no device id to the group; each rank uses its own device all the same.
    (r"No device id is provided via `init_process_group`", UserWarning),
    (r"(?s)barrier\(\): using the device under current context", UserWarning),
]


def concerns_the_user(record: logging.LogRecord) -> bool:
    """Returns whether the console shows a record."""
    advisory = ADVISORY.get(_library(record))
    if getattr(record, "file_only", False):
        return False
    return record.levelno >= logging.ERROR or advisory is None or not advisory.search(record.getMessage())


def is_no_chatter(record: logging.LogRecord) -> bool:
    """Returns whether a record is worth keeping."""
    return record.levelno >= logging.WARNING or _library(record) not in CHATTY


def _library(record: logging.LogRecord) -> str:
    return record.name.partition(".")[0]


def quiet_third_parties() -> None:
    """Silences what does not concern the user, each where it comes from; errors always pass.

    Call it before DeepSpeed is imported. Python's `-W` and PYTHONWARNINGS win over it.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no accelerator
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for message, category in HARMLESS:
        warnings.filterwarnings("ignore", message=message, category=category, append=bool(sys.warnoptions))
    _route_deepspeed()
    _route_transformers()


def _route_deepspeed() -> None:
    # Its logger gets a handler of its own, on stdout, whenever it is imported: a filter comes before all handlers.
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(known, _ToRoot) for known in logger.filters):
        logger.addFilter(_ToRoot())


class _ToRoot(logging.Filter):
    """Hands every record to the root logger's handlers instead of the logger's own."""

    def filter(self, record: logging.LogRecord) -> bool:
        logging.getLogger().handle(record)
        return False


def _route_transformers() -> None:
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    # Those of loading and writing shards; sign_of_life tells what takes long.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if rich.get_console().is_terminal and not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()  # the line above takes those of downloads, too


# Summary -------------------------------------------------------------------------------------------------------------


def write_summary(
    folder: Path,
    *,
    task: str,
    status: str,
    global_step: int,
    seconds: float,
    before: Mapping[str, float],
    after: Mapping[str, float],
    reference: Mapping[str, float],
    gap_closed: Mapping[str, float],
) -> None:
    """Writes summary.json in one piece; status is completed, stopped, interrupted or failed.

    NaN and infinities, which JSON does not have, are null.
    """
    summary: dict[str, Any] = {
        "task": redact(task),
        "status": status,
        "global_step": global_step,
        "seconds": round(seconds, 3),
        "before": _finite(before),
        "after": _finite(after),
        "reference": _finite(reference),
        "gap_closed": _finite(gap_closed),
    }
    write_text(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
