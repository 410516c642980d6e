"""Rows keep the name of their source, whatever it is and however many there are."""

import logging

import pytest
import torch

from trainer.data import PaddingCollator, build_text_dataset
from trainer.data.row_sources import MAX_SOURCES, name_sources_of_rows
from trainer.data.sources import TrainingData, ValidationSources, name_sources


def rows_of(*sources):
    return [{"text": f"row {index}"} | ({"source": source} if source else {}) for index, source in enumerate(sources)]


def named(*sources):
    names, ids = name_sources_of_rows(rows_of(*sources))
    return [names[place] for place in ids]


def test_rows_without_sources_have_none():
    assert name_sources_of_rows(rows_of(None, None)) == ([], [])


def test_names_can_stand_in_a_metrics_name_and_stay_apart():
    assert named("web/en", "web en", "chat-1.5", 7) == ["web_en_2", "web_en", "chat-1.5", "7"]


def test_a_row_without_a_source_among_others_is_unknown():
    assert named("chat", None, "unknown") == ["chat", "unknown", "unknown_2"]


def test_sources_of_few_rows_are_one_group_where_there_are_many(caplog):
    caplog.set_level(logging.INFO)
    sources = [f"s{index:02}" for index in range(MAX_SOURCES + 2) for _ in range(1 if index < 2 else 2)]

    found = named(*sources)

    assert len(set(found)) == MAX_SOURCES + 1
    assert found[:2] == ["other", "other"] and found[2:] == sources[2:]
    assert "22 sources: the 20 with the most rows" in caplog.text


def test_all_sources_are_kept_as_the_rows_say_them_and_metrics_tell_some_apart(plain_tokenizer):
    sources = ["org/code", "", *(f"s{index:02}" for index in range(MAX_SOURCES + 3))]
    rows = [{"text": f"row {index}"} | ({"source": source} if source else {}) for index, source in enumerate(sources)]

    dataset = build_text_dataset(rows, plain_tokenizer, block_size=48, packing=False)
    names, places = dataset.groups

    assert dataset.sources == sorted(sources)
    assert [dataset.sources[int(item["source"][0])] for item in dataset] == sources
    assert names[places[dataset.sources.index("")]] == "unknown"
    assert names[places[dataset.sources.index("s22")]] == "other"


@pytest.mark.parametrize("packing", [False, True])
def test_each_token_of_a_batch_has_the_source_of_its_row(plain_tokenizer, packing):
    texts = {"Hello there": "code", "How are you today?": "chat", "word " * 60: "chat"}
    rows = [{"text": text, "source": source} for text, source in texts.items()]

    dataset = build_text_dataset(rows, plain_tokenizer, block_size=48, packing=packing)
    batch = PaddingCollator(1)([dataset[index] for index in range(len(dataset))])

    assert dataset.sources == ["chat", "code"]
    assert batch["source"].shape == batch["input_ids"].shape
    code = plain_tokenizer("Hello there")["input_ids"]
    is_code = batch["source"] == 1
    assert batch["input_ids"][is_code].tolist() == [*code, plain_tokenizer.eos_token_id]
    is_pad = torch.arange(batch["source"].shape[1]) >= torch.tensor([[len(item["labels"])] for item in dataset])
    assert torch.equal(batch["source"] == -1, is_pad)
    assert is_pad.any()


def test_rows_without_sources_give_the_batch_they_always_gave(plain_tokenizer):
    dataset = build_text_dataset([{"text": "Hello there"}], plain_tokenizer, block_size=48, packing=False)

    assert set(PaddingCollator(1)([dataset[0]])) == {"input_ids", "labels", "attention_mask"}


def test_a_validation_knows_the_sources_of_the_shared_rows(plain_tokenizer):
    dataset = build_text_dataset(rows_of("b", "a"), plain_tokenizer, block_size=48, packing=False)
    other = TrainingData(validation=[{"number": 1}])

    def sources_of(shared):
        loader = ValidationSources(name_sources(shared, {"critic": other}), rank=0, world_size=1, limit_batches=None)
        return loader.row_sources

    assert sources_of(TrainingData(validation=dataset)) == ["a", "b"]
    assert sources_of(other) == sources_of(TrainingData()) == []
