"""What a model is to learn of a row, and nothing else, has a label."""

import logging

import pytest
import torch

from trainer.config import ConfigError
from trainer.data import build_text_dataset, render_prompt

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}


def build(rows, tokenizer, *, block_size=200, packing=False):
    return build_text_dataset(rows, tokenizer, block_size=block_size, packing=packing)


def learnt(item, tokenizer):
    """Returns the text of the labels that count after the shift, and checks that they stand at their own tokens."""
    labels = item["labels"][1:]
    counted = labels != -100
    assert torch.equal(labels[counted], item["input_ids"][1:][counted])
    return tokenizer.decode(labels[counted])


def test_pair_goes_through_the_template_and_only_the_answer_and_its_first_end_are_learnt(tokenizer):
    dataset = build([{"prompt": "Hi", "completion": "Hello there"}], tokenizer)

    (item,) = (dataset[index] for index in range(len(dataset)))

    assert tokenizer.decode(item["input_ids"]) == "<|start|>user\nHi<|end|>\n<|start|>assistant\nHello there<|end|>"
    assert learnt(item, tokenizer) == "Hello there<|end|>"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == item["labels"][-1]
    assert dataset.prompts == ["Hi"]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64


def test_pair_without_a_template_is_prompt_then_completion_then_end(plain_tokenizer):
    (example,) = build([{"prompt": "Hi:", "completion": " there"}], plain_tokenizer)

    assert plain_tokenizer.decode(example["input_ids"]) == "Hi: there<|end|>"
    assert learnt(example, plain_tokenizer) == " there<|end|>"


def test_each_assistant_turn_is_learnt_and_nothing_between(tokenizer):
    messages = [{"role": "system", "content": "Be kind"}, USER, ANSWER, {"role": "user", "content": "Bye"}]
    messages += [{"role": "assistant", "content": "See you"}, {"role": "user", "content": "unanswered"}]

    (item,) = build([{"messages": messages}], tokenizer)

    assert learnt(item, tokenizer) == "Hello there<|end|>See you<|end|>"
    assert tokenizer.decode(item["input_ids"]).endswith("See you<|end|>"), "what follows the last label is left out"


def test_every_token_of_plain_text_but_the_first_is_learnt(tokenizer):
    (item,) = build([{"text": "Hello there"}], tokenizer)

    assert tokenizer.decode(item["input_ids"]) == "Hello there<|end|>"
    assert (item["labels"][1:] != -100).all()


def test_empty_text_is_dropped(tokenizer):
    dataset = build([{"text": ""}, {"text": "Hello there"}], tokenizer, packing=True)

    assert len(dataset) == 1


def test_one_token_answer_has_its_label_where_the_loss_looks(tokenizer):
    (item,) = build([{"prompt": "Hi", "completion": "."}], tokenizer)

    predicting = (item["labels"][1:] != -100).nonzero().flatten()  # logits[t] predict labels[t + 1]

    assert learnt(item, tokenizer) == ".<|end|>"
    assert tokenizer.decode(item["input_ids"][: predicting[0] + 1]).endswith("assistant\n")


def test_answer_that_merges_with_the_border_is_still_learnt_whole(tokenizer):
    (item,) = build([{"prompt": "Hi", "completion": "\n\nHello"}], tokenizer)

    assert learnt(item, tokenizer).endswith("\nHello<|end|>")
    assert "assistant" not in learnt(item, tokenizer)


def test_template_that_renders_a_turn_differently_later_is_refused(tokenizer, make_tokenizer):
    drops_earlier_answers = tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' else '' }}"
    )
    rows = [{"messages": [USER, ANSWER, USER, ANSWER]}]

    with pytest.raises(ConfigError, match="row 1: the chat template renders messages 1 to 2 differently"):
        build(rows, make_tokenizer(drops_earlier_answers))


def test_messages_that_the_template_refuses_name_their_row(tokenizer, make_tokenizer):
    refuses = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    rows = [{"messages": [USER, ANSWER]}, {"messages": [ANSWER]}]

    with pytest.raises(ConfigError, match="row 2: the chat template refuses the messages: roles must alternate"):
        build(rows, make_tokenizer(refuses + tokenizer.chat_template))


def test_messages_without_a_template_are_refused(plain_tokenizer):
    with pytest.raises(ConfigError, match="row 1: 'messages' need a chat template"):
        build([{"messages": [USER, ANSWER]}], plain_tokenizer)


def test_rows_of_no_known_form_are_refused_with_what_was_found(tokenizer):
    with pytest.raises(ConfigError, match=r"row 1: expected .*, found question, answer"):
        build([{"question": "a", "answer": "b"}], tokenizer)


def test_long_examples_are_cut_and_those_without_a_label_dropped_and_counted(tokenizer, caplog):
    rows = [{"prompt": "Hi", "completion": "word " * 50}, {"prompt": "word " * 50, "completion": "Hi"}]

    with caplog.at_level(logging.INFO):
        dataset = build(rows, tokenizer, block_size=40)

    assert [len(dataset[index]["input_ids"]) for index in range(len(dataset))] == [40]
    assert dataset.prompts == ["Hi"]
    assert "cut 2 of 2 examples to 40 tokens" in caplog.text
    assert "dropped 1 of 2 examples" in caplog.text


def test_data_of_which_nothing_would_be_learnt_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.block_size=4"):
        build([{"prompt": "a long enough question", "completion": "Hi"}], tokenizer, block_size=4)


def test_prompt_for_generation_is_the_beginning_of_the_trained_example(tokenizer, plain_tokenizer):
    (item,) = build([{"prompt": "Hi", "completion": "Hello"}], tokenizer)

    rendered = render_prompt("Hi", tokenizer)

    assert tokenizer.decode(item["input_ids"]).startswith(rendered)
    assert rendered.endswith("assistant\n")
    assert render_prompt("Hi", plain_tokenizer) == "Hi"
