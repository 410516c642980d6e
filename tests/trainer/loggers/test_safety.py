import pytest

from trainer.loggers.safety import HIDDEN, Fuse, without_secrets


def test_secrets_are_hidden_and_their_look_alikes_are_not() -> None:
    config = {
        "tokenizer": "t",
        "task": {"max_new_tokens": 3, "pad_token": "p", "key_size": 1},
        "hub": [
            {"token": "s", "hf_token": "s", "API_KEY": "s", "aws_secret": "s", "password": "s", "credentials": None}
        ],
    }

    clean = without_secrets(config)

    assert clean["tokenizer"] == "t"
    assert clean["task"] == config["task"]
    assert clean["hub"] == [
        {"token": HIDDEN, "hf_token": HIDDEN, "API_KEY": HIDDEN, "aws_secret": HIDDEN, "password": HIDDEN,
         "credentials": None}
    ]  # fmt: skip


def test_an_interrupt_passes_the_fuse() -> None:
    fuse = Fuse("wandb")

    with pytest.raises(KeyboardInterrupt), fuse.guard("logging"):
        raise KeyboardInterrupt
    assert not fuse.is_blown
