"""A writer on a server: the same text as the model's own, weights that follow the training, and what goes wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tasks.generation.server
from tasks.generation import GenerationOptions, LocalWriter, ServerOptions, ServerWriter, make_writer, row_seeds
from tasks.generation.http import ServerError
from tests.tasks.generation.local_server import LocalServer, serving
from tests.tasks.generation.test_local import Handle
from tests.tasks.task_runs import llama
from tests.tasks.tiny_tokenizers import CHARACTERS, make_tokenizer
from tests.trainer.test_trainer import reset_accelerate
from trainer import ConfigError, ModelHandle, ModelSpec, MultiModelTrainer, StepOutput, TaskModule, TrainingData
from trainer.causes import Report, _is_secondary

CPU = torch.device("cpu")
SPECIAL = ("<pad>", "<end>", "<a>", "<b>", "<c>", "<d>", "<e>", "<f>", "<g>", "<h>", "<i>")
TOKENIZER = make_tokenizer(special=SPECIAL, characters=CHARACTERS[: 61 - len(SPECIAL)])  # as many as the models know
PROMPTS = [[25, 26, 27], [8], [], [19, 20]]
OPTIONS = GenerationOptions(max_new_tokens=6, temperature=1.3)
GREEDY = GenerationOptions(max_new_tokens=6, temperature=0.0)


class Served(Handle):
    """A model of the run, without an engine."""

    def __init__(self, module: nn.Module, *, trainable: bool = False) -> None:
        super().__init__(module)
        self.trainable, self.num_updates, self.settled = trainable, 0, 0

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def set_training(self, mode: bool) -> None:
        self.module.train(mode)

    evaluating = ModelHandle.evaluating

    def settle(self) -> None:
        self.settled += 1


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with serving(llama("large"), TOKENIZER) as one:
        yield one


def writer_of(server: LocalServer, module: Any = None, *, trainable: bool = False, **options: Any) -> Any:
    module = llama("large").eval() if module is None else module
    at = ServerOptions(**{"url": server.url, "model": "tiny", "retries": 0, "timeout_seconds": 10, **options})
    return ServerWriter(Served(module, trainable=trainable), TOKENIZER, server=at, device=CPU)  # type: ignore[arg-type]


def local(module: Any) -> Any:
    return LocalWriter(Handle(module), TOKENIZER, device=CPU)  # type: ignore[arg-type]


def test_greedy_text_is_that_of_the_model_itself(server: LocalServer) -> None:
    found = writer_of(server).write(PROMPTS, seeds=None, options=OPTIONS)

    assert found == local(llama("large").eval()).write(PROMPTS, seeds=None, options=OPTIONS)
    assert sorted(body["prompt"] for _, body, _ in server.seen) == sorted(filter(None, PROMPTS))
    assert server.busiest > 1


def test_drawn_text_follows_the_seeds_of_the_rows(server: LocalServer) -> None:
    seeds, writer = row_seeds(0, 1, range(4)), writer_of(server)

    found = writer.write(PROMPTS, seeds=seeds, options=OPTIONS)

    assert found == writer.write(PROMPTS, seeds=seeds, options=OPTIONS)
    alone = [writer.write([p], seeds=[s], options=OPTIONS).answers[0] for p, s in zip(PROMPTS, seeds, strict=True)]
    assert found.answers == alone
    assert found != writer.write(PROMPTS, seeds=row_seeds(0, 2, range(4)), options=OPTIONS)
    samples = writer.write([[8]] * 4, seeds=row_seeds(0, 0, [1], samples=4), options=OPTIONS).answers
    assert len({tuple(answer) for answer in samples}) == 4


def test_the_request_says_all_that_a_server_may_otherwise_take_from_the_model(server: LocalServer) -> None:
    options = GenerationOptions(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=7, min_p=0.1, stop=("x",))

    writer_of(server).write([[8]], seeds=[2**62 + 5], options=options)
    writer_of(server).write([[8]], seeds=None, options=options)

    ends = [1, 2]
    (_, drawn, key), (_, greedy, _) = server.seen
    assert key is None
    assert drawn == {
        "model": "tiny",
        "prompt": [8],
        "max_tokens": 5,
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["x"],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": ends,
        "include_stop_str_in_output": True,
        "return_token_ids": True,
    }
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"], greedy["min_p"]) == (0.0, 1.0, -1, 0.0)
    assert "seed" not in greedy


@pytest.mark.parametrize("gives_ids", [True, False])
def test_a_stop_text_ends_an_answer(gives_ids: bool) -> None:
    free = local(llama("large").eval()).write(PROMPTS, seeds=None, options=GREEDY).answers
    stop = TOKENIZER.decode(free[3][1:3], skip_special_tokens=True)
    assert stop
    options = dataclasses.replace(GREEDY, stop=(stop,))

    with serving(llama("large"), TOKENIZER, gives_ids=gives_ids) as server:
        found = writer_of(server).write([PROMPTS[3]], seeds=None, options=options)

    assert found.is_ended == [True]
    told = TOKENIZER.decode(found.answers[0], skip_special_tokens=True)
    assert told.endswith(stop)
    assert len(found.answers[0]) < 6


def test_without_token_ids_the_text_is_read_again() -> None:
    module = llama("large").eval()
    with serving(module, TOKENIZER, is_standard=True) as server:
        writer = writer_of(server, dialect="openai")
        found = writer.write([[25, 26], [19]], seeds=[3, 4], options=OPTIONS)

        assert writer.write([[25, 26], [19]], seeds=[3, 4], options=OPTIONS) == found
        for (_, body, _), answer, is_ended in zip(
            sorted(server.seen[:2], key=lambda one: one[1]["seed"]), found.answers, found.is_ended, strict=True
        ):
            assert not {"top_k", "min_p", "return_token_ids"} & set(body)
            text = server.complete(body)["choices"][0]["text"]
            assert answer == TOKENIZER(text)["input_ids"] + [1] * is_ended  # the end token, where it ended by itself


def test_the_key_comes_from_the_environment(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVER_KEY", "sk-one-two-three")
    at = ServerOptions(url=server.url, model="tiny", api_key_env="MY_SERVER_KEY", retries=0)
    handle: Any = Served(llama("large"))

    make_writer(handle, TOKENIZER, options=dataclasses.replace(OPTIONS, server=at), device=CPU)

    assert server.seen == [("/v1/models", None, "Bearer sk-one-two-three")]


# Weights


class Writing(TaskModule):
    """Asks the server and the model itself before each update."""

    def __init__(self, at: ServerOptions) -> None:
        self.at, self.pairs = at, []  # type: ignore[var-annotated]

    def setup(self, stage: str) -> None:
        make = functools.partial(make_writer, self.models["actor"], TOKENIZER, device=CPU)
        self.writers = [make(options=dataclasses.replace(GREEDY, server=at)) for at in (self.at, None)]

    def prepare_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.pairs.append([writer.write(PROMPTS, seeds=None, options=GREEDY) for writer in self.writers])
        return batch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> StepOutput:
        ids = batch["input_ids"]
        return StepOutput(losses={"actor": self.models["actor"](input_ids=ids, labels=ids).loss})


def test_the_server_writes_with_the_weights_of_the_last_update(server: LocalServer, tmp_path: Path) -> None:
    server.folder = tmp_path / "weights"
    at = ServerOptions(url=server.url, model="tiny", weights_folder=str(server.folder), retries=0)
    reset_accelerate()
    trainer = MultiModelTrainer({"actor": {"zero_optimization": {"stage": 3}}}, max_steps=3)
    spec = ModelSpec(
        build=functools.partial(llama, "large"),
        dtype=torch.float32,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.02),
    )
    rows: Any = [{"input_ids": torch.tensor([5, 9, 9, 9])}] * 6
    task = Writing(at)

    trainer.fit(task, models={"actor": spec}, data=TrainingData(train=rows, batch_size=2))

    assert [remote == own for remote, own in task.pairs] == [True] * 3
    assert len({str(remote) for remote, _ in task.pairs}) > 1  # the updates are seen
    assert server.paths().count("/collective_rpc") == server.paths().count("/reset_prefix_cache") == 3
    first = server.paths().index("/collective_rpc")
    assert server.paths()[first : first + 3] == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"]
    assert (server.folder / "tokenizer.json").is_file()


def test_weights_are_sent_once_an_update(server: LocalServer, tmp_path: Path) -> None:
    server.folder = tmp_path / "weights"
    writer = writer_of(server, trainable=True, weights_folder=str(server.folder))
    writer.model.module.train()

    for _ in range(2):
        writer.write([[8]], seeds=None, options=GREEDY)
    assert server.paths().count("/collective_rpc") == 1
    assert writer.model.module.training
    writer.model.num_updates = 1
    writer.write([], seeds=None, options=GREEDY)  # every rank sends, also one that has nothing to ask
    assert server.paths().count("/collective_rpc") == 2


def test_a_server_that_does_not_load_them_is_told(server: LocalServer, tmp_path: Path) -> None:
    other = llama("other")
    writer = writer_of(server, other, trainable=True, weights_folder=str(tmp_path / "weights"))  # never read again

    with pytest.raises(ServerError, match=r"tiny at .* does not write with the weights of .*weights: .* nats"):
        writer.write([[8]], seeds=None, options=GREEDY)


def test_what_cannot_be_sent_is_refused(server: LocalServer) -> None:
    with pytest.raises(ConfigError, match=r"weights_folder is null, but models\.actor is trained"):
        writer_of(server, trainable=True)
    with pytest.raises(ConfigError, match=r"models\.actor cannot be sent, as it is no transformers model"):
        writer_of(server, nn.Linear(1, 1), trainable=True, weights_folder="/tmp/x")


# What goes wrong


def test_a_failing_request_ends_the_call_with_the_servers_words(server: LocalServer) -> None:
    server.faults = ["500"]

    with pytest.raises(ServerError, match=r"/v1/completions was asked once, and at last answered 500 .*engine is ill"):
        writer_of(server).write(PROMPTS, seeds=None, options=GREEDY)


def test_a_server_of_another_vocabulary_is_refused() -> None:
    letters = CHARACTERS[: 61 - len(SPECIAL)]
    other = make_tokenizer(special=SPECIAL, characters=letters[::-1])
    told = pytest.raises(ServerError, match=r"another vocabulary than models\.actor: it wrote .* say .* here")
    with serving(llama("large"), other) as server, told:
        writer_of(server).write([[25, 26], [19, 20]], seeds=None, options=GREEDY)
    small: Any = make_tokenizer(special=SPECIAL, characters="abc")
    with serving(llama("large"), TOKENIZER) as server:
        writer = writer_of(server)
        writer.tokenizer = small
        with pytest.raises(ServerError, match="another vocabulary"):
            writer.write([[5]], seeds=None, options=GREEDY)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "answered without 'choices'"),
        ({"choices": []}, "answered without 'text'"),
        ({"choices": [{"text": "a", "finish_reason": None}]}, "ended an answer for None"),
        ({"choices": [{"text": "a", "finish_reason": "stop", "token_ids": ["a"]}]}, "no whole numbers"),
        ([], "answered without 'choices'"),
    ],
)
def test_answers_that_make_no_sense_are_told(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, said: Any, words: str
) -> None:
    monkeypatch.setattr(server, "complete", lambda body: said)

    with pytest.raises(ServerError, match=rf"{server.url}.*{words}"):
        writer_of(server).write([[8]], seeds=None, options=GREEDY)


def test_the_rank_that_a_server_failed_is_the_cause_and_not_one_that_hears_of_it(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"{server.url}/collective_rpc answered 404 Not Found"
    monkeypatch.setattr(tasks.generation.server, "gather", lambda value: [own, value])  # as on rank 1 of two

    with pytest.raises(ServerError, match=r"another rank failed: .*404 Not Found") as heard:
        writer_of(server).write([[8]], seeds=None, options=GREEDY)

    first, second = (Report(status=1, text=f"ServerError: {text}", time=0) for text in (own, heard.value))
    assert (_is_secondary(first), _is_secondary(second)) == (False, True)


def test_a_server_that_is_not_there_is_refused_before_the_first_step() -> None:
    handle: Any = Served(llama("large"))
    server = ServerOptions(url="http://127.0.0.1:9", model="tiny", retries=0)

    with pytest.raises(
        ConfigError, match=r"task\.generation\.server\.url=http://127\.0\.0\.1:9: .*; start it, or mend"
    ):
        make_writer(handle, TOKENIZER, options=dataclasses.replace(OPTIONS, server=server), device=CPU)


def test_a_server_without_the_model_or_the_positions_is_refused_before_the_first_step(server: LocalServer) -> None:
    handle: Any = Served(llama("large"))

    def make(options: GenerationOptions, **at: Any) -> None:
        server_options = ServerOptions(url=server.url, retries=0, **at)
        make_writer(handle, TOKENIZER, options=dataclasses.replace(options, server=server_options), device=CPU)

    with pytest.raises(ConfigError, match=r"has no model 'tini', only tiny; did you mean tiny\?"):
        make(OPTIONS, model="tini")
    with pytest.raises(ConfigError, match="max_new_tokens=64 and a prompt of 1 tokens are more than the 64 positions"):
        make(GenerationOptions(max_new_tokens=64), model="tiny")
