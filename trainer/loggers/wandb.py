"""Sends a run's numbers to Weights & Biases, or keeps them for a later `wandb sync`."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life
from trainer.loggers.safety import Fuse
from trainer.redact import redact, redact_word, without_secrets

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

MODES = ("auto", "online", "offline")
STEP = "trainer/global_step"
CONNECT_SECONDS = 20.0  # wandb's own 90 leave a run without network waiting in silence
FINISH_SECONDS = 120.0
STUCK_SECONDS = 60.0  # beyond what a call may take; then wandb's process is taken for stuck
TAIL_BYTES = 1 << 16
FULL_BYTES = 1 << 16  # wandb's process drops what it cannot write, silently
_STORE_ERROR = re.compile(r'"msg":"([^"]*(?:failed to save record|failed closing store)[^"]*)"')


class WandbLogger:
    """Logs to wandb; asks nothing, and a failure of wandb ends this logger with one warning, never the run.

    Numbers carry our step under `trainer/global_step` instead of wandb's own step, which drops what goes back. wandb
    takes no point back: those of steps that a resumed run repeats are there twice.

    Args:
        mode: "auto": online after `wandb login`, else offline. "online" without a login is offline too, with a warning.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: str = "auto",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"logger.wandb.mode={mode} is none of {', '.join(MODES)}")
        self.project, self.mode, self.entity, self.group, self.tags = project, mode, entity, group, list(tags)
        self._run: wandb.Run | None = None
        self._fuse = Fuse("wandb")
        self._offline_folder: Path | None = None
        self._last_step = 0

    def start(
        self, *, folder: Path, config: Mapping[str, Any], name: str, position: Mapping[str, int] | None = None
    ) -> None:
        self._last_step = (position or {}).get("step", 0)
        with self._fuse.guard("starting"), sign_of_life("starting wandb"), _arguments_without_secrets():
            import wandb

            wandb.setup(wandb.Settings(silent=True))
            mode = self._resolved_mode()
            options = {
                "project": self.project,
                "entity": self.entity,
                "group": self.group,
                "tags": self.tags,
                "name": name,
                "id": _run_id(folder, is_new=not position),
                "resume": "allow",
                "dir": folder,
                "config": without_secrets(config),
                "settings": _settings(),
            }
            self._run = _connect(options) if mode == "online" else wandb.init(mode=mode, **options)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
            self._tell_where()

    def _resolved_mode(self) -> Any:
        wanted = os.environ.get("WANDB_MODE", "online") if self.mode == "auto" else self.mode
        if wanted != "online" or _has_login():
            return wanted
        if self.mode == "online":
            log.warning("logger.wandb.mode=online, but there is no login on this machine (`wandb login`): offline")
        return "offline"

    def _tell_where(self) -> None:
        assert self._run is not None
        if self._run.offline:
            self._offline_folder = Path(self._run.settings.sync_dir)
        elif self._run.url:
            log.info("wandb: %s", self._run.url)

    def position(self) -> dict[str, int]:
        return {"step": self._last_step}

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._last_step = max(self._last_step, step)
        self._log({**metrics, STEP: step})

    def log_table(self, name: str, *, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> None:
        if self._run is None or self._fuse.is_blown:
            return
        import wandb

        with self._fuse.guard("logging a table"), _no_longer_than(STUCK_SECONDS):
            self._check_store()
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            self._run.log({name: table, STEP: step})

    def _log(self, values: Mapping[str, float]) -> None:
        if self._run is None or self._fuse.is_blown:
            return
        with self._fuse.guard("logging"), _no_longer_than(STUCK_SECONDS):
            self._check_store()
            self._run.log(dict(values))

    def _check_store(self) -> None:
        """Raises OSError if what wandb keeps on disk is lost, online as well: it uploads from there."""
        assert self._run is not None
        if self._run.disabled:  # WANDB_MODE=disabled
            return
        store = Path(self._run.settings.sync_file)
        if not store.exists():
            raise FileNotFoundError(f"{_relative(store)} was removed")
        disk = os.statvfs(store.parent)
        if disk.f_bavail * disk.f_frsize < FULL_BYTES:
            raise OSError(f"no space left on the disk of {_relative(store.parent)}")
        if errors := _store_errors(store):
            raise OSError(errors)

    def close(self, *, status: str) -> None:
        if self._run is not None and not self._fuse.is_blown:
            with self._fuse.guard("finishing"), _no_longer_than(FINISH_SECONDS + STUCK_SECONDS):
                self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)
                self._check_store()
        with _no_longer_than(STUCK_SECONDS if self._run is None else FINISH_SECONDS + STUCK_SECONDS):
            _end_service()
        if self._offline_folder is not None and not self._fuse.is_blown:
            log.info("wandb was offline; to upload: wandb sync %s", shlex.quote(_relative(self._offline_folder)))


def _connect(options: dict[str, Any]) -> wandb.Run:
    """Returns an online run, or an offline one when wandb cannot be reached or refuses."""
    import wandb

    try:
        return wandb.init(mode="online", **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        log.info("wandb: starting online failed", exc_info=True, extra={"file_only": True})
        log.warning("wandb cannot start online (%s: %s): offline", type(error).__name__, reason)
    _end_service()  # it believes that the run's id is in use
    return wandb.init(mode="offline", **options)


def _end_service() -> None:
    """Waits for wandb's process, which writes the last lines after `finish` and, if it died, is missed at exit."""
    try:
        import wandb

        wandb.teardown()
    except Exception:
        log.info("wandb: ending its service failed", exc_info=True, extra={"file_only": True})


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Ends wandb's process if the body takes longer: whoever waits for it then gets an error instead of hanging."""
    timer = threading.Timer(seconds, _kill_service)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_service() -> None:
    for child in psutil.Process().children(recursive=True):
        try:
            if child.name().startswith("wandb-"):
                child.kill()
        except psutil.NoSuchProcess:
            continue


def _store_errors(store: Path) -> str:
    """Returns what wandb's process last said about records that it could not keep."""
    said = store.parent / "logs" / "debug-internal.log"
    if not said.exists():
        return ""
    with said.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        found = _STORE_ERROR.findall(file.read().decode(errors="replace"))
    return str(found[-1]) if found else ""


def _settings() -> wandb.Settings:
    import wandb

    # console="off": run.log has what the terminal shows, and wandb's wrapping of it makes it look like no terminal.
    return wandb.Settings(
        silent=True,
        console="off",
        disable_job_creation=True,
        disable_git=_has_secret_remote(),
        init_timeout=CONNECT_SECONDS,
        finish_timeout=FINISH_SECONDS,
    )


def _has_login() -> bool:
    """Returns whether wandb finds a key by itself: environment, netrc or settings; never asks for one."""
    import wandb
    from wandb.sdk.lib import wbauth

    host = wandb.setup().settings.base_url
    return wbauth.authenticate_session(host=host, source="trainer", prompt=False, update_session=False) is not None


def _run_id(folder: Path, *, is_new: bool) -> str:
    """Returns the id kept in the run's folder, so that a resumed run goes on in the same place; a new run's is new."""
    file = folder / "wandb_run_id.txt"
    if is_new or not file.exists():
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Hides secrets on the command line from wandb, which records it and has no setting for that."""
    words = sys.argv[1:]
    sys.argv[1:] = [redact_word(word) for word in words]
    try:
        yield
    finally:
        sys.argv[1:] = words


def _has_secret_remote() -> bool:
    """Returns whether the address of the working folder's git remote holds credentials, of which wandb hides some."""
    try:
        asked = subprocess.run(
            ["git", "config", "--get", "remote.origin.url"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return redact(asked.stdout) != asked.stdout


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
