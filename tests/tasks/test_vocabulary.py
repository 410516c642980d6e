"""Which tokens models share, and what is refused."""

import pytest
from transformers import LlamaConfig

from tasks.vocabulary import shared_vocabulary
from trainer.config import ConfigError


class Tokenizer:
    def __init__(self, *, last_id: int) -> None:
        self.last_id = last_id

    def get_vocab(self) -> dict[str, int]:
        return {"first": 0, "last": self.last_id}  # ids may have gaps: the number of tokens is not the size


def configs(student: int, teacher: int) -> dict[str, LlamaConfig]:
    return {"student": LlamaConfig(vocab_size=student), "teacher": LlamaConfig(vocab_size=teacher)}


@pytest.mark.parametrize(
    ("student", "teacher", "tokenizer", "size"),
    [
        (151936, 152064, Tokenizer(last_id=151664), 151665),
        (152064, 151936, Tokenizer(last_id=151664), 151665),
        (500, 500, Tokenizer(last_id=300), 500),  # one head size: nothing to cut, as each model is trained
        (500, 500, None, 500),
    ],
)
def test_heads_of_different_sizes_share_the_tokenizers_tokens(student, teacher, tokenizer, size):
    assert shared_vocabulary(configs(student, teacher), tokenizer=tokenizer) == size


@pytest.mark.parametrize(
    ("student", "teacher", "tokenizer", "message"),
    [
        (500, 600, None, r"models\.student has 500 logits, models\.teacher has 600 logits, and no tokenizer"),
        (500, 600, Tokenizer(last_id=550), r"500.*600.*551 tokens"),
        (500, 500, Tokenizer(last_id=500), r"500.*500.*501 tokens"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused_with_the_numbers(student, teacher, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        shared_vocabulary(configs(student, teacher), tokenizer=tokenizer)
