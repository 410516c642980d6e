"""The text of --help, from the YAML files and the schema alone: nothing that takes long is imported."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from trainer import config
from trainer.config import ModelConfig, RunConfig

USAGE = """\
Trains several models together, each under its own DeepSpeed plan.

usage: python -m trainer [task=<task>] [key=value ...] [options]      (or: trainer ...)

  python -m trainer                                         the demonstration: task=distill on an embedded text
  python -m trainer task=distill models.student.build.name=org/small models.teacher.build.name=org/large \\
      plugin@models.teacher.plugin=zero3_inference data.train=train.jsonl
  python -m trainer task=distill debug=fast                 a few steps of everything
  python -m trainer task=distill launch.num_processes=2     two ranks on this machine
  python -m trainer -m task=distill seed=0,1,2              one run for each value
  python -m trainer --config-dir my/conf task=mine          your own task, from a package in the working folder
  python -m trainer --config-path=outputs/distill/<time> --config-name=config [key=value ...]   repeats a run
  python -m trainer resume=outputs/distill/<time> [key=value ...]   goes on with a run from its newest checkpoint
  torchrun --nproc-per-node 8 -m trainer task=distill       joins another launcher
"""

CHOICES = """\
choices of one model
  model@models.<name>.build=<model>              plugin@models.<name>.plugin=<plugin>
  optimizer@models.<name>.optimizer=<optimizer>  scheduler@models.<name>.scheduler=<scheduler>
  data@models.<name>.data=<data>                 examples of its own; default: the shared ones
  plugin@models.<name>.plugin=file models.<name>.plugin.path=ds_config.json
  models.<name>.{build,plugin,optimizer,scheduler}.<any key>=...   checked against what the object takes
  models.<name>.lora.{r,target_modules,<any key>}=...   trains adapters; the keys are those of peft's LoraConfig
  task.<key>=...   task.terms.<term>.{function,weight,temperature,mask}=...   callbacks.<name>.<key>=...
  logger=null, callbacks=null: none. A value that contains = or , needs quotes: data.train='"a,b.txt"'
"""

OPTIONS = """\
options
  -h, --help            this text                   --version             the version
  --cfg job             print the configuration     --resolve             ... with its references resolved
  --info defaults-tree  print where it comes from   -m, --multirun        one run for each combination of values
  --config-dir DIR      more groups and tasks       --config-path DIR, --config-name NAME   another configuration
  --hydra-help          Hydra's own options         --shell-completion    tab completion, see --hydra-help

exit status
  0 done   1 failed, with a traceback   2 refused: every problem in one line   130, 143 interrupted
"""


def help_text(*, conf: Path, config_dir: Path | None) -> str:
    """Returns what --help prints; tasks and options of the user's folder stand beside ours."""
    folders = [conf, *([config_dir] if config_dir is not None else [])]
    return "\n".join([USAGE, _tasks(folders), _groups(folders), CHOICES, _keys(), OPTIONS])


def _tasks(folders: list[Path]) -> str:
    files = _options(folders, "task")
    width = max([len(name) for name in files], default=0)
    lines = [f"  {name:<{width}}  {first_comment(path)}" for name, path in files.items()]
    return "\n".join(["tasks (task=...)", *lines, ""])


def _groups(folders: list[Path]) -> str:
    places = {path.relative_to(folder) for folder in folders for path in folder.rglob("*") if path.is_dir()}
    shown = sorted(
        str(place)
        for place in places
        if str(place) not in ("task", "local") and not any(part.startswith(("_", ".")) for part in place.parts)
    )
    width = max(len(name) for name in shown)
    lines = [
        textwrap.fill(
            " ".join(_options(folders, name)),
            118,
            initial_indent=f"  {name:<{width}}  ",
            subsequent_indent=" " * (width + 4),
        )
        for name in shown
    ]
    return "\n".join(["groups and their options", *lines, ""])


def _options(folders: list[Path], group: str) -> dict[str, Path]:
    """Returns the options of a group by name; the first folder wins, as in Hydra's search path."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / group).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def first_comment(path: Path) -> str:
    """Returns the first comment line of a YAML file that is no directive to Hydra."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            break
        comment = text.lstrip("# ").strip()
        if comment and not comment.startswith("@"):
            return comment
    return ""


def _keys() -> str:
    rows = list(_rows(RunConfig, ""))
    width = max(len(key) for key, _, _ in rows)
    lines = [f"  {key:<{width}}  {default:<8} {comment}".rstrip() for key, default, comment in rows]
    return "\n".join(["keys, their defaults before the task's and the preset's own", *lines, ""])


def _rows(kind: type[Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    comments = _comments(kind)
    for item in fields(kind):
        default = _default(item)
        if item.name == "models":
            yield from _rows(ModelConfig, f"{prefix}models.<name>.")
        elif is_dataclass(default):
            yield from _rows(type(default), f"{prefix}{item.name}.")
        elif default not in ({}, "???") or item.name == "train":
            yield f"{prefix}{item.name}", _yaml(default), comments.get(item.name, "")


def _default(item: "Field[Any]") -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _comments(kind: type[Any]) -> dict[str, str]:
    """Returns the comment beside each field, which says its unit and what an absent value means."""
    source = Path(inspect.getfile(config)).read_text(encoding="utf-8")
    lines = source.splitlines()
    body = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    return {
        node.target.id: lines[node.lineno - 1].partition("  # ")[2]
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
