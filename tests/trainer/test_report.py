import io

import yaml
from rich.console import Console, RenderableType

from trainer.report import closing_rows, closing_table, is_hub_name, model_card, sample_panel

LABELS = {"cross_entropy": "cross-entropy (nats)", "forward_kl": "KL(teacher||student)"}


def shown(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows_of_a_run() -> tuple[list[str], list[list[str]]]:
    return closing_rows(
        student="student",
        before={"val/cross_entropy": 3.92159, "val/forward_kl": 1.64},
        after={"val/cross_entropy": 3.39, "val/forward_kl": 0.89, "val/top1_agreement": 0.575},
        reference_name="teacher",
        reference={"val/cross_entropy": 2.83, "val/forward_kl": 0.0},
        labels=LABELS,
        num_parameters={"student": 106_203_456, "teacher": 134_515_008},
        step_time=1.2345678,
        rates={"tokens_per_s": 512.34},
        memory_gb=3.1,
    )


def test_the_table_compares_before_after_and_reference() -> None:
    columns, rows = rows_of_a_run()

    assert columns == ["", "student before", "student after", "teacher"]
    assert rows == [
        ["cross-entropy (nats)", "3.9216", "3.3900", "2.8300"],
        ["KL(teacher||student)", "1.6400", "0.8900", "0"],
        ["top1 agreement", "", "0.5750", ""],
        ["parameters", "106.2M", "106.2M", "134.5M"],
        ["step time (s)", "", "1.235", ""],
        ["tokens/s", "", "512.3", ""],
        ["peak memory (GB)", "", "3.1", ""],
    ]
    lines = shown(closing_table(columns, rows)).splitlines()
    assert lines[0].split() == ["held-out", "text", "student", "before", "student", "after", "teacher"]
    assert lines[2].split() == ["KL(teacher||student)", "1.6400", "0.8900", "0"]


def test_a_run_without_a_reference_has_no_column_for_it() -> None:
    columns, rows = closing_rows(student="model", before={}, after={"val/loss": 12345.678})

    assert (columns, rows) == (["", "model before", "model after"], [["loss", "", "1.235e+04"]])


def test_samples_show_each_answer_below_the_prompt_as_it_is() -> None:
    text = shown(sample_panel(["prompt", "teacher", "student after"], [["Who [bold]?", "I\nam", ""], ["b", "c", "d"]],
                              limit=1))  # fmt: skip

    assert "Who [bold]?" in text
    assert "I am" in text
    assert "(nothing)" in text
    assert "─ b ─" not in text


def test_the_model_card_says_what_made_the_model() -> None:
    columns, rows = rows_of_a_run()

    card = model_card(
        name="student",
        command="python -m trainer task=distill",
        run_name="outputs/distill/now",
        task="distill",
        is_transformers=True,
        base_model="org/small",
        teacher="org/large",
        data=["org/corpus", "train.jsonl"],
        columns=columns,
        rows=rows,
        sample_columns=["prompt", "student after"],
        sample_rows=[["a|b", "print(`x`)\n"]],
        versions={"torch": "2.13.0"},
    )

    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/small",
        "datasets": ["org/corpus"],
        "library_name": "transformers",
        "tags": ["distill"],
    }
    assert "```sh\npython -m trainer task=distill\n```" in body
    assert "- Teacher: `org/large`" in body
    assert "- Data: `org/corpus, train.jsonl`" in body
    assert "| KL(teacher\\|\\|student) | 1.6400 | 0.8900 | 0 |" in body
    assert "- student after: `` print(`x`) ``" in body
    assert "torch 2.13.0" in body


def test_a_card_with_nothing_known_has_no_empty_parts() -> None:
    card = model_card(name="net", command="c", run_name="r", task="gan", is_transformers=False, base_model="./folder")

    assert yaml.safe_load(card.split("---\n")[1]) == {"tags": ["gan"]}
    assert "## Results" not in card
    assert "None" not in card
    assert "license" not in card


def test_paths_are_no_hub_names() -> None:
    assert is_hub_name("org/small-1.5")
    assert not any(
        is_hub_name(name) for name in ("/abs/path", "./a", "data/train.jsonl", "embedded:x", "a/b/c", "gpt2")
    )
