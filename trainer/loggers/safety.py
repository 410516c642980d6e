"""What keeps a logger from harming a run: it fails quietly, and it tells no secrets."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

# By name, not by value; `pad_token`, `max_new_tokens` and `tokenizer` are none.
SECRET = re.compile(r"(^|_)(api_key|apikey|access_key|private_key|secret|secret_key|password|passwd|credentials?)$|"
                    r"(^|_)(auth|hf|hub|access|api|wandb|bearer)_token$|^token$", re.IGNORECASE)  # fmt: skip
HIDDEN = "(hidden)"


def without_secrets(config: Any) -> Any:
    """Returns a copy of plain containers in which the values of keys such as api_key or hf_token are hidden."""
    if isinstance(config, Mapping):
        return {
            str(key): HIDDEN if SECRET.search(str(key)) and value is not None else without_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, Sequence) and not isinstance(config, str | bytes):
        return [without_secrets(value) for value in config]
    return config


class Fuse:
    """Turns the first failure of a logger into one warning, after which the logger is off.

    Args:
        name: The logger, as the user knows it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_blown = name, False

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Runs the body; any exception of it ends the logger instead of the run."""
        try:
            yield
        except Exception as error:
            self.is_blown = True
            log.info("%s: %s failed", self.name, what, exc_info=True, extra={"file_only": True})
            reason = str(error).strip().partition("\n")[0]
            log.warning(
                "%s is off for the rest of this run: %s failed (%s: %s); the run goes on",
                self.name,
                what,
                type(error).__name__,
                reason,
            )
