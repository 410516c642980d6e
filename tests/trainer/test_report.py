import io
import math

import pytest
import yaml
from rich.console import Console, RenderableType

from trainer.report import (
    closing_rows,
    closing_table,
    columns_without,
    is_hub_name,
    is_of_group,
    model_card,
    sample_panel,
    share_of_gap_closed,
)

LABELS = {"cross_entropy": "cross-entropy (nats)", "forward_kl": "KL(teacher||student)"}


def shown(renderable: RenderableType, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows_of_a_run() -> tuple[list[str], list[list[str]]]:
    return closing_rows(
        trained=["student"],
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


def test_a_count_is_shown_whole_and_a_mean_is_not() -> None:
    counts = {"val/pairs": 13, "val/tokens": 1_234_567, "val/loss": 1.0, "val/ratio": 13.0}

    _, rows = closing_rows(trained=["student"], before=counts, after={"val/pairs": 13.0})

    assert rows == [
        ["pairs", "13", "13.0000"],
        ["tokens", "1,234,567", ""],
        ["loss", "1.0000", ""],
        ["ratio", "13.0000", ""],
    ]


def test_a_wide_table_breaks_titles_and_names_and_no_number() -> None:
    row = ["on its own text: KL(teacher||student)", "0.0028471", "0.0005258", "0", "81.5 %"]

    text = shown(closing_table(["", "student before", "student after", "teacher", "gap closed"], [row]), width=80)

    assert text.splitlines()[0].split() == ["student", "student", "gap"]
    assert text.splitlines()[2].split() == [*row[0].split(), "0.0028471", "0.0005258", "0", "81.5", "%"]
    crowded = shown(closing_table(["", *"abcdef"], [["a long name", *["0.0028471"] * 6]]), width=80)
    assert crowded.count("0.0028471") == 6


def test_the_share_of_the_gap_is_told_where_the_reference_was_better() -> None:
    before = {
        "val/kl": 2.0,
        "val/loss": 3.0,
        "val/score": 0.5,
        "val/worse": 1.0,
        "val/only_before": 1.0,
        "val/nan": 1.0,
    }
    after = {"val/kl": 0.5, "val/loss": 3.5, "val/score": 0.6, "val/worse": 0.5, "val/nan": math.nan}
    reference = {"val/kl": 0.0, "val/loss": 2.0, "val/score": 1.0, "val/worse": 1.5, "val/nan": 0.0}
    directions = dict.fromkeys(("kl", "loss", "worse", "only_before", "nan"), "min") | {"score": "max"}

    shares = share_of_gap_closed(before, after, reference, directions=directions)

    assert shares == {
        "val/kl": 0.75,  # 1 - after / before
        "val/loss": -0.5,  # further away than before
        "val/score": pytest.approx(0.2),
    }
    assert share_of_gap_closed(before, after, {}, directions=directions) == {}
    of_groups = [
        {f"val/by_length/1-16{name[3:]}": v for name, v in part.items()} for part in (before, after, reference)
    ]
    assert len(share_of_gap_closed(*of_groups, directions=directions)) == 3, "a group has a gap of its own"
    assert share_of_gap_closed(before, after, reference, directions={}) == {}


def test_the_table_has_a_column_for_the_share_that_was_closed() -> None:
    columns, rows = closing_rows(
        trained=["student"],
        before={"val/kl": 2.0, "val/other": 1.0},
        after={"val/kl": 2.5, "val/other": 1.0},
        reference_name="teacher",
        reference={"val/kl": 0.0},
        gap_closed={"val/kl": -0.25},
        num_parameters={"student": 1000},
        step_time=2.0,
    )

    assert columns == ["", "student before", "student after", "teacher", "gap closed"]
    assert rows == [
        ["kl", "2.0000", "2.5000", "0", "-25.0 %"],
        ["other", "1.0000", "1.0000", "", ""],
        ["parameters", "1,000", "1,000", "", ""],
        ["step time (s)", "", "2", "", ""],
    ]


def test_metrics_of_groups_stay_out_of_the_table() -> None:
    before = {"val/kl": 2.0, "val/by_length/1-16/kl": 3.0}

    columns, rows = closing_rows(trained=["m"], before=before, after={}, gap_closed={"val/by_length/1-16/kl": 0.5})

    assert (columns, rows) == (["", "m before", "m after"], [["kl", "2.0000", ""]])
    assert is_of_group("val/by_source/web/kl")
    assert not is_of_group("val/by_chance")


def test_the_ends_of_an_interval_stand_below_their_metric() -> None:
    after = {"val/accuracy": 0.5, "val/margin": 1.0, "val/flow": 3.0, "val/accuracy_low": 0.4, "val/accuracy_high": 0.6}

    _, rows = closing_rows(trained=["m"], before={}, after=after)

    assert [label for label, _ in rows] == ["accuracy", "accuracy low", "accuracy high", "margin", "flow"]


def test_a_run_without_a_reference_has_no_column_for_it() -> None:
    columns, rows = closing_rows(trained=["model"], before={"val/loss": 2.0}, after={"val/loss": 12345.678})

    assert (columns, rows) == (["", "model before", "model after"], [["loss", "2.0000", "1.235e+04"]])


def test_what_is_measured_without_a_training_stands_in_one_column() -> None:
    columns, rows = closing_rows(
        trained=["model"], before={}, after={"val/loss": 2.0}, memory_gb=1.5,
        reference_name="teacher", reference={"val/loss": 1.0},
    )  # fmt: skip

    assert columns == ["", "model now", "teacher"]
    assert rows == [["loss", "2.0000", "1.0000"], ["peak memory (GB)", "1.5", ""]]


def test_several_trained_models_have_columns_of_their_own() -> None:
    before = {"val/small/loss": 4.0, "val/large/loss": 3.0}
    columns, rows = closing_rows(
        trained=["small", "large"], before=before, after={name: value / 2 for name, value in before.items()},
        num_parameters={"small": 1000, "large": 2000}, step_time=1.0,
    )  # fmt: skip

    assert columns == ["", "small before", "small after", "large before", "large after"]
    assert rows == [
        ["loss", "4.0000", "2.0000", "3.0000", "1.5000"],
        ["parameters", "1,000", "1,000", "2,000", "2,000"],
        ["step time (s)", "", "1", "", ""],
    ]


def test_a_models_own_card_leaves_the_columns_of_others_out() -> None:
    columns = ["", "small before", "small after", "large before", "large after"]
    rows = [["loss", "4", "2", "3", "1"], ["step time (s)", "", "1", "", ""]]

    assert columns_without(["large"], columns, rows) == (columns[:3], [["loss", "4", "2"], ["step time (s)", "", "1"]])
    assert columns_without(["small"], columns, rows) == (["", "large before", "large after"], [["loss", "3", "1"]])


def test_metrics_of_several_models_together_have_columns_for_all() -> None:
    columns, rows = closing_rows(
        trained=["query", "document"], before={"val/top1": 0.0}, after={"val/top1": 0.25},
        num_parameters={"query": 1000, "document": 2000},
    )  # fmt: skip

    assert columns == ["", "query + document before", "query + document after"]
    assert rows == [["top1", "0", "0.2500"], ["parameters", "3,000", "3,000"]]


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


def test_card_of_an_adapter_says_how_it_is_loaded() -> None:
    given = {"name": "student", "command": "run", "run_name": "r", "task": "t", "is_transformers": False}
    named = model_card(**given, adapter_base=("LlamaForCausalLM", "org/small"))  # type: ignore[arg-type]
    built = model_card(**given, adapter_base=("Sequential", None))  # type: ignore[arg-type]

    assert yaml.safe_load(named.split("---")[1])["library_name"] == "peft"
    assert 'base_model = LlamaForCausalLM.from_pretrained("org/small")\n' in named
    assert 'model = PeftModel.from_pretrained(base_model, "<this folder>")' in named
    assert "build.yaml" in built and "transformers import" not in built


def test_a_card_holds_no_secret() -> None:
    card = model_card(
        name="student",
        command="python -m trainer task=distill",
        run_name="run",
        task="distill",
        is_transformers=True,
        data=["https://me:password@host/train.jsonl"],
        sample_columns=["prompt", "student"],
        sample_rows=[["Your key?", "api_key=correct-horse"]],
    )

    assert "`https://***@host/train.jsonl`" in card
    assert "password" not in card
    assert "correct-horse" not in card
