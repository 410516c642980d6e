"""The documents say what is there: commands compose, links lead somewhere, tables match the schema."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch
from safetensors.torch import save_file

from tests.tasks.teacher_cache.cache_runs import write_empty_cache
from tests.trainer.saved_runs import make_run
from trainer import arguments
from trainer.config import ModelConfig, RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_TASK = ROOT / "examples" / "own_task"

_STARTS = re.compile(r"^(python|torchrun|accelerate launch|deepspeed)\b.* (-m|--module) trainer\b ?")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# Commands ------------------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Returns what follows `python -m trainer` in every command of the documents, each once."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = read(page).replace("\\\n", " ")
        spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"```sh\n(.+?)```", text, re.DOTALL)
        for line in (line.strip() for span in spans for line in span.splitlines()):
            line = line.rpartition(" && ")[2]
            match = _STARTS.match(line.replace("python -m trainer", "python -m trainer ", 1))
            if match and "..." not in line:
                found[line[line.index("trainer") + len("trainer") :].strip()] = None
    return list(found)


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the documents name as the user's own."""
    folder = tmp_path_factory.mktemp("user")
    rows = [{"prompt": f"question {number}", "completion": "answer"} for number in range(4)]
    for name in ("train.jsonl", "held_out.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pairs = [{"prompt": f"question {number}", "chosen": "right", "rejected": "wrong"} for number in range(4)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    prompts = [{"prompt": f"question {number}", "answer": "1"} for number in range(4)]
    for name in ("prompts.jsonl", "sums.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    (folder / "my_rewards.py").write_text("def right(completions, answer, tolerance=0.0): ...\n", encoding="utf-8")
    (folder / "corpus.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    (folder / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    scorer = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    models = {name: {"model_type": "llama"} for name in ("org/small", "org/large", "outputs/sft/export/student")}
    for name, config in {**models, "outputs/reward/export/reward": scorer}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file({"weight": torch.zeros(1)}, folder / name / "model.safetensors")
    write_empty_cache(folder / "outputs" / "teacher-cache")
    return folder


@pytest.fixture(scope="module")
def saved_run(user_folder: Path) -> Path:
    from trainer.compose import Request, compose_run, conf_dir
    from trainer.saved import save_config

    folder = user_folder / "outputs" / "distill" / "<time>"
    folder.mkdir(parents=True)
    cfg = compose_run(Request(overrides=("task=distill",), config_path=conf_dir())).cfg
    assert cfg is not None
    save_config(cfg, folder)
    make_run(user_folder / "outputs" / "mine", "data.batch_size=8")
    return folder


@pytest.mark.parametrize("command", commands())
def test_documented_command_is_accepted(
    command: str, user_folder: Path, saved_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import check, kept
    from trainer.compose import compose_run

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    is_own_task = "--config-dir" in command
    monkeypatch.chdir(OWN_TASK if is_own_task else user_folder)
    # The working folder of `python -m trainer` is on its path.
    monkeypatch.syspath_prepend(str(OWN_TASK if is_own_task else user_folder))

    args, problems = arguments.parse(shlex.split(command))
    assert problems == []
    if args.help or args.hydra_help or args.version:
        return
    if args.multirun:  # the first job stands for all
        args.overrides = [re.sub(r"=([^,\[\]]+),[^\[\]]+$", r"=\1", word) for word in args.overrides]
    composition = compose_run(arguments.request(args))
    assert composition.problems == []
    assert composition.cfg is not None
    assert check.problems(composition.cfg, composition.overrides) == []
    if composition.saved is not None:
        ranks = composition.cfg.launch.num_processes or 1
        whole = composition.resumption.candidates[0]
        found = kept.problems(composition.saved, composition.cfg, checkpoint=whole, step=4, saved_ranks=1, ranks=ranks)
        assert found == []


def test_commands_were_found() -> None:
    assert len(commands()) > 30
    assert "task=distill" in commands()


def test_readme_has_one_line_to_install_and_run_and_one_to_test() -> None:
    lines = [line.strip() for line in read(ROOT / "README.md").splitlines() if line.startswith("pip install -c")]

    assert lines == [
        'pip install -c constraints.txt -e ".[demo]" && python -m trainer task=distill',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]


# Links and names -----------------------------------------------------------------------------------------------------


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.+?```|`[^`\n]+`", "", read(page), flags=re.DOTALL)
    yield from (target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_index_names_every_page() -> None:
    listed = {(ROOT / "docs" / link).resolve() for link in links(ROOT / "docs" / "index.md")}

    assert {page.resolve() for page in PAGES if page.name != "index.md"} <= listed


def test_files_that_documents_name_exist() -> None:
    pattern = re.compile(r"`((?:trainer|tasks|conf|tests|examples)/[\w./]+\.(?:py|yaml|md))`")
    named = {name for page in PAGES for name in pattern.findall(read(page))}

    assert {name for name in named if not (ROOT / name).exists() and name != "conf/local/default.yaml"} == set()


def test_every_option_of_conf_is_in_the_documents() -> None:
    text = "\n".join(map(read, PAGES))
    options = [path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "local"]

    assert [str(path.relative_to(ROOT)) for path in options if f"`{path.stem}`" not in text] == []


# Tables and code -----------------------------------------------------------------------------------------------------


def typed_keys(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, default as YAML) of the schema."""
    for item in fields(kind):
        default = default_of(item)
        if item.name == "models":
            yield from typed_keys(ModelConfig, f"{prefix}models.<name>.")
        elif is_dataclass(default):
            yield from typed_keys(type(default), f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", spelt(default)


def default_of(item: "Field[Any]") -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def spelt(value: Any) -> str:
    if value == omegaconf.MISSING:
        return "required"
    return "`null`" if value is None else f"`{json.dumps(value)}`".replace('"', "")


def test_table_of_typed_keys_is_that_of_the_schema() -> None:
    section = read(ROOT / "docs" / "configuration.md").partition("## Typed keys")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.<>]+)` \| (\S+) \| .+ \|$", section, re.MULTILINE)

    assert rows == list(typed_keys(RunConfig))


@pytest.mark.parametrize(
    ("language", "file"), [("python", "my_tasks/features.py"), ("yaml", "conf/task/match_features.yaml")]
)
def test_example_in_the_documents_is_the_file(language: str, file: str) -> None:
    blocks = re.findall(rf"```{language}\n(.+?)```", read(ROOT / "docs" / "tasks.md"), re.DOTALL)

    assert read(OWN_TASK / file) in blocks


def test_constraints_have_no_local_versions() -> None:
    lines = [line for line in read(ROOT / "constraints.txt").splitlines() if line and not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    (torch_version,) = [line for line in lines if line.startswith("torch==")]
    assert f"pip install {torch_version} --index-url" in read(ROOT / "README.md")
