"""Which of several teachers an example learns from, by its source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from trainer import Batch, ConfigError, did_you_mean

OTHERS = "*"  # the source of all that are not named
MAX_LISTED = 20


class Routes:
    """Sources to teachers.

    Args:
        routes: Source to the name of its teacher; "*" for all others.
        teachers: The names of all teachers, in order.
    """

    def __init__(self, routes: Mapping[str, str], *, teachers: Sequence[str]) -> None:
        self.routes, self.teachers = routes, list(teachers)

    def check(self, *sets: Sequence[str]) -> None:
        """Raises ConfigError for sources without a teacher, and for routes that no row takes.

        Args:
            sets: The sources of each set of examples; none: its rows have none.
        """
        known = {source for sources in sets for source in sources}
        problems = [
            f"task.routes.{source}: no row has this source{did_you_mean(source, known) or _listed(known)}"
            for source in self.routes
            if source != OTHERS and source not in known
        ]
        if OTHERS not in self.routes:
            missing = sorted(source for source in known if source not in self.routes)
            if missing:
                shown = ", ".join(source or "rows without a source" for source in missing)
                problems.append(f"task.routes has no teacher for {shown}; add them, or * for all others")
            elif not all(sets):
                problems.append("task.routes needs rows with a `source` column, which some data lack; add * for these")
        if problems:
            raise ConfigError(*problems)

    def owners(self, batch: Batch, sources: Sequence[str]) -> Tensor:
        """Returns the number of each example's teacher, (B,).

        Args:
            sources: The names of the numbers in the batch's `source`, (B, T), -1 on pads; none: it has no such field.
        """
        if not sources:
            return torch.full_like(batch["input_ids"][:, 0], self._number(OTHERS))
        of_tokens: Tensor = batch["source"]
        of_rows = of_tokens.amax(-1, keepdim=True)
        if ((of_tokens >= 0) & (of_tokens != of_rows)).any():
            raise ConfigError(
                "task.combine=routes needs rows of one source; packed rows have several: data.packing=false"
            )
        numbers = torch.tensor([self._number(name) for name in sources], device=of_rows.device)
        return numbers[of_rows.squeeze(-1)]

    def _number(self, source: str) -> int:
        return self.teachers.index(self.routes.get(source, self.routes.get(OTHERS, "")))


def _listed(names: Collection[str]) -> str:
    return f"; there are {', '.join(sorted(names)[:MAX_LISTED])}" if names else "; no row has any"
