import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError
from trainer.loggers import WandbLogger
from trainer.loggers.wandb import _has_secret_remote

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["trainer", "task=distill", "hub.api_key=do-not-tell"])
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
    assert list(records(folder, "environment")[0].args) == ["task=distill", "hub.api_key=???"]
    assert not any(b"do-not-tell" in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_the_run_id_stays_in_the_folder(offline_run: tuple[Path, str]) -> None:
    folder, _ = offline_run
    (run,) = records(folder, "run")

    assert (folder / "wandb_run_id.txt").read_text().strip() == run.run_id
    assert (run.project, run.display_name, list(run.tags)) == ("trainer", "a-run", ["test"])


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


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    ids, position = [], None
    for going_on in (None, "saved", "saved", {}, None):
        logger = WandbLogger(project="trainer")
        logger.start(folder=tmp_path, config={}, name="a-run", position=position if going_on == "saved" else going_on)
        logger.log_metrics({"train/loss": 1.0}, step=3)
        position = logger.position()
        logger.close(status="completed")
        ids.append((tmp_path / "wandb_run_id.txt").read_text())

    assert position == {"step": 3}
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[2:])) == 3


@pytest.mark.parametrize(
    ("address", "is_secret"),
    [("https://abcdef012345:x-oauth-basic@host/x.git", True), ("git@host:me/x.git", False), ("https://host/x", False)],
)
def test_wandb_hears_nothing_of_a_git_remote_with_credentials(
    address: str, is_secret: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["init", "--quiet"], ["remote", "add", "origin", address]):
        subprocess.run(["git", *words], check=True)

    assert _has_secret_remote() is is_secret


# Faults, each in a process of its own: a run must also end ------------------------------------------------------------

RUN = """
import logging, os, shutil, signal, sys, time
from pathlib import Path
import psutil
from trainer.loggers import JsonlLogger, WandbLogger, wandb as ours

fault, folder = sys.argv[1], Path(sys.argv[2])
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
ours.CONNECT_SECONDS, ours.FINISH_SECONDS, ours.STUCK_SECONDS = 3.0, 2.0, 2.0
loggers = [JsonlLogger(), WandbLogger(project="trainer")]
for logger in loggers:
    logger.start(folder=folder, config={}, name="run")
for step in range(60):
    if step == 20:
        services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
        if fault in ("killed", "stopped"):
            assert services
            for service in services:
                service.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "removed":
            shutil.rmtree(folder / "wandb")
    for logger in loggers:
        logger.log_metrics({f"train/{number}": 0.123456789 * step for number in range(200)}, step=step)
    time.sleep(0.02)
for logger in loggers:
    logger.close(status="completed")
"""


def faulty_run(
    fault: str, folder: Path, *, before: tuple[str, ...] = (), **environment: str
) -> tuple[list[str], float]:
    """Returns the warnings of a run with a fault, and its seconds, after checks of what every run must leave."""
    began = time.monotonic()
    done = subprocess.run(
        [*before, sys.executable, "-c", RUN, fault, str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == list(range(60))
    ours = [line for line in done.stderr.splitlines() if line.startswith("WARNING trainer")]
    return ours, time.monotonic() - began


@pytest.mark.parametrize(
    ("fault", "reason"), [("killed", "logging failed"), ("stopped", "failed"), ("removed", "was removed")]
)
def test_a_fault_of_wandb_is_one_warning_and_the_run_ends(fault: str, reason: str, tmp_path: Path) -> None:
    (warning,), seconds = faulty_run(fault, tmp_path)

    assert "wandb is off for the rest of this run" in warning
    assert reason in warning
    assert seconds < 60


def test_a_full_disk_of_wandb_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {tmp_path}/wandb"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")

    (warning,), _ = faulty_run("full", tmp_path, before=("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"))

    assert "wandb is off for the rest of this run: logging failed (OSError: no space left on the disk" in warning


def test_a_record_that_wandb_could_not_keep_is_one_warning(tmp_path: Path) -> None:
    # Metrics of ours are below the limit on a file's size, wandb's file is not; its process tells only its own log.
    (tmp_path / "out").mkdir()
    limit = ("bash", "-c", 'ulimit -f 400; exec "$@"', "bash")

    warnings, _ = faulty_run("full", tmp_path / "out", before=limit)

    assert len(warnings) == 1
    assert "failed to save record" in warnings[0]


def test_an_unreachable_server_means_offline_in_time(tmp_path: Path) -> None:
    (warning,), seconds = faulty_run(
        "unreachable", tmp_path, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9"
    )

    assert "wandb cannot start online" in warning
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert seconds < 60


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="mode=of is none of auto, online, offline"):
        WandbLogger(project="trainer", mode="of")
