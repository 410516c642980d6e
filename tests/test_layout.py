"""The shape of the code base: imports point one way, tests mirror sources, files stay short, nothing is slow to ask."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("trainer", "tasks") for path in (ROOT / folder).rglob("*.py") if path.read_text().strip()
)
MAX_LINES = {"trainer": 450, "tasks": 450, "examples": 450, "tests": 600}

# From top to bottom; a module may import from layers below its own, and from its own package. The longest name counts.
LAYERS = (
    ("trainer.__main__",),
    ("trainer.sweep",),
    ("trainer.arguments", "trainer.run", "trainer.spread"),
    ("trainer.check",),
    ("trainer.trial", "trainer.check_builds"),
    ("trainer.build", "trainer.export"),
    ("tasks",),
    ("tasks.teaching", "tasks.policy"),
    ("tasks.rewards", "tasks.terms"),
    ("tasks.scores", "tasks.generation", "tasks.teacher_cache"),
    ("tasks.logits", "tasks.projection"),
    ("tasks.text", "tasks.losses"),
    ("tasks.values", "tasks.roles"),
    ("trainer.targets", "trainer.callbacks", "trainer.loggers"),
    ("trainer.compose", "trainer.help", "trainer.launch", "trainer.outputs", "trainer.report"),
    ("trainer.resumed", "trainer.resume"),
    ("trainer.conf_values", "trainer.kept"),
    ("trainer.conf_groups",),
    ("trainer.conf_files",),
    ("trainer.words",),
    ("trainer.saved",),
    ("trainer.trainer",),
    ("trainer.interruption", "trainer.evaluation", "trainer.recording"),
    ("trainer.saving.saver",),
    ("trainer.saving.content",),
    ("trainer.step",),
    ("trainer.routing", "trainer.non_finite", "trainer.preflight", "trainer.rollouts"),
    ("trainer.incident",),
    ("trainer.engines", "trainer.plan"),
    ("trainer.specs",),
    (
        "trainer.window",
        "trainer.tally",
        "trainer.data",
        "trainer.callbacks.callback",
        "trainer.loggers.logger",
    ),
    ("trainer.saving.fragments", "trainer.saving.digests"),
    ("trainer.start_weights",),
    ("trainer.encoders", "trainer.scorers"),
    ("trainer.adapters",),
    ("trainer.handle", "trainer.models", "trainer.freezing"),
    ("trainer.plugins", "trainer.assets"),
    ("trainer.plugin_keys", "trainer.gathering", "trainer.quantization"),
    ("trainer.saving.slices",),
    ("trainer.saving.checkpoints",),
    (
        "trainer.task",
        "trainer.distributed",
        "trainer.schedules",
        "trainer.heartbeat",
        "trainer.seeds",
        "trainer.signals",
        "trainer.causes",
        "trainer.updates",
        "trainer.redact",
        "trainer.config",
        "trainer.saving",
        "trainer.saving.plain_state",
        "trainer.discard",
    ),
    ("trainer.kinds",),
)
# Sources without a test file of their own name, and where they are tested.
TESTED_ELSEWHERE = {
    "trainer/__init__.py": "tests/trainer/test_trainer.py",
    "trainer/__main__.py": "tests/test_cli.py",
    "trainer/arguments.py": "tests/test_cli.py",
    "trainer/build.py": "tests/test_examples.py",
    "trainer/callbacks/__init__.py": "tests/test_docs.py",  # every preset's _target_ is found
    "trainer/conf_files.py": "tests/trainer/test_compose.py",
    "trainer/conf_groups.py": "tests/trainer/test_compose.py",
    "trainer/conf_values.py": "tests/trainer/test_compose.py",
    "trainer/config.py": "tests/test_docs.py",
    "trainer/data/__init__.py": "tests/trainer/data/test_text.py",
    "trainer/data/example.py": "tests/trainer/data/test_packing.py",
    "trainer/data/rows.py": "tests/trainer/data/test_files.py",
    "tasks/generation/__init__.py": "tests/tasks/generation/test_local.py",
    "tasks/generation/making.py": "tests/tasks/generation/test_local.py",
    "tasks/generation/writer.py": "tests/tasks/generation/test_local.py",
    "trainer/freezing.py": "tests/trainer/test_models.py",
    "trainer/discard.py": "tests/trainer/test_non_finite.py",
    "trainer/data/reader.py": "tests/trainer/data/test_preferences.py",  # a protocol
    "trainer/data/device.py": "tests/trainer/data/test_loader.py",
    "trainer/saving/__init__.py": "tests/trainer/saving/test_content.py",  # a docstring
    "trainer/saving/digests.py": "tests/trainer/saving/test_content.py",
    "trainer/distributed.py": "tests/trainer/test_trainer.py",
    "trainer/incident.py": "tests/trainer/test_non_finite.py",
    "trainer/loggers/__init__.py": "tests/test_docs.py",
    "trainer/loggers/logger.py": "tests/trainer/loggers/test_jsonl.py",  # a protocol
    "trainer/run.py": "tests/test_examples.py",
    "trainer/saved.py": "tests/test_cli.py",
    "trainer/seeds.py": "tests/trainer/test_trainer.py",
    "trainer/specs.py": "tests/trainer/test_engines.py",
    "trainer/step.py": "tests/trainer/test_routing.py",
    "tasks/text/language.py": "tests/tasks/test_distill.py",
    "tasks/teacher_cache/__init__.py": "tests/tasks/teacher_cache/test_recording.py",
    "trainer/recording.py": "tests/tasks/teacher_cache/test_recording.py",
    "tasks/text/tokenization.py": "tests/tasks/teaching/test_preflight.py",
    "tasks/policy/update.py": "tests/tasks/test_grpo.py",
    "tasks/rewards/__init__.py": "tests/tasks/rewards/test_reading.py",
    "tasks/policy/scored_answers.py": "tests/tasks/test_ppo.py",
    "tasks/teaching/pairs.py": "tests/tasks/test_distill_sequence.py",
    "tasks/terms/reading.py": "tests/tasks/terms/test_term.py",
    "tasks/losses/__init__.py": "tests/tasks/losses/test_divergences.py",
    "trainer/targets.py": "tests/trainer/test_check.py",
    "trainer/trial.py": "tests/trainer/test_check.py",
    "trainer/task.py": "tests/trainer/test_trainer.py",
    "trainer/tally.py": "tests/trainer/test_trainer.py",
    "trainer/window.py": "tests/trainer/test_trainer.py",
    "trainer/words.py": "tests/trainer/test_compose.py",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    """Returns the module's layer; None for the package `trainer` itself, which only re-exports."""
    found = [
        (len(prefix), index)
        for index, layer in enumerate(LAYERS)
        for prefix in layer
        if f"{module}.".startswith(f"{prefix}.")
    ]
    return max(found)[1] if found else None


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module) of every import of ours that happens at run time, also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("trainer", "tasks"):
            for alias in node.names:
                inner_module = ROOT / node.module.replace(".", "/") / f"{alias.name}.py"
                yield node.lineno, f"{node.module}.{alias.name}" if inner_module.exists() else node.module
        elif isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.split(".")[0] in ("trainer", "tasks")]
            yield from ((node.lineno, name) for name in ours)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = name_of(path)
    own = layer_of(module)
    assert own is not None or module == "trainer", f"{path} is in no layer; add it to LAYERS"
    package = module.rpartition(".")[0]

    for line, target in imports_of(path):
        is_sibling = package != "trainer" and target.startswith(f"{package}.")
        if target == "trainer" or is_sibling or target.startswith(f"{module}."):
            continue
        level = layer_of(target)
        is_below = level is not None and own is not None and level > own
        assert is_below, f"{path}:{line} may not import {target}: it is no layer below"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name_of(path): {target for _, target in imports_of(path)} - {"trainer"} for path in SOURCES}

    def find_circle(module: str, trail: tuple[str, ...]) -> tuple[str, ...] | None:
        if module in trail:
            return (*trail[trail.index(module) :], module)
        circles = (find_circle(target, (*trail, module)) for target in graph.get(module, ()))
        return next((circle for circle in circles if circle), None)

    assert [circle for module in graph if (circle := find_circle(module, ()))] == []


def test_tasks_import_public_names_of_the_trainer_only() -> None:
    public = {"trainer", "trainer.config", "trainer.task"}
    tasks = [path for path in SOURCES if path.is_relative_to(ROOT / "tasks")]

    found = {target for path in tasks for _, target in imports_of(path) if target.startswith("trainer")}

    assert found <= public


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_has_its_test(path: Path) -> None:
    source = path.relative_to(ROOT)
    own = Path("tests", source.parent, f"test_{source.stem.strip('_')}.py")
    test = Path(TESTED_ELSEWHERE.get(str(source), own))

    assert (ROOT / test).is_file(), f"{source} has no {test}; write it, or say in TESTED_ELSEWHERE where it is tested"


def test_no_exception_is_out_of_date() -> None:
    sources = {str(path.relative_to(ROOT)) for path in SOURCES}

    assert set(TESTED_ELSEWHERE) - sources == set()


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in ("trainer", "tasks", "tests", "examples") for path in (ROOT / folder).rglob("*.py")),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_stay_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())

    assert num_lines <= MAX_LINES[path.relative_to(ROOT).parts[0]], "look for its second subject"


def test_every_source_begins_with_one_sentence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if not (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        .partition("\n")[0]
        .endswith((".", ":"))
    ]

    assert missing == []


def test_help_and_refusals_do_not_import_torch() -> None:
    code = (
        "import sys; from pathlib import Path; import trainer, trainer.__main__, trainer.compose, trainer.config; "
        "from trainer.help import help_text; help_text(conf=trainer.compose.conf_dir(), config_dir=None); "
        "print(sorted({'torch', 'transformers', 'deepspeed', 'accelerate'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


OPTIONS = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "local")


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_starts_with_the_command_that_uses_it(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = "\n".join(lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("#"))])
    group, name = path.parent.name, path.stem
    chosen = rf"\b{group}(@models\.\w+\.\w+)?=\[?([\w,]*,)?{name}\b"

    is_named = re.search(chosen, comments) or (group in ("conf", "launch") and re.search(r"task=|launch\.", comments))

    assert is_named, f"the first comment of {path} must hold the command that uses it"
