"""Requests that fail: which are tried again, how it ends, and what the error says."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from tasks.generation.http import LONGEST_WAIT, JsonClient, ServerError, _PassingError
from tests.tasks.generation.local_server import LocalServer, serving
from tests.tasks.task_runs import llama
from tests.tasks.tiny_tokenizers import make_tokenizer

KEY = "sk-do-not-show-me"


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with serving(llama("small"), make_tokenizer()) as one:
        yield one


def client_of(server: LocalServer, *, retries: int = 2, timeout: float = 5.0) -> JsonClient:
    return JsonClient(server.url, key=KEY, timeout_seconds=timeout, retries=retries, wait_seconds=0.01)


@pytest.mark.parametrize("fault", ["500", "503", "429", "cut", "broken"])
def test_what_passes_is_tried_again(server: LocalServer, fault: str) -> None:
    server.faults = [fault, fault]

    said = client_of(server).get("/v1/models")

    assert said["data"][0]["id"] == "tiny"
    assert server.seen == [("/v1/models", None, f"Bearer {KEY}")] * 3


def test_a_server_that_stays_ill_ends_the_tries_with_its_address_and_words(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = ["500"] * 9

    with caplog.at_level(logging.WARNING), pytest.raises(ServerError) as failed:
        client_of(server).post("/v1/completions", {})

    text = str(failed.value)
    assert text.startswith(f"{server.url}/v1/completions was asked 3 times, and at last answered 500")
    assert "the engine is ill (500)" in text
    assert KEY not in text + caplog.text
    assert "***" in text  # where the server repeated it
    assert len(caplog.records) == 2


def test_a_thousand_tries_have_waits_that_a_float_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(JsonClient, "_try", _busy)
    client = JsonClient("http://host", timeout_seconds=1.0, retries=1100)

    with pytest.raises(ServerError, match="was asked 1101 times"):
        client.get("/v1/models")

    assert max(waits) == waits[-1] == LONGEST_WAIT


def _busy(client: JsonClient, path: str, data: bytes | None) -> None:
    raise _PassingError("is busy")


def test_a_refusal_is_told_at_once(server: LocalServer) -> None:
    with pytest.raises(ServerError, match=r"/v1/nothing answered 404 Not Found: \{\"detail\": \"Not Found\"\}"):
        client_of(server).get("/v1/nothing")
    assert len(server.seen) == 1


def test_a_slow_answer_is_given_up(server: LocalServer) -> None:
    server.faults = ["slow"] * 2

    with pytest.raises(ServerError, match=r"was asked 2 times, and at last did not answer within 0\.2 s"):
        client_of(server, retries=1, timeout=0.2).get("/v1/models")


@pytest.mark.parametrize(("fault", "words"), [("cut", "what is no JSON: '{"), ("broken", "broke off: IncompleteRead")])
def test_an_answer_that_breaks_off_is_told(server: LocalServer, fault: str, words: str) -> None:
    server.faults = [fault]

    with pytest.raises(ServerError) as failed:
        client_of(server, retries=0).get("/v1/models")

    assert f"was asked once, and at last {'answered ' if fault == 'cut' else ''}{words}" in str(failed.value)


def test_nobody_there_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"at last could not be reached: .*refused"):
            JsonClient(url, timeout_seconds=5, retries=1, wait_seconds=0.01).get("/v1/models")
