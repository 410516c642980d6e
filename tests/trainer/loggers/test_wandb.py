import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer.config import ConfigError
from trainer.loggers import WandbLogger

BLOCK, FULL, LAST = 32768, 1, 4
CONFIG = {"seed": 7, "models": {"student": {"dtype": "auto"}}, "hub": {"api_key": "do-not-tell"}}


@pytest.fixture(autouse=True, scope="module")
def no_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_CONFIG_DIR", str(home))
        yield patch


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run in a folder, and what it said on the way; starting wandb takes seconds."""
    folder = tmp_path_factory.mktemp("run")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger_of_wandb = logging.getLogger("trainer.loggers.wandb")
    logger_of_wandb.addHandler(handler)
    logger_of_wandb.setLevel(logging.INFO)

    logger = WandbLogger(project="trainer", tags=["test"])
    logger.start(folder=folder, config=CONFIG, name="a-run")
    logger.log_metrics({"val/loss": 3.0}, step=0)
    logger.log_metrics({"train/loss": 2.0, "perf/step_time": 0.1}, step=10)
    logger.log_metrics({"val/loss": 1.0}, step=10)
    logger.log_metrics({"train/loss": 1.5}, step=5)  # as after going back to a checkpoint
    logger.log_table("samples", columns=["prompt", "student"], rows=[["Who?", "I."]], step=10)
    logger.close(status="completed")

    logger_of_wandb.removeHandler(handler)
    return folder, "\n".join(said)


def records(folder: Path, kind: str) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    file = next(folder.glob("wandb/offline-run-*/run-*.wandb"))
    parsed = [wandb_internal_pb2.Record.FromString(data) for data in chunks(file.read_bytes())]
    return [getattr(record, kind) for record in parsed if record.WhichOneof("record_type") == kind]


def chunks(log: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log behind wandb's header of 7 bytes; a record may span blocks of 32 KiB."""
    position, parts = 7, b""
    while position + 7 <= len(log):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        length, part = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        parts += log[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (FULL, LAST):
            yield parts
            parts = b""


def our_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what the user sees; wandb's own log, which pytest captures too, goes to a file only."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("trainer")]


def items(entries: Any) -> dict[str, Any]:
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def test_without_a_login_it_is_offline_and_says_how_to_upload(offline_run: tuple[Path, str]) -> None:
    folder, said = offline_run

    (run_folder,) = folder.glob("wandb/offline-run-*")
    assert said.splitlines()[-1] == f"wandb was offline; to upload: wandb sync {run_folder}"
    assert "warning" not in said.lower()


def test_every_number_is_there_with_our_step_also_after_going_back(offline_run: tuple[Path, str]) -> None:
    rows = [items(record.item) for record in records(offline_run[0], "history")]

    numbers = [{name: value for name, value in row.items() if not name.startswith(("_", "samples/"))} for row in rows]
    assert numbers == [
        {"val/loss": 3.0, "trainer/global_step": 0},
        {"train/loss": 2.0, "perf/step_time": 0.1, "trainer/global_step": 10},
        {"val/loss": 1.0, "trainer/global_step": 10},
        {"train/loss": 1.5, "trainer/global_step": 5},
        {"trainer/global_step": 10},
    ]
    assert rows[-1]["samples/_type"] == "table-file"


def test_our_step_is_the_axis_of_all_metrics(offline_run: tuple[Path, str]) -> None:
    metrics = [(m.name or m.glob_name, m.step_metric) for m in records(offline_run[0], "metric")]

    assert ("*", "trainer/global_step") in metrics


def test_the_configuration_is_there_without_secrets(offline_run: tuple[Path, str]) -> None:
    folder, _ = offline_run
    (run,) = records(folder, "run")

    config = items(run.config.update)
    assert config["seed"] == 7
    assert config["models"] == {"student": {"dtype": "auto"}}
    assert not any(b"do-not-tell" in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_the_run_id_stays_in_the_folder(offline_run: tuple[Path, str]) -> None:
    folder, _ = offline_run
    (run,) = records(folder, "run")

    assert (folder / "wandb_run_id.txt").read_text().strip() == run.run_id
    assert (run.project, run.display_name, list(run.tags)) == ("trainer", "a-run", ["test"])


def test_a_killed_service_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = WandbLogger(project="trainer")
    logger.start(folder=tmp_path, config=CONFIG, name="a-run")
    services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
    for service in services:
        service.kill()
    psutil.wait_procs(services)

    for step in range(3):
        logger.log_metrics({"train/loss": 1.0}, step=step)
        logger.log_table("samples", columns=["prompt"], rows=[["Who?"]], step=step)
    logger.close(status="completed")

    assert services
    (warning,) = our_warnings(caplog)
    assert warning.startswith("wandb is off for the rest of this run")


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    logger = WandbLogger(project="trainer")
    logger.start(folder=tmp_path / "file", config=CONFIG, name="a-run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.close(status="failed")

    (warning,) = our_warnings(caplog)
    assert "starting failed" in warning


def test_a_server_that_cannot_be_reached_means_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse_online(*, mode: str, **options: Any) -> Any:
        if mode == "online":
            raise wandb.errors.CommError("no route to host")
        return init(mode=mode, **options)

    init = wandb.init
    monkeypatch.setattr(wandb, "init", refuse_online)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)

    logger = WandbLogger(project="trainer")
    logger.start(folder=tmp_path, config=CONFIG, name="a-run")
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.close(status="completed")

    assert "cannot start online (CommError: no route to host): offline" in caplog.text
    assert items(records(tmp_path, "history")[0].item)["train/loss"] == 1.0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode=of is none of auto, online, offline"):
        WandbLogger(project="trainer", mode="of")
