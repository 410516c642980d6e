"""What a user reads at the end: the closing table, the samples, and the model card of an export."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

import yaml
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from trainer.redact import redact

Rows = list[list[str]]

GAP_CLOSED = "gap closed"  # the title of its column

# Numbers -------------------------------------------------------------------------------------------------------------


def is_of_group(metric: str) -> bool:
    """Returns whether a metric is of a part of the held-out examples, such as val/by_length/1-16/forward_kl.

    There may be many of them: they go to the loggers and to summary.json, not into tables and lines that are read.
    """
    return any(part.startswith("by_") for part in metric.split("/")[:-1])


def share_of_gap_closed(
    before: Mapping[str, float],
    after: Mapping[str, float],
    reference: Mapping[str, float],
    *,
    directions: Mapping[str, str],
) -> dict[str, float]:
    """Returns (before - after) / (before - reference) of the metrics that all three have.

    1 is as good as the reference; below 0 is worse than before. Where the reference was not better than the model
    before training, there was no gap.

    Args:
        directions: Last part of a metric's name to "min" or "max", which way it is better; others are left out.
    """
    shares = {}
    for name in [name for name in before if name in after and name in reference]:
        sign = {"min": 1.0, "max": -1.0}.get(directions.get(name.rpartition("/")[2], ""), 0.0)
        gap = sign * (before[name] - reference[name])
        if gap > 0 and math.isfinite(gap) and math.isfinite(after[name]):
            shares[name] = sign * (before[name] - after[name]) / gap
    return shares


def format_number(value: float | None) -> str:
    """Returns a metric as tables show it: a count, which is an int, whole; nothing for what was not measured."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 100 else f"{value:.4g}"


# Closing table -------------------------------------------------------------------------------------------------------


def closing_rows(
    *,
    trained: Sequence[str],
    before: Mapping[str, float],
    after: Mapping[str, float],
    reference_name: str | None = None,
    reference: Mapping[str, float] | None = None,
    gap_closed: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    num_parameters: Mapping[str, int] | None = None,
    step_time: float | None = None,
    rates: Mapping[str, float] | None = None,
    memory_gb: float | None = None,
) -> tuple[list[str], Rows]:
    """Returns the head and the rows of the closing table, as text.

    Args:
        trained: The trained models; of several, metrics "val/<model>/..." stand in that model's own columns.
        before: Metrics before the training ("val/..." to value); `after` likewise, or what was measured
            without a training, where `before` is empty. Those of groups are left out.
        gap_closed: From `share_of_gap_closed`; a column of it stands at the end if it holds anything.
        labels: Metric without "val/" to how it is written, such as "cross_entropy": "cross-entropy (nats)"; others
            get spaces for underscores.
        num_parameters: Model to its number of parameters.
        step_time: Median seconds of a global step.
        rates: "tokens_per_s" or "examples_per_s" to its value.
    """
    columns = _trained_columns(trained, before, after)
    if reference_name is not None:
        columns.append((reference_name, [reference_name], reference or {}))
    names = [name for name in dict.fromkeys(n for *_, metrics in columns for n in metrics) if not is_of_group(name)]
    names = _beside_their_metrics(names)
    rows = [
        [label_of(name, labels or {}), *(format_number(metrics.get(name)) for *_, metrics in columns)] for name in names
    ]
    shares = gap_closed or {}
    has_shares = any(name in shares for name in names)
    if has_shares:
        rows = [[*row, _share(shares.get(name))] for name, row in zip(names, rows, strict=True)]
    sizes = num_parameters or {}
    if any(model in sizes for _, models, _ in columns for model in models):
        totals = [_size([sizes.get(model, 0) for model in models]) for _, models, _ in columns]
        rows.append(["parameters", *totals, *[""] * has_shares])
    speed = {name.replace("_per_s", "/s"): rate for name, rate in (rates or {}).items()}
    costs = {"step time (s)": step_time, **speed, "peak memory (GB)": memory_gb}
    left = [""] * (len(_moments(before, after)) - 1)
    right = [""] * (len(columns) - 1 - len(left) + has_shares)
    rows += [[label, *left, f"{value:.4g}", *right] for label, value in costs.items() if value is not None]
    return ["", *(title for title, *_ in columns), *[GAP_CLOSED] * has_shares], rows


def _beside_their_metrics(names: Sequence[str]) -> list[str]:
    """Returns the names with the ends of an interval, <metric>_low and <metric>_high, right after their metric."""
    ends = {end: name for name in names for end in (f"{name}_low", f"{name}_high") if end in names}
    places = {name: place for place, name in enumerate(names)}
    return sorted(names, key=lambda name: (places[ends.get(name) or name], places[name]))


def _trained_columns(
    trained: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]
) -> list[tuple[str, list[str], Mapping[str, float]]]:
    """Returns title, models and metrics of each column; what is no one model's is that of all together."""
    prefixes = {name: f"val/{name}/" for name in trained} if len(trained) > 1 else {}

    def of_model(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
        return {f"val/{name.removeprefix(prefix)}": v for name, v in metrics.items() if name.startswith(prefix)}

    def of_all(metrics: Mapping[str, float]) -> dict[str, float]:
        return {name: v for name, v in metrics.items() if not name.startswith(tuple(prefixes.values()))}

    groups = [
        (name, [name], of_model(before, prefix), of_model(after, prefix))
        for name, prefix in prefixes.items()
        if of_model({**before, **after}, prefix)
    ]
    if of_all({**before, **after}) or not groups:
        groups.append((" + ".join(trained) or "models", list(trained), of_all(before), of_all(after)))
    return [
        (f"{title} {moment}", models, first if moment == "before" else last)
        for title, models, first, last in groups
        for moment in _moments(before, after)
    ]


def _moments(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, ...]:
    """Returns what the columns of a trained model are; without a training they are one."""
    return ("now",) if after and not before else ("before", "after")


def columns_without(others: Sequence[str], columns: Sequence[str], rows: Rows) -> tuple[list[str], Rows]:
    """Returns the head and the rows without the columns of other models, and without rows that are empty then."""
    theirs = {f"{name} {when}" for name in others for when in ("before", "after", "now")}
    kept = [index for index, title in enumerate(columns) if title not in theirs]
    cut = [[row[index] for index in kept] for row in rows]
    return [columns[index] for index in kept], [row for row in cut if any(row[1:])]


def label_of(name: str, labels: Mapping[str, str]) -> str:
    """Returns how a metric is written."""
    short = name.removeprefix("val/")
    return labels.get(short, short.replace("_", " "))


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value + 0.0:.1f} %".replace("-0.0 %", "0.0 %")


def _size(counts: Sequence[int]) -> str:
    count = sum(counts)
    if not count:
        return ""
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"


def closing_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "held-out text") -> Table:
    """Returns the rows of `closing_rows` as a table for the terminal; the title stands above the metrics' names.

    Where a line of 80 characters is short, titles and names are broken between words, so that no number is.
    """
    widths = [max(map(len, cells)) for cells in zip([title, *columns[1:]], *rows, strict=True)]
    is_wide = sum(widths) + 4 * (len(widths) - 1) > 80
    table = Table(box=None, pad_edge=False, padding=(0, 1 if is_wide else 2))
    table.add_column(title, overflow="fold")
    for column in columns[1:]:
        head = column.replace(" ", "\n") if is_wide else column
        # Of more columns than these a number may need two lines: all of it is there.
        table.add_column(head, justify="right", overflow="fold", no_wrap=len(columns) <= 7)
    for row in rows:
        table.add_row(*row)
    return table


def sample_panel(columns: Sequence[str], rows: Sequence[Sequence[str]], *, limit: int = 3) -> RenderableType:
    """Returns the first prompts with each model's answer, a panel per prompt; the first column is the prompt."""
    return Group(*(_sample(columns, row) for row in rows[:limit]))


def _sample(columns: Sequence[str], row: Sequence[str]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for column, text in zip(columns[1:], row[1:], strict=True):
        table.add_row(_plain(column), _plain(text) or "(nothing)")
    return Panel(table, title=_plain(row[0]), title_align="left")


def _plain(text: str) -> str:
    # What a model says may look like rich's markup.
    return " ".join(text.split()).replace("[", "\\[")


# Model card ----------------------------------------------------------------------------------------------------------


def model_card(
    *,
    name: str,
    command: str,
    run_name: str,
    task: str,
    is_transformers: bool,
    adapter_base: tuple[str, str | None] | None = None,
    base_model: str | None = None,
    teacher: str | None = None,
    data: Sequence[str] = (),
    tags: Sequence[str] = (),
    weights_license: str | None = None,
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    title: str = "held-out text",
    sample_columns: Sequence[str] = (),
    sample_rows: Sequence[Sequence[str]] = (),
    versions: Mapping[str, str] | None = None,
    notes: str = "",
) -> str:
    """Returns a README.md with front matter for an exported model, without secrets; needs no network.

    Args:
        name: The model's role, such as "student".
        run_name: What identifies the run, such as its folder or its configuration's hash.
        adapter_base: Of a folder that holds an adapter only, its base model's class, and the name or folder if any.
        base_model: What it was started from; in the front matter only if it is a hub name.
        data: Files or hub names of the training data; hub names go into the front matter.
        weights_license: Left out unless known: weights inherit that of what they were started from.
        columns, rows: From `closing_rows`.
        notes: A paragraph of the caller's, in Markdown.
    """
    front = {
        "base_model": base_model if base_model and is_hub_name(base_model) else None,
        "datasets": [source for source in data if is_hub_name(source)] or None,
        "library_name": "peft" if adapter_base else "transformers" if is_transformers else None,
        "license": weights_license,
        "tags": [task, *(tag for tag in tags if tag != task)],
    }
    known = {key: value for key, value in front.items() if value is not None}
    facts = {"Started from": base_model, "Teacher": teacher, "Data": ", ".join(data) or None, "Run": run_name}
    sections = [
        f"---\n{yaml.safe_dump(known, sort_keys=False)}---",
        f"# {name}",
        f"The result of one run of `python -m trainer`, task `{task}`. Nobody has checked it beyond the numbers below.",
        "\n".join(f"- {label}: `{value}`" for label, value in facts.items() if value),
        f"Made by:\n\n```sh\n{command}\n```",
        _markdown_adapter(*adapter_base) if adapter_base else "",
        notes,
        f"## Results\n\n{markdown_table([title, *columns[1:]], rows)}" if rows else "",
        _markdown_samples(sample_columns, sample_rows),
        f"## Versions\n\n{_markdown_versions(versions)}" if versions else "",
    ]
    return redact("\n\n".join(section for section in sections if section) + "\n")


def _markdown_adapter(kind: str, base: str | None) -> str:
    imports, made = "from peft import PeftModel\n", "base_model = ...  # what build.yaml makes\n"
    if base is not None:
        imports += f"from transformers import {kind}\n"
        made = f"base_model = {kind}.from_pretrained({json.dumps(base)})\n"
    load = 'model = PeftModel.from_pretrained(base_model, "<this folder>")'
    text = "This folder holds a LoRA adapter only, to be loaded onto its base model:"
    return f"{text}\n\n```python\n{imports}\n{made}{load}\n```"


def is_hub_name(source: str) -> bool:
    """Returns whether a source looks like owner/name; a path does too, unless it begins with a dot or has a suffix."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) is not None and not re.search(
        r"\.(txt|jsonl?|csv|parquet|gguf|safetensors|bin|pt)$", source
    )


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; all columns but the first are numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown_samples(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    prompts = [
        f"**{_cell(row[0])}**\n\n"
        + "\n".join(f"- {column}: {_quoted(text)}" for column, text in zip(columns[1:], row[1:], strict=True))
        for row in rows
    ]
    return "\n\n".join(["## Samples", *prompts])


def _quoted(text: str) -> str:
    # A code span shows a model's words as they are; its fence must be longer than any inside.
    words = " ".join(text.split())
    if not words:
        return "(nothing)"
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", words)), default=0))
    return f"{fence} {words} {fence}" if "`" in words else f"{fence}{words}{fence}"


def _markdown_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())
