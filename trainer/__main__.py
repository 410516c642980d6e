"""The entry point: `python -m trainer` and the console script `trainer`."""

import atexit
import logging
import os
import shlex
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer import __version__, launch
from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life
from trainer.redact import redact, remember
from trainer.signals import Terminated

if TYPE_CHECKING:
    from trainer.compose import Composition, Request


def run_process() -> NoReturn:
    """Runs the command that this process was started with, and ends the process with its status.

    Without tearing the interpreter down, once threads are joined and all exit handlers have run: a thread of C++ code
    that asks for the interpreter after that, such as one of gloo's that lets go of a tensor, would abort the process,
    and a run that had come to its end would count as failed.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    status = launch.FAILED

    def leave() -> None:
        of_output = _flush()
        os._exit(status or of_output)

    atexit.register(leave)  # before anything else registers: the first is called last
    status = main()
    sys.exit(status)


def _flush() -> int:
    """Writes what waits to be written, and returns the exit status: that somebody has read enough is no failure."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return 0
    except OSError as error:
        launch.say(f"error: the output could not be written: {error.strerror}")
        return launch.FAILED
    return 0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 refused, 130 and 143 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    remember(argv)
    launch.raise_on_signals()
    if launch.is_own_rank():
        launch.end_with_launcher()
    try:
        return _main(argv)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)


def _main(argv: list[str]) -> int:
    from trainer import arguments

    args, problems = arguments.parse(argv)
    if problems:
        return refuse(problems)
    if args.help:
        from trainer.compose import conf_dir
        from trainer.help import help_text

        sys.stdout.write(help_text(conf=conf_dir(), config_dir=Path(args.config_dir) if args.config_dir else None))
        return 0
    if args.version:
        sys.stdout.write(f"trainer {__version__}\n")
        return 0
    arguments.use_working_folder()
    if args.hydra_help or args.shell_completion:
        return _hydra(args)
    if args.multirun:
        from trainer import sweep

        return sweep.run_sweep(args)
    if args.cfg or args.info:
        return _show(args)
    return _run(args, argv)


def _show(args: Namespace) -> int:
    from trainer import arguments
    from trainer.compose import compose_run

    composition = compose_run(arguments.request(args))
    if composition.problems:
        return refuse(composition.problems)
    if composition.saved is not None and args.cfg == "job":  # Hydra knows nothing of a checkpoint's configuration
        from omegaconf import OmegaConf

        sys.stdout.write(OmegaConf.to_yaml(composition.cfg, resolve=args.resolve))
        return 0
    args.overrides = composition.overrides
    return _hydra(args)


def _hydra(args: Namespace) -> int:
    from trainer.sweep import hydra_main

    return hydra_main(args, task=lambda cfg: None)


def _run(args: Namespace, argv: list[str]) -> int:
    from trainer import arguments

    request = arguments.request(args)
    composition = _compose_and_check(request)
    if composition.problems:
        return refuse(composition.problems)
    assert composition.cfg is not None
    assert composition.hydra is not None
    if launch.is_first_here() and not launch.is_own_rank():
        launch.say("\n".join(f"warning: {text}" for text in composition.warnings))
    status = _launch(composition, argv)
    is_first = launch.is_main() and not launch.is_own_rank()
    if status == launch.TERMINATED and composition.cfg.launch.requeue and is_first:
        launch.requeue()
    return status


def _launch(composition: "Composition", argv: list[str]) -> int:
    assert composition.cfg is not None
    folder, settings = _folder(composition), composition.cfg.launch
    if not launch.is_rank():
        count = launch.count_processes(settings.num_processes)
        if count > 1 or settings.max_restarts:
            return _start_ranks(argv, count=count, folder=folder, max_restarts=settings.max_restarts)
        from trainer.distributed import ensure_environment

        ensure_environment()
    return _run_rank(composition, folder=folder, command=shlex.join(["python", "-m", "trainer", *argv]))


def _start_ranks(argv: list[str], *, count: int, folder: Path, max_restarts: int) -> int:
    from trainer.saved import claim_folder

    command, is_new = [sys.executable, "-m", "trainer"], not folder.exists()
    if max_restarts and not (folder.is_dir() and any(folder.iterdir())):  # else a run that goes on
        folder = claim_folder(folder)
    launch.say(f"starting {count} rank{'s' if count > 1 else ''}")
    try:
        return launch.start_ranks(
            [*command, *argv],
            count=count,
            folder=folder,
            max_restarts=max_restarts,
            again=lambda: [*command, *launch.go_on(argv, folder)],
        )
    finally:
        with suppress(OSError):  # holds something
            if max_restarts and is_new:
                folder.rmdir()


def _compose_and_check(request: "Request") -> "Composition":
    from trainer.compose import compose_run

    composition = compose_run(request)
    if composition.cfg is not None:
        from omegaconf import OmegaConf

        remember((), OmegaConf.to_container(composition.cfg, resolve=True))
    if composition.cfg is not None and not launch.is_own_rank():  # whoever started this rank has checked
        with _sign_of_life("checking the configuration"):
            from trainer import check

            found = check.problems(composition.cfg, composition.overrides) + _check_kept(composition)
        composition.problems += [problem for problem in found if not composition.is_moot(problem)]
        if not launch.is_rank() or composition.cfg.resume is not None:
            composition.problems += _check_folder(composition)
    return composition


def _check_kept(composition: "Composition") -> list[str]:
    """Returns what stands between a run and the checkpoint that it is to go on from."""
    if composition.saved is None or composition.resumption is None or composition.cfg is None:
        return []
    from trainer import kept
    from trainer.saving.checkpoints import read_manifest, step_of

    checkpoint = composition.resumption.candidates[0]
    saved_ranks = read_manifest(checkpoint).get("world_size")
    if not isinstance(saved_ranks, int):
        return [f"{checkpoint}: its manifest does not give world_size; take another checkpoint"]
    return kept.problems(
        composition.saved,
        composition.cfg,
        checkpoint=checkpoint,
        step=step_of(checkpoint),
        saved_ranks=saved_ranks,
        ranks=launch.planned_ranks(composition.cfg.launch.num_processes),
        may_differ=_may_differ(composition.cfg.task.get("_target_")),
    )


def _may_differ(target: object) -> Sequence[str]:
    """Returns the keys of a task that a resumed run may change; none of one that cannot be found."""
    from trainer.targets import TargetError, find_target
    from trainer.task import TaskModule

    try:
        task = find_target(str(target))
    except TargetError:
        return ()
    return task.may_differ if isinstance(task, type) and issubclass(task, TaskModule) else ()


def _check_folder(composition: "Composition") -> list[str]:
    from trainer.saved import check_folder

    folder, resumption = _folder(composition), composition.resumption
    if resumption is None:
        return check_folder(folder)
    from trainer.resume import owns_files

    return check_folder(folder, is_own=owns_files(folder, resumption))


def _folder(composition: "Composition") -> Path:
    from trainer.saved import propose_folder

    assert composition.hydra is not None
    return Path(os.environ[launch.RUN_FOLDER]) if launch.is_own_rank() else propose_folder(composition.hydra)


def _run_rank(composition: "Composition", *, folder: Path, command: str) -> int:
    try:
        with _sign_of_life("importing torch, transformers and deepspeed"):
            from trainer.run import run

        assert composition.cfg is not None
        run(composition.cfg, folder=folder, command=command, resumption=composition.resumption)
    except ConfigError as error:
        return refuse(error.problems)
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except (Exception, SystemExit):
        return _failed()
    return 0


@contextmanager
def _sign_of_life(what: str) -> Iterator[None]:
    """Says every few seconds what takes so long, where the run's own log is not there yet."""
    handler = logging.StreamHandler()
    logger = logging.getLogger("trainer")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if launch.is_main() else logging.WARNING)
    try:
        with sign_of_life(what):
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def refuse(problems: Iterable[str]) -> int:
    """Says what is wrong with the configuration, once, and returns the exit status."""
    text = redact("".join(f"error: {problem}\n" for problem in dict.fromkeys(problems)))
    if launch.is_own_rank():
        launch.report_end(launch.REFUSED, text)
    elif launch.is_first_here():
        launch.say(text)
    return launch.REFUSED


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    status = launch.TERMINATED if isinstance(interrupt, Terminated) else launch.INTERRUPTED
    if launch.is_own_rank():
        launch.report_end(status, "interrupted")
    return status


def _failed() -> int:
    """Shows the error that is being handled: here, or by the launcher, which knows whose was first."""
    if launch.is_own_rank():
        launch.report_end(launch.FAILED, traceback.format_exc())
    else:
        launch.say(traceback.format_exc())
    return launch.FAILED


if __name__ == "__main__":
    run_process()
