"""Folders of runs with checkpoints, made by hand: as much of them as anything before the ranks looks at."""

import hashlib
import json
from pathlib import Path

from trainer.compose import Composition, Request, compose_run, conf_dir
from trainer.saved import save_config, write_config
from trainer.saving.checkpoints import name_of, point


def compose_with(*overrides: str, config_dir: Path | None = None, config_path: Path | None = None) -> Composition:
    """Returns what the words of a command line compose to."""
    return compose_run(Request(overrides=overrides, config_path=config_path or conf_dir(), config_dir=config_dir))


def make_run(
    folder: Path,
    *overrides: str,
    steps: tuple[int, ...] = (2, 4),
    best: int | None = None,
    world_size: int = 1,
    config_dir: Path | None = None,
) -> Path:
    """Makes the folder of a run with checkpoints, as far as anything before the ranks looks at it."""
    composition = compose_with(*overrides, config_dir=config_dir)
    assert composition.problems == []
    folder.mkdir(parents=True)
    save_config(composition.cfg, folder)
    for step in steps:
        path = folder / "checkpoints" / name_of(step)
        path.mkdir(parents=True)
        write_config(composition.cfg, path / "config.yaml")
        (path / "trainer.json").write_text(json.dumps({"step": step}))
        write_manifest(path, step=step, world_size=world_size)
        point("last", path)
    if best is not None:
        point("best", folder / "checkpoints" / name_of(best))
    return folder


def write_manifest(path: Path, *, step: int, world_size: int) -> None:
    """Describes what a checkpoint holds now."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    content = {"format": 1, "step": step, "world_size": world_size, "files": files}
    (path / "manifest.json").write_text(json.dumps(content))


def damage(run: Path, step: int) -> None:
    """Makes a file of a checkpoint longer than its manifest says."""
    with (run / "checkpoints" / name_of(step) / "trainer.json").open("a") as file:
        file.write("x")
