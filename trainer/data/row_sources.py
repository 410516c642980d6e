"""Where each row comes from, as its `source` column says, in words that metrics can be named after."""

import logging
import re
from collections import Counter

from trainer.data.rows import Row

log = logging.getLogger(__name__)

MAX_SOURCES = 20  # with numbers of their own
REST, UNKNOWN = "other", "unknown"


def number_sources_of_rows(rows: list[Row]) -> tuple[list[str], list[int]]:
    """Returns the sources as the rows say them, and each row's place among them; both empty where no row has one.

    A row without one has the source "".
    """
    if not any("source" in row for row in rows):
        return [], []
    given = [str(row.get("source", "")) for row in rows]
    names = sorted(set(given))
    places = {name: place for place, name in enumerate(names)}
    return names, [places[source] for source in given]


def name_sources_of_rows(rows: list[Row]) -> tuple[list[str], list[int]]:
    """Returns the sources' names, and each row's place among them; both empty where no row has a `source`.

    Of many sources those of the most rows have names of their own, the rest is "other"; a row without one is
    "unknown". What is no letter, digit, "_", "." or "-" becomes "_".
    """
    given = [str(row["source"]) if "source" in row else None for row in rows]
    counts = Counter(source for source in given if source is not None)
    if not counts:
        return [], []
    kept = sorted(sorted(counts), key=lambda source: -counts[source])[:MAX_SOURCES]
    if len(kept) < len(counts):
        log.info("%d sources: the %d with the most rows are told apart, the rest is %r", len(counts), len(kept), REST)
    names: dict[str | None, str] = {None: UNKNOWN} if None in given else {}
    names |= {source: REST for source in counts if source not in kept}
    for source in sorted(kept):
        names[source] = _free_name(source, set(names.values()))
    used = sorted(set(names.values()))
    return used, [used.index(names[source]) for source in given]


def _free_name(source: str, taken: set[str]) -> str:
    plain = name = re.sub(r"[^\w.-]+", "_", source) or "_"
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    return name
