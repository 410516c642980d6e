"""Which of this trainer's builds give what a task reads: logits, a score per text, or a value per token."""

from collections.abc import Mapping

LOGITS, SCORE, VALUES = "logits", "a score per text", "a value per token"

_GIVEN = {
    "trainer.models.causal_lm": "causal_lm",
    "trainer.scorers.sequence_scorer": "reward_model",
    "trainer.scorers.token_scorer": "critic",
    "trainer.encoders.encoder": "encoder",
}
# The right build first. A critic's score of the last token is one of its text.
_RIGHT = {LOGITS: ("causal_lm",), SCORE: ("reward_model", "critic"), VALUES: ("critic",)}


def find_kind_problems(wanted: Mapping[str, str], targets: Mapping[str, str]) -> list[str]:
    """Returns which models are built as something that the task cannot read; a user's own build may be anything.

    Args:
        wanted: By model: LOGITS, SCORE or VALUES.
        targets: By model: the `_target_` of its build.
    """
    problems = []
    for name, kind in wanted.items():
        build = _GIVEN.get(targets.get(name, "").removesuffix("_from_config"))
        if build is not None and build not in _RIGHT[kind]:
            right = _RIGHT[kind][0]
            problems.append(
                f"models.{name}.build is of {build}, but the task reads {kind} of it; choose "
                f"model@models.{name}.build={right}, or {right}_from_config"
            )
    return problems
