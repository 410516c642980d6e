"""Reads the command line: Hydra's options, ours, and the key=value words between them."""

import importlib.util
import re
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from pathlib import Path

from hydra._internal.utils import get_args_parser

from trainer import launch
from trainer.compose import Request, conf_dir
from trainer.words import did_you_mean

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")  # what DeepSpeed's launcher adds; the environment says the same


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Returns the options and overrides, and what cannot be one."""
    parser = get_args_parser()
    parser.exit_on_error = False
    _own_version(parser)
    try:
        args, rest = parser.parse_known_intermixed_args(argv)
    except ArgumentError as error:
        return Namespace(), [str(error)]
    rest = [word for word in rest if not _LOCAL_RANK.fullmatch(word)]
    known = [option for action in parser._actions for option in action.option_strings]
    problems = [f"{word}: there is no such option{did_you_mean(word.partition('=')[0], known)}" for word in rest]
    if args.resolve and not args.cfg:
        problems.append("--resolve: only together with --cfg job")
    return args, problems


def _own_version(parser: ArgumentParser) -> None:
    action = next(action for action in parser._actions if "--version" in action.option_strings)
    parser._remove_action(action)
    del parser._option_string_actions["--version"]
    parser.add_argument("--version", action="store_true")


def request(args: Namespace) -> Request:
    """Returns where the configuration lies; folders are relative to the working folder, as the user sees them."""
    return Request(
        overrides=tuple(args.overrides),
        config_path=Path(args.config_path).absolute() if args.config_path else conf_dir(),
        config_name=args.config_name or "config",
        config_dir=Path(args.config_dir).absolute() if args.config_dir else None,
    )


def use_working_folder() -> None:
    """Lets a user's own package in the working folder be imported, but never in place of the trainer's `tasks`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    ours = Path(__file__).resolve().parents[1] / "tasks" / "__init__.py"
    found = importlib.util.find_spec("tasks")
    if found is not None and found.origin and Path(found.origin).resolve() == ours:
        return
    if found is not None and found.origin and not launch.is_own_rank():  # the launcher has said it
        launch.say(
            f"warning: {Path(found.origin).parent} is not the trainer's package `tasks` and is not used; "
            "rename the folder to import from it"
        )
    spec = importlib.util.spec_from_file_location("tasks", ours, submodule_search_locations=[str(ours.parent)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["tasks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tasks"])
