"""Words for what is wrong: nearest names, lists of options, one line of an error."""

import difflib
from collections.abc import Iterable, Iterator

from omegaconf import DictConfig

from trainer.saved import node_of


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known name that the word most likely stands for."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, 1, cutoff=0.75)
    if not close:
        last = {name: name.rpartition(".")[2] for name in names}
        tail = difflib.get_close_matches(word.rpartition(".")[2], last.values(), 1, cutoff=0.75)
        candidates = [name for name in names if tail and last[name] == tail[0]]
        close = difflib.get_close_matches(word, candidates, 1, cutoff=0.0)
    close = close or difflib.get_close_matches(word, names, 1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean x?" or nothing."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def listed(options: Iterable[str]) -> str:
    """Returns the options in brackets."""
    return f" (one of {', '.join(options)})"


def one_line(error: BaseException) -> str:
    """Returns an error's text without line breaks."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text; OmegaConf's further ones repeat the key."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def names_below(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key below a node."""
    for key in map(str, cfg):
        if prefix or key != "hydra":
            yield f"{prefix}{key}"
            child = node_of(cfg, key)
            if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing()):
                yield from names_below(child, f"{prefix}{key}.")
