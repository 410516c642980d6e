"""Ranks and runs that tests of several files share: a spawn costs seconds."""

import shutil
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.trainer.engine_runs import Ranks, run_checks
from tests.trainer.saved_runs import make_run
from tests.trainer.test_assets import tiny_llama, write_gguf
from trainer import models


@pytest.fixture(scope="session", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("engines")
    tiny_llama().save_pretrained(folder / "llama")
    write_gguf(tiny_llama(), folder / "tiny.gguf", with_tokenizer=False)
    return Ranks(request.param, run_ranks(run_checks, folder, folder=folder, world_size=request.param))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the distillation with checkpoints of steps 2, 4 and 6, the second the best."""
    folder = tmp_path_factory.mktemp("original") / "run"
    return make_run(folder, "models.student.optimizer.lr=0.0003", steps=(2, 4, 6), best=4)


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as `run` in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(original, "run", symlinks=True)
    return Path("run")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of embedded assets, with none in it."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"no route to {name}")

    monkeypatch.setattr(models, "_ask_hub", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a saved tiny model without a tokenizer."""
    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder)
    return folder
