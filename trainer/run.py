"""One run in one rank, from the checked configuration to the outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import rich
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.syntax import Syntax

from trainer import distributed, outputs
from trainer.adapters import CONFIG_FILE, base_class, base_name
from trainer.build import Run, build_run, plain
from trainer.callbacks import SampleTable, Throughput
from trainer.config import ConfigError
from trainer.export import RESCORED_BATCHES, export_model, rescore
from trainer.heartbeat import sign_of_life
from trainer.loggers.logger import Logger
from trainer.report import closing_rows, closing_table, columns_without, model_card, sample_panel
from trainer.saved import claim_folder, resolved, save_config
from trainer.trainer import MultiModelTrainer

log = logging.getLogger(__name__)


def run(cfg: DictConfig, *, folder: Path, command: str) -> None:
    """Runs the configured mode and leaves its outputs in the folder; every rank must call it.

    Args:
        folder: Where to; another name is used if this one is taken.
        command: How the user started it, for the model card.
    """
    outputs.quiet_third_parties()
    outputs.setup_logging(None, is_main=distributed.is_main())
    print_config(cfg)
    log.info("starting %s", _ranks())
    job = build_run(cfg)
    folder = Path(distributed.from_main(str(claim_folder(folder)) if distributed.is_main() else ""))
    outputs.setup_logging(folder, is_main=distributed.is_main())
    if distributed.is_main():
        log.info("outputs: %s", save_config(cfg, folder).parent)
    job.trainer.folder = folder
    with _recorded(job.trainer, cfg, folder):
        MODES[cfg.mode](job, cfg)
        report(job, cfg, command)


def fit(job: Run, cfg: DictConfig) -> None:
    """Trains, exports the trained models, and proves that the exports score as the models in memory did."""
    job.trainer.fit(job.task, models=job.models, data=job.data)
    if job.trainer.stop_reason is not None:
        log.info("stopped at step %d: %s", job.trainer.global_step, job.trainer.stop_reason)
    export(job, cfg)


def validate(job: Run, cfg: DictConfig) -> None:
    """Validates the models as they are."""
    job.trainer.validate(job.task, models=job.models, data=job.data)


def export_only(job: Run, cfg: DictConfig) -> None:
    """Validates the models as they are, for the model card, and writes them."""
    validate(job, cfg)
    export(job, cfg)


MODES = {"fit": fit, "validate": validate, "export": export_only}


def export(job: Run, cfg: DictConfig) -> None:
    """Writes every trained model to export/<model>/, reloads it, and scores it again."""
    trainer = job.trainer
    assert trainer.folder is not None
    if not cfg.export.enabled:
        return
    for model in trainer.trained:
        folder = trainer.folder / "export" / model.name
        log.info("writing %s to %s", model.name, folder)
        with sign_of_life(f"writing {model.name}"):
            export_model(
                model, folder, tokenizer=trainer.tokenizers[model.name], build=plain(cfg.models[model.name].build)
            )
        if not trainer.is_scored(model.name):
            log.warning("%s has no validation set, so its export was not scored", model.name)
        else:
            with sign_of_life(f"loading and scoring {model.name}'s export"):
                build = job.models[model.name].build
                rescore(trainer, model.name, folder, build=build, tolerance=cfg.export.tolerance)
            log.info("%s, loaded again, scores as in memory on %d batches", model.name, RESCORED_BATCHES)


def report(job: Run, cfg: DictConfig, command: str) -> None:
    """Prints the closing table and the samples, and puts both on the model cards."""
    trainer = job.trainer
    if not distributed.is_main():
        return
    columns, rows = _closing_rows(trainer, job.task.reference, job.task.metric_labels)
    samples = next((c for c in trainer.callbacks.values() if isinstance(c, SampleTable)), None)
    out = Console()  # stdout: the result, where stderr holds the log
    out.print()
    out.print(closing_table(columns, rows))
    if samples is not None and samples.answers:
        out.print(sample_panel(samples.columns, samples.rows, limit=4))
    if any(source.startswith("embedded:") for source in _sources(cfg, list(cfg.models))):
        out.print("This is a demonstration on a small embedded text; the documentation says what to expect of it.")
    assert trainer.folder is not None
    for folder in sorted((trainer.folder / "export").glob("*")):
        build = cfg.models[folder.name].build
        is_adapter = (folder / CONFIG_FILE).exists()
        teacher = cfg.models[job.task.reference].build.get("name") if job.task.reference else None
        others = [model.name for model in trainer.trained if model.name != folder.name]
        own_columns, own_rows = columns_without(others, columns, rows)
        card = model_card(
            name=folder.name,
            command=command,
            run_name=trainer.folder.name,
            task=_task_name(cfg),
            is_transformers=(folder / "config.json").exists(),
            adapter_base=(base_class(folder), base_name(folder)) if is_adapter else None,
            base_model=build.get("name"),
            teacher=teacher,
            data=_sources(cfg, [folder.name]),
            columns=own_columns,
            rows=own_rows,
            sample_columns=samples.columns if samples is not None and samples.answers else (),
            sample_rows=samples.rows if samples is not None and samples.answers else (),
            versions={name: version(name) for name in ("torch", "deepspeed", "accelerate", "transformers")},
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        out.print(f"exported: {folder}", highlight=False)


def _sources(cfg: DictConfig, models: list[str]) -> list[str]:
    """Returns the files and hub names that models were trained on."""
    nodes = [cfg.data if cfg.models[name].data is None else cfg.models[name].data for name in models]
    found = [node.train if isinstance(node.train, str) else node.train.get("source") for node in nodes]
    return list(dict.fromkeys(source for source in found if isinstance(source, str)))


def _closing_rows(
    trainer: MultiModelTrainer, reference: str | None, labels: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    meter = next((c for c in trainer.callbacks.values() if isinstance(c, Throughput)), None)
    return closing_rows(
        trained=[model.name for model in trainer.trained],
        before=trainer.before,
        after=trainer.after,
        reference_name=reference,
        reference=trainer.reference,
        labels=labels,
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
def _recorded(trainer: MultiModelTrainer, cfg: DictConfig, folder: Path) -> Iterator[None]:
    """Opens the loggers for the run; however it ends, writes summary.json and closes them with the same status."""
    began, status = time.monotonic(), "failed"

    def close(logger: Logger) -> None:
        logger.close(status=status)

    with ExitStack() as opened:
        try:
            for logger in trainer.loggers.values():
                logger.start(folder=folder, config=resolved(cfg), name=folder.name)
                opened.callback(close, logger)
            yield
            status = "completed" if trainer.stop_reason is None else "stopped"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except ConfigError:
            raise
        except Exception:
            log.exception("the run failed at step %d", trainer.global_step, extra={"file_only": True})
            raise
        finally:
            if distributed.is_main():
                outputs.write_summary(
                    folder,
                    task=_task_name(cfg),
                    status=status,
                    global_step=trainer.global_step,
                    seconds=time.monotonic() - began,
                    before=trainer.before,
                    after=trainer.after,
                    reference=trainer.reference,
                )
