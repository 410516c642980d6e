"""Sources become rows, and a wrong source is named with what would be right."""

import json
from pathlib import Path

import datasets
import pytest

from trainer.config import ConfigError
from trainer.data import check_source, load_rows


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_embedded_text_has_749_different_prompts():
    rows = load_rows("embedded:chatterbot-english")

    assert len(rows) == 749
    assert len({row["prompt"] for row in rows}) == 749
    assert all(set(row) == {"prompt", "completion", "document"} and all(row.values()) for row in rows)


def test_text_file_is_cut_into_documents_at_blank_lines(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("\none\nmore of one\n\n \n\ntwo\n")

    assert load_rows(str(file)) == [{"text": "one\nmore of one"}, {"text": "two"}]


def test_jsonl_and_json_rows_come_back_as_written(tmp_path):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    pair = {"prompt": "a", "completion": "b"}
    as_array = tmp_path / "train.json"
    as_array.write_text(json.dumps([pair, pair]))

    assert load_rows(write(tmp_path / "chat.jsonl", chat, chat)) == [chat, chat]
    assert load_rows(write(tmp_path / "mixed.jsonl", pair, {"text": "c"})) == [pair, {"text": "c"}]
    assert load_rows(str(as_array)) == [pair, pair]


def test_csv_answers_that_look_like_numbers_or_gaps_stay_text(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text('prompt,completion,score\n"6 * 7?",42,1\n"Any left?",None,2\n')

    rows = load_rows(str(file))

    assert rows == [
        {"prompt": "6 * 7?", "completion": "42", "score": 1},
        {"prompt": "Any left?", "completion": "None", "score": 2},
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("prompt,completion\na,b,c\n", "row 1: expected as many fields as the header has"),
        ("prompt,completion\na,b\nc,d,e\n", "Expected 2 fields in line 3, saw 3"),
        ("prompt,completion\na,b\nc\n", "row 2: expected .* found prompt"),
    ],
)
def test_csv_row_with_too_many_or_too_few_fields_is_named(tmp_path, content, expected):
    file = tmp_path / "train.csv"
    file.write_text(content)

    with pytest.raises(ConfigError, match=expected):
        load_rows(str(file))


def test_parquet_rows_come_back_as_written(tmp_path):
    rows = [{"text": "one"}, {"text": "two"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))

    assert load_rows(str(tmp_path / "train.parquet")) == rows


def test_changed_file_is_read_again(tmp_path):
    assert load_rows(write(tmp_path / "train.jsonl", {"text": "old"})) == [{"text": "old"}]
    assert load_rows(write(tmp_path / "train.jsonl", {"text": "new"})) == [{"text": "new"}]


def test_columns_without_a_fixed_meaning_are_left_to_the_task(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}

    assert load_rows(write(tmp_path / "pairs.jsonl", row)) == [row]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"text": "a"}', "", '{"text": "b"'], 'line 3: expected one JSON object a line, found \'{"text": "b"\''),
        (['{"text": "a"}', "[1]"], "line 2: expected one JSON object a line, found '[1]'"),
        (['{"text": "a"}', "", '{"text": 5}'], "line 3: expected a string in 'text', found 5"),
        (['{"text": "a"}', '{"text": 5}'], "line 2: expected a string in 'text', found 5"),
        (['{"prompt": "a", "completion": "b"}', '{"prompt": "c"}'], 'line 2: expected {"text"}, {"prompt", '),
        (['{"completion": "b"}'], "line 1: expected 'prompt' beside 'completion'"),
        (['{"messages": []}'], "line 1: expected a list of messages"),
        (['{"messages": [{"role": "user"}]}'], "line 1: expected a string in 'content'"),
        (['{"messages": [{"from": "human", "content": "a"}]}'], "line 1: expected messages of the form"),
    ],
)
def test_malformed_row_is_named_with_file_line_and_expectation(tmp_path, lines, expected):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(lines))

    with pytest.raises(ConfigError) as error:
        load_rows(str(file))

    assert str(file) in str(error.value)
    assert expected in str(error.value)
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)


def test_text_that_is_not_utf8_is_named(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_bytes("café".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"corpus.txt is not UTF-8 text"):
        load_rows(str(file))


def test_file_without_rows_is_refused(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("\n\n")

    with pytest.raises(ConfigError, match="holds no rows"):
        load_rows(str(file))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("embedded:chatterbot-englsh", "did you mean chatterbot-english?"),
        ("embedded:xyz", "known are chatterbot-english"),
        ("data/tran.jsonl", "data.train=data/tran.jsonl: no such file; did you mean train.jsonl?"),
        ("data/train.jsn", "no such file; did you mean train.jsonl?"),
        ("data/train.xml", "unknown suffix '.xml'; known are .txt, .jsonl, .json, .csv, .parquet"),
        ("nowhere/train.jsonl", "the folder nowhere does not exist"),
        ("data", "data is a folder"),
        ("data/empty.txt", "is empty"),
        ("corpus", "neither a file"),
    ],
)
def test_wrong_source_is_named_with_the_nearest_right_one(tmp_path, monkeypatch, source, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train.jsonl", "train.xml", "empty.txt"):
        (tmp_path / "data" / name).write_text("" if name == "empty.txt" else "{}")

    problems = check_source("data.train", source)

    assert len(problems) == 1
    assert problems[0].startswith(f"data.train={source}")
    assert expected in problems[0]


@pytest.mark.parametrize("source", ["org/name", "org/name:config", "org/name-v1.5", "embedded:chatterbot-english"])
def test_right_source_has_no_problem_and_nothing_is_loaded(source):
    assert check_source("data.train", source) == []


def test_hub_name_without_a_network_is_one_line_that_says_what_to_do(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)

    with pytest.raises(ConfigError, match=r"org/name, split test.*without a network give a file") as error:
        load_rows("org/name", split="test")

    assert "\n" not in str(error.value)


def test_hub_name_passes_its_configuration_and_split(monkeypatch):
    seen = {}

    def load(*names, split, cache_dir):
        seen.update(names=names, split=split)
        return datasets.Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)

    assert load_rows("org/name:english", split="validation") == [{"text": "a"}]
    assert seen == {"names": ("org/name", "english"), "split": "validation"}


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, suffix: str):
    file = tmp_path / f"latin.{suffix}"
    content = {"txt": "café\n\nbar", "jsonl": '{"text": "café"}\n', "csv": "text\ncafé\n"}[suffix]
    file.write_bytes(content.encode("latin-1"))

    with pytest.raises(ConfigError, match=rf"latin\.{suffix} is not UTF-8 text: .* at byte \d+; save it as UTF-8"):
        load_rows(str(file))


def test_a_null_in_the_first_line_is_refused(tmp_path: Path):
    file = tmp_path / "null.jsonl"
    file.write_text('\nnull\n{"text": "a"}\n')

    with pytest.raises(ConfigError, match="row 1: expected a JSON object, found null"):
        load_rows(str(file))
