"""Ranks that tests of several files share: a spawn costs seconds."""

import pytest

from tests.ranks import run_ranks
from tests.trainer.engine_runs import Ranks, run_checks
from tests.trainer.test_assets import tiny_llama, write_gguf


@pytest.fixture(scope="session", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("engines")
    tiny_llama().save_pretrained(folder / "llama")
    write_gguf(tiny_llama(), folder / "tiny.gguf", with_tokenizer=False)
    return Ranks(request.param, run_ranks(run_checks, folder, folder=folder, world_size=request.param))
