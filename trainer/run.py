"""One run in one rank, from the checked configuration to the outputs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import rich
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, RenderableType
from rich.syntax import Syntax

from trainer import distributed, outputs
from trainer.adapters import CONFIG_FILE, base_class, base_name
from trainer.build import Run, build_plugins, build_run, plain
from trainer.callbacks import SampleTable, Throughput
from trainer.config import ConfigError
from trainer.data.identity import identify_sources
from trainer.data.sources import TrainingData, name_sources
from trainer.export import RESCORED_BATCHES, export_model, rescore
from trainer.heartbeat import sign_of_life
from trainer.kept import plugin_file
from trainer.loggers.logger import Logger
from trainer.recording import cache_teacher
from trainer.redact import redact_command, secret_values
from trainer.report import (
    closing_rows,
    closing_table,
    columns_without,
    model_card,
    sample_panel,
    share_of_gap_closed,
)
from trainer.resume import owns_files
from trainer.saved import claim_folder, config_text, lock_folder, resolved, save_config, show
from trainer.saving.checkpoints import CONFIG, Resumption
from trainer.saving.content import Whole, check_data, choose, positions_of, versions
from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


def run(cfg: DictConfig, *, folder: Path, command: str, resumption: Resumption | None = None) -> None:
    """Runs the configured mode and leaves its outputs in the folder; every rank must call it.

    Args:
        folder: Where to; another name is used if this one is taken.
        command: How the user started it, for the model card.
        resumption: What the run goes on from.
    """
    outputs.quiet_third_parties()
    secrets = secret_values(plain(cfg))
    outputs.setup_logging(None, is_main=distributed.is_main(), secrets=secrets)
    print_config(cfg)
    log.info("starting %s", _ranks())
    job = build_run(cfg)
    whole = choose(resumption.candidates) if resumption is not None and resumption.candidates else None
    if whole is not None:
        own = {name: spec.data for name, spec in job.models.items() if spec.data is not None}
        check_data(whole.path, identify_sources(name_sources(job.data, own)))  # before anything is touched
    # Only training changes a run's folder; what else reads a checkpoint gets a folder of its own.
    is_own = cfg.mode == "fit" and owns_files(folder, resumption)
    goes_on = is_own and resumption is not None and resumption.goes_on
    lock, folder = _open_folder(folder, is_own=is_own)
    with lock:
        outputs.setup_logging(folder, is_main=distributed.is_main(), secrets=secrets)
        if distributed.is_main():
            log.info("outputs: %s", folder if goes_on else save_config(cfg, folder).parent)
        # On every rank: written by one, compared by all.
        job.trainer.checkpoint_texts = {CONFIG: config_text(_without_end(cfg), place=folder)} | _plugin_texts(cfg)
        job.trainer.folder = folder
        positions: Mapping[str, Mapping[str, int]] = {}
        if goes_on and whole is not None:
            positions = positions_of(whole.path)
        elif is_own:  # what an attempt without an end has logged is taken back
            positions = {name: {} for name in job.trainer.loggers}
        with (
            _gone_if_refused(job.trainer, folder, is_own=is_own),
            _recorded(job, cfg, folder, positions=positions, goes_on=goes_on),
        ):
            MODES[cfg.mode](job, cfg, whole)
            report(job, cfg, command)
            _check_saved(job.trainer)


def _plugin_texts(cfg: DictConfig) -> dict[str, str]:
    """Returns the content of the files that plugins are read from, which may have changed when the run goes on."""
    names = [str(name) for name, model in cfg.models.items() if "path" in model.plugin]
    return {plugin_file(name): json.dumps(config) + "\n" for name, config in build_plugins(cfg, names).items()}


def _without_end(cfg: DictConfig) -> DictConfig:
    """Returns the configuration without trainer.stop_at_step, which ends a part of a run, not the run."""
    whole = cfg.copy()
    whole.trainer.stop_at_step = None
    return whole


def _open_folder(folder: Path, *, is_own: bool) -> tuple[AbstractContextManager[Any], Path]:
    """Returns the run's folder, made by rank 0, and the lock that keeps other runs out of it."""
    lock: AbstractContextManager[Any] = nullcontext()
    problems: list[str] = []
    if distributed.is_main():
        try:
            folder = claim_folder(folder, is_own=is_own)
            lock = lock_folder(folder)
        except ConfigError as error:
            problems = error.problems
    place, problems = distributed.from_main((str(folder), problems))
    if problems:
        raise ConfigError(*problems)
    return lock, Path(place)


@contextmanager
def _gone_if_refused(trainer: MultiModelTrainer, folder: Path, *, is_own: bool) -> Iterator[None]:
    """Removes the folder that this run has made if it is refused before its first step: its name is free again."""
    try:
        yield
    except ConfigError:
        if distributed.is_main() and not is_own and trainer.global_step == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _check_saved(trainer: MultiModelTrainer) -> None:
    """Fails a run whose end is not saved, once all the rest of it is done."""
    if trainer.saver is not None and trainer.saver.problem is not None:
        raise RuntimeError(f"{trainer.saver.problem}; everything else of the run was written")


def fit(job: Run, cfg: DictConfig, whole: Whole | None) -> None:
    """Trains, exports the trained models, and proves that the exports score as the models in memory did."""
    job.trainer.fit(job.task, models=job.models, data=job.data, resume=whole)
    if job.trainer.stop_reason is not None:
        log.info("stopped at step %d: %s", job.trainer.global_step, job.trainer.stop_reason)
    export(job, cfg)


def validate(job: Run, cfg: DictConfig, whole: Whole | None) -> None:
    """Validates the models as they are, or as a checkpoint holds them."""
    job.trainer.validate(job.task, models=job.models, data=job.data, resume=whole)


def export_only(job: Run, cfg: DictConfig, whole: Whole | None) -> None:
    """Validates the models likewise, for the model card, and writes them."""
    validate(job, cfg, whole)
    export(job, cfg)


def record(job: Run, cfg: DictConfig, whole: Whole | None) -> None:
    """Has the task store what its teacher says of all examples."""
    cache_teacher(job.trainer, job.task, models=job.models, data=job.data)


MODES = {"fit": fit, "validate": validate, "export": export_only, "cache_teacher": record}


def export(job: Run, cfg: DictConfig) -> None:
    """Writes every trained model to export/<model>/, reloads it, and scores it again."""
    trainer = job.trainer
    assert trainer.folder is not None
    if not was_exported(cfg):
        return
    for model in trainer.trained:
        folder = trainer.folder / "export" / model.name
        log.info("writing %s to %s", model.name, folder)
        with sign_of_life(f"writing {model.name}"):
            export_model(
                model, folder, tokenizer=trainer.tokenizers[model.name], build=resolved(cfg.models[model.name].build)
            )
        if not trainer.is_scored(model.name):
            log.warning("%s has no validation set, so its export was not scored", model.name)
        else:
            with sign_of_life(f"loading and scoring {model.name}'s export"):
                build = job.models[model.name].build
                rescore(trainer, model.name, folder, build=build, tolerance=cfg.export.tolerance)
            log.info("%s, loaded again, scores as in memory on %d batches", model.name, RESCORED_BATCHES)


def was_exported(cfg: DictConfig) -> bool:
    """Returns whether the run writes its trained models to export/."""
    return bool(cfg.export.enabled) and cfg.mode in ("fit", "export")


def report(job: Run, cfg: DictConfig, command: str) -> None:
    """Puts the closing table and the samples on the model cards, and prints both."""
    trainer = job.trainer
    if not distributed.is_main() or cfg.mode == "cache_teacher":  # what that writes has no metrics
        return
    columns, rows = _closing_rows(job)
    samples = next((c for c in trainer.callbacks.values() if isinstance(c, SampleTable)), None)
    title = _title(trainer.sources)
    assert trainer.folder is not None
    exported = [trainer.folder / "export" / model.name for model in trainer.trained] if was_exported(cfg) else []
    for folder in exported:
        build = cfg.models[folder.name].build
        is_adapter = (folder / CONFIG_FILE).exists()
        teacher = _teacher_name(cfg, job)
        others = [model.name for model in trainer.trained if model.name != folder.name]
        own_columns, own_rows = columns_without(others, columns, rows)
        card = model_card(
            name=folder.name,
            command=redact_command(command),
            run_name=trainer.folder.name,
            task=_task_name(cfg),
            is_transformers=(folder / "config.json").exists(),
            adapter_base=(base_class(folder), base_name(folder)) if is_adapter else None,
            base_model=build.get("name"),
            teacher=teacher,
            data=_sources(cfg, [folder.name]),
            columns=own_columns,
            rows=own_rows,
            title=title,
            sample_columns=samples.columns if samples is not None and samples.answers else (),
            sample_rows=samples.rows if samples is not None and samples.answers else (),
            versions=versions(),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    shown: list[RenderableType] = ["", closing_table(columns, rows, title=title)]
    if samples is not None and samples.answers:
        shown.append(sample_panel(samples.columns, samples.rows, limit=4))
    if any(source.startswith("embedded:") for source in _sources(cfg, list(cfg.models))):
        shown.append("An embedded set is small: the page of its task in docs/ says what to expect.")
    _show([*shown, *(f"exported: {folder}" for folder in exported)])


def _show(parts: Sequence[RenderableType]) -> None:
    """Prints the result to stdout, where stderr holds the log; that nobody can read it is no fault of the run."""
    out = Console()
    try:
        for part in parts:
            out.print(part, highlight=False)
    except (OSError, SystemExit) as error:  # rich makes the latter of a broken pipe
        reason = error.strerror if isinstance(error, OSError) else "nobody reads it"
        log.warning("the closing table could not be printed (%s); summary.json has its numbers", reason)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed


def _title(sources: Mapping[str, TrainingData]) -> str:
    """Returns what the closing table's metrics are of."""
    nouns = {source.noun for source in sources.values() if source.validation is not None}
    return f"held-out {nouns.pop() if len(nouns) == 1 else 'examples'}"


def _teacher_name(cfg: DictConfig, job: Run) -> str | None:
    reference = job.task.reference
    if reference is not None and reference in cfg.models:
        name = cfg.models[reference].build.get("name")
        return None if name is None else str(name)
    return job.task.reference_name


def _sources(cfg: DictConfig, models: list[str]) -> list[str]:
    """Returns the files and hub names that models were trained on."""
    nodes = [cfg.data if cfg.models[name].data is None else cfg.models[name].data for name in models]
    found = [node.train if isinstance(node.train, str) else node.train.get("source") for node in nodes]
    return list(dict.fromkeys(source for source in found if isinstance(source, str)))


def _gap_closed(job: Run) -> dict[str, float]:
    trainer, directions = job.trainer, job.task.gap_metrics
    return share_of_gap_closed(trainer.before, trainer.after, trainer.reference, directions=directions)


def _closing_rows(job: Run) -> tuple[list[str], list[list[str]]]:
    trainer = job.trainer
    meter = next((c for c in trainer.callbacks.values() if isinstance(c, Throughput)), None)
    return closing_rows(
        trained=[model.name for model in trainer.trained],
        before=trainer.before,
        after=trainer.after,
        reference_name=job.task.reference,
        reference=trainer.reference,
        gap_closed=_gap_closed(job),
        labels=job.task.metric_labels,
        num_parameters={model.name: model.num_parameters for model in trainer.models.values()},
        step_time=meter.median_step_time if meter else None,
        rates=meter.rate if meter else {},
        memory_gb=meter.memory_gb if meter else None,
    )


def print_config(cfg: DictConfig) -> None:
    """Shows the composed configuration, on rank 0."""
    if distributed.is_main():
        text = OmegaConf.to_yaml(OmegaConf.create(resolved(cfg)))
        rich.print(Syntax(text.rstrip(), "yaml", background_color="default", word_wrap=True))


def _ranks() -> str:
    count = distributed.world_size()
    return "on one rank" if count == 1 else f"on {count} ranks"


def _task_name(cfg: DictConfig) -> str:
    from hydra.core.hydra_config import HydraConfig

    return str(HydraConfig.get().job.name)


@contextmanager
def _recorded(
    job: Run,
    cfg: DictConfig,
    folder: Path,
    *,
    positions: Mapping[str, Mapping[str, int]],
    goes_on: bool,
) -> Iterator[None]:
    """Opens the loggers for the run; however it ends, writes summary.json and closes them with the same status.

    Args:
        positions: By logger, how far its log in this folder still holds; none where it begins.
        goes_on: Whether the folder is that of a run that ended; it is touched only once the checkpoint is loaded.
    """
    trainer = job.trainer
    began, status, is_open, is_refused = time.monotonic(), "failed", False, False

    def close(logger: Logger) -> None:
        logger.close(status=status)

    def start() -> None:
        nonlocal is_open
        for name, logger in trainer.loggers.items():
            logger.start(folder=folder, config=resolved(cfg), name=folder.name, position=positions.get(name))
            opened.callback(close, logger)
        if goes_on and distributed.is_main():
            save_config(cfg, folder)
        is_open = True

    with ExitStack() as opened:
        try:
            if goes_on:
                trainer.on_open = start
            else:
                start()
            yield
            status = "completed" if trainer.stop_reason is None else "stopped"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except ConfigError:
            is_refused = True
            raise
        except (Exception, SystemExit):
            log.exception("the run failed at step %d", trainer.global_step, extra={"file_only": True})
            raise
        finally:
            if distributed.is_main() and is_open:
                if status in ("interrupted", "failed") and not is_refused:
                    _tell_how_to_go_on(trainer, folder)
                with _survived(folder):
                    outputs.write_summary(
                        folder,
                        task=_task_name(cfg),
                        status=status,
                        global_step=trainer.global_step,
                        seconds=time.monotonic() - began,
                        before=trainer.before,
                        after=trainer.after,
                        reference=trainer.reference,
                        gap_closed=_gap_closed(job),
                    )


def _tell_how_to_go_on(trainer: MultiModelTrainer, folder: Path) -> None:
    if trainer.saver is not None and trainer.saver.last is not None:
        how = f"the same command with hydra.run.dir={show(folder)} resume=auto"
        log.info("saved up to %s; to go on: %s", trainer.saver.last.name, how)
    else:
        log.info("ended at step %d, and no checkpoint was saved", trainer.global_step)


@contextmanager
def _survived(folder: Path) -> Iterator[None]:
    """Lets a full disk at the end of a run not hide how the run ended."""
    try:
        yield
    except OSError as error:
        log.error("cannot write %s: %s", folder / "summary.json", error)
