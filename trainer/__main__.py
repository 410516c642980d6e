"""The entry point: `python -m trainer` and the console script `trainer`."""

import logging
import os
import shlex
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import __version__, launch
from trainer.config import ConfigError
from trainer.heartbeat import sign_of_life

if TYPE_CHECKING:
    from trainer.compose import Composition, Request


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 refused, 130 and 143 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
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
    folder = _folder(composition)
    if not launch.is_rank():
        count = launch.count_processes(composition.cfg.launch.num_processes)
        if count > 1:
            sys.stderr.write(f"starting {count} ranks\n")
            return launch.start_ranks([sys.executable, "-m", "trainer", *argv], count=count, folder=folder)
        from trainer.distributed import ensure_environment

        ensure_environment()
    return _run_rank(composition, folder=folder, command=shlex.join(["python", "-m", "trainer", *argv]))


def _compose_and_check(request: "Request") -> "Composition":
    from trainer.compose import compose_run
    from trainer.saved import check_folder

    composition = compose_run(request)
    if composition.cfg is not None and not launch.is_own_rank():  # whoever started this rank has checked
        with _sign_of_life("checking the configuration"):
            from trainer import check

            found = check.problems(composition.cfg, composition.overrides)
        composition.problems += [problem for problem in found if not composition.is_moot(problem)]
        if not launch.is_rank():
            composition.problems += check_folder(_folder(composition))
    return composition


def _folder(composition: "Composition") -> Path:
    from trainer.saved import propose_folder

    assert composition.hydra is not None
    return Path(os.environ[launch.RUN_FOLDER]) if launch.is_own_rank() else propose_folder(composition.hydra)


def _run_rank(composition: "Composition", *, folder: Path, command: str) -> int:
    try:
        with _sign_of_life("importing torch, transformers and deepspeed"):
            from trainer.run import run

        assert composition.cfg is not None
        run(composition.cfg, folder=folder, command=command)
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
    text = "".join(f"error: {problem}\n" for problem in dict.fromkeys(problems))
    if launch.is_own_rank():
        launch.report_end(launch.REFUSED, text)
    elif launch.is_first_here():
        sys.stderr.write(text)
    return launch.REFUSED


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    status = launch.TERMINATED if isinstance(interrupt, launch.Terminated) else launch.INTERRUPTED
    if launch.is_own_rank():
        launch.report_end(status, "interrupted")
    return status


def _failed() -> int:
    """Shows the error that is being handled: here, or by the launcher, which knows whose was first."""
    if launch.is_own_rank():
        launch.report_end(launch.FAILED, traceback.format_exc())
    else:
        traceback.print_exc()
    return launch.FAILED


if __name__ == "__main__":
    sys.exit(main())
