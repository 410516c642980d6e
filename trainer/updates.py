"""When a model is trained: in which windows its losses count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, frozen=True)
class UpdatePlan:
    """The windows (global steps, from 1) in which a model's losses count.

    Args:
        update_every: Only in every so many windows: with 5, in steps 5, 10, 15...
        start_step: The first of them; None: `update_every`, so 1 by default.
        freeze_after: The last step in which they may count; None: no end.
    """

    update_every: int = 1
    start_step: int | None = None
    freeze_after: int | None = None

    @property
    def first_step(self) -> int:
        """The first global step in which the losses count."""
        return self.update_every if self.start_step is None else self.start_step

    def counts_in(self, step: int) -> bool:
        """Returns whether the losses count in a global step."""
        is_due = step >= self.first_step and (step - self.first_step) % self.update_every == 0
        return is_due and not self.has_ended(step)

    def has_ended(self, step: int) -> bool:
        """Returns whether the model keeps its weights from this global step on."""
        return self.freeze_after is not None and step > self.freeze_after

    def num_windows(self, num_steps: int) -> int:
        """Returns in how many of the first `num_steps` windows the losses count."""
        last = num_steps if self.freeze_after is None else min(num_steps, self.freeze_after)
        return max(0, (last - self.first_step) // self.update_every + 1) if last >= self.first_step else 0

    def find_problems(self, name: str, num_steps: int | None) -> list[str]:
        """Returns what makes the plan of a model impossible, for a run of so many steps (None: not known yet)."""
        found = [
            f"models.{name}.{key}={value}: must be at least 1"
            for key, value in (
                ("update_every", self.update_every),
                ("start_step", self.start_step),
                ("freeze_after", self.freeze_after),
            )
            if value is not None and value < 1
        ]
        if found:
            return found
        if self.has_ended(self.first_step):
            end = f"models.{name}.freeze_after={self.freeze_after}"
            start = f"its first update is in step {self.first_step} ({self._why_first(name)})"
            return [f"{end}: {start}, so it is never updated; raise it, or set models.{name}.trainable=false"]
        if num_steps is not None and self.first_step > num_steps:
            start = f"{self._why_first(name)}: its first update is in step {self.first_step}"
            return [f"{start}, but the run has only {num_steps}; lower it, or lengthen the run"]
        return []

    def _why_first(self, name: str) -> str:
        if self.start_step is None:
            return f"models.{name}.update_every={self.update_every}"
        return f"models.{name}.start_step={self.start_step}"

    def __str__(self) -> str:
        parts = []
        if self.update_every > 1:
            parts.append(f"every {self.update_every} steps")
        if self.first_step != self.update_every:
            parts.append(f"from step {self.first_step}")
        if self.freeze_after is not None:
            parts.append(f"until step {self.freeze_after}")
        return ", ".join(parts) or "every step"


def find_idle_step(plans: list[UpdatePlan], num_steps: int) -> int | None:
    """Returns the first step in which no model's losses count, None if each has one."""
    if any(plan == UpdatePlan() for plan in plans):
        return None
    return next((step for step in range(1, num_steps + 1) if not any(plan.counts_in(step) for plan in plans)), None)
