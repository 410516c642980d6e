"""Runs several configurations one after the other (`-m`), each in a process of its own, under Hydra's sweeper."""

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from trainer import arguments, check, launch
from trainer.compose import Request, compose_run, start_hydra
from trainer.conf_files import COMPOSE_ERRORS
from trainer.conf_groups import spell_null
from trainer.conf_values import open_free_key
from trainer.redact import redact_word
from trainer.saved import show
from trainer.spread import Job, report_spread


def run_sweep(args: Namespace) -> int:
    """Checks all jobs, runs them, says how each ended and how they scored, and returns the worst exit status."""
    request = arguments.request(args)
    problems = _check_jobs(request)
    if problems:
        launch.say("\n".join(f"error: {problem}" for problem in problems))
        return launch.REFUSED
    jobs: list[Job] = []
    args.overrides = _opened(request)
    try:
        status = hydra_main(args, task=lambda cfg: _run_job(args, jobs))
    finally:
        for job in jobs:
            end = "completed" if job.status == 0 else f"ended with status {job.status}"
            launch.say(f"job {job.number} ({' '.join(map(redact_word, job.overrides))}): {end}, {show(job.folder)}")
    report_spread(jobs)
    return max([status, *(job.status for job in jobs)])


def hydra_main(args: Namespace, *, task: Callable[[DictConfig], None]) -> int:
    """Hands the command line to Hydra: its sweeper, --cfg, --info, its help and shell completion."""
    request = arguments.request(args)
    start_hydra(request)
    GlobalHydra.instance().clear()
    # So that errors come up to here, instead of Hydra's own message and sys.exit(1).
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv[1:] = _hydra_argv(args, request)
    run = hydra.main(version_base="1.3", config_path=str(request.config_path), config_name=request.config_name)(task)
    try:
        run()
    except COMPOSE_ERRORS as error:
        launch.say(f"error: {' '.join(str(error).split())}")
        return launch.REFUSED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else launch.FAILED
    return 0


def _hydra_argv(args: Namespace, request: Request) -> list[str]:
    flags = ("resolve", "multirun", "hydra_help", "shell_completion")
    options = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag)]
    values = {"cfg": args.cfg, "package": args.package, "info": args.info, "config-dir": request.config_dir}
    options += [f"--{name}={value}" for name, value in values.items() if value]
    return [*options, *args.overrides]


def _job_overrides(request: Request) -> list[list[str]]:
    """Returns the overrides of each job that Hydra's own sweeper will run; another one decides as it goes."""
    start_hydra(request)
    overrides = _parse(request)
    if any(override.get_key_element() == "hydra/sweeper" for override in overrides):
        return []
    return [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


def _parse(request: Request) -> list[Override]:
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(request.overrides))


def _check_jobs(request: Request) -> list[str]:
    try:
        jobs = _job_overrides(request)
    except HydraException:
        return compose_run(request).problems  # names the words that are not of the form key=value
    problems: dict[str, None] = {}
    for overrides in jobs:
        composition = compose_run(replace(request, overrides=tuple(overrides)))
        problems.update(dict.fromkeys(composition.problems))
        if composition.cfg is not None:
            found = check.problems(composition.cfg, composition.overrides)
            problems.update(dict.fromkeys(problem for problem in found if not composition.is_moot(problem)))
    return list(problems)


def _opened(request: Request) -> list[str]:
    """Returns the overrides as Hydra takes them: `++` before free keys, its own words for null, as in the first job."""
    jobs = _job_overrides(request)
    if not jobs:
        return list(request.overrides)
    first = compose_run(replace(request, overrides=tuple(jobs[0])))
    assert first.cfg is not None
    lines = [spell_null(override) for override in _parse(request)]
    dropped = [line for line in first.overrides if line.startswith(("~callbacks.", "~logger.")) and line not in lines]
    return [*(open_free_key(line, first.cfg) for line in lines), *dropped]


def _run_job(args: Namespace, jobs: list[Job]) -> None:
    """Runs one job to its end; a failed one does not end the sweep."""
    config = HydraConfig.get()
    folder = Path(config.sweep.dir, config.sweep.subdir)
    overrides = list(config.overrides.task)
    argv = [*_config_options(args), *overrides, f"hydra.run.dir={_quoted(str(folder))}"]
    launch.say(f"job {config.job.num}: {' '.join(map(redact_word, overrides))}")
    process = subprocess.Popen([sys.executable, "-m", "trainer", *argv])
    try:
        status = process.wait()
    except KeyboardInterrupt as interrupt:
        process.send_signal(signal.SIGTERM if isinstance(interrupt, launch.Terminated) else signal.SIGINT)
        process.wait()
        raise
    # A job that a signal killed has the status that a shell would give it.
    status = 128 - status if status < 0 else status
    jobs.append(
        Job(number=config.job.num, overrides=overrides, sweep=Path(config.sweep.dir), folder=folder, status=status)
    )


def _quoted(text: str) -> str:
    """Returns the text as a value of Hydra's grammar: a folder named after overrides has = and , in it."""
    if re.fullmatch(r"[\w./-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _config_options(args: Namespace) -> list[str]:
    values = {"--config-path": args.config_path, "--config-name": args.config_name, "--config-dir": args.config_dir}
    return [f"{option}={value}" for option, value in values.items() if value]
