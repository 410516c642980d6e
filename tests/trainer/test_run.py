"""How a run ends and what it leaves, in its modes."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.test_cli import CODE, TASK, trainer
from trainer import run

# Knows its model from `setup` on, as the distillation does.
VALIDATING = """

class Score(FitLine):
    def setup(self, stage):
        self.line = self.models["line"]

    def validation_step(self, batch, batch_idx):
        return {"error": (self.line(batch["x"]) - batch["y"]).square().mean()}
"""


def test_a_run_that_a_callback_ended_says_why(caplog: pytest.LogCaptureFixture) -> None:
    fitted = SimpleNamespace(fit=lambda *_, **__: None, stop_reason="val/loss got worse", global_step=7, folder=Path())
    job: Any = SimpleNamespace(trainer=fitted, task=None, models={}, data=None)

    with caplog.at_level(logging.INFO):
        run.fit(job, OmegaConf.create({"export": {"enabled": False}}), None)

    assert "stopped at step 7: val/loss got worse" in caplog.text


def test_models_are_scored_and_exported_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "line.yaml").write_text(TASK.replace("lines.FitLine", "lines.Score"))
    (tmp_path / "lines.py").write_text(CODE + VALIDATING)

    done = trainer(
        "--config-dir=conf",
        "task=line",
        "logger=[jsonl]",
        "data.validation={_target_: lines.points}",
        "export.enabled=true",
        "hydra.run.dir=out",
        "mode=export",
        cwd=tmp_path,
    )

    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert done.returncode == 0, done.stderr
    assert (summary["status"], summary["global_step"], summary["before"]) == ("completed", 0, {})
    assert list(summary["after"]) == ["val/error"]
    assert (tmp_path / "out" / "export" / "line" / "model.safetensors").exists()
