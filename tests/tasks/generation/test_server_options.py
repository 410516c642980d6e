"""What a configuration may say of a server."""

from typing import Any

import pytest

from tasks.generation import ServerOptions
from tasks.generation.server_options import read_server
from tasks.gkd import GKDTask
from tasks.grpo import GRPOTask
from tasks.ppo import PPOTask
from trainer import ConfigError, TaskModule


def test_no_server_is_none_and_an_address_may_end_as_clients_want_it() -> None:
    assert read_server(None) is None
    assert read_server({"url": "http://host:8000/v1/", "model": "m"}) == ServerOptions(
        url="http://host:8000", model="m"
    )


def test_all_problems_are_told_at_once() -> None:
    wrong: dict[str, Any] = {
        "url": "host:8000",
        "timeout_seconds": 0,
        "retries": -1,
        "connections": 0,
        "dialect": "sglang",
        "weights_folder": "",
        "api_key_env": "NO_SUCH_VARIABLE_HERE",
        "time_out": 3,
    }

    with pytest.raises(ConfigError) as refused:
        read_server(wrong)

    folder_rule = "must be null or a folder that this machine and the server's both see"
    key_rule = "must name an environment variable that holds the key, and there is none of that name here"
    known = "url, model, api_key_env, timeout_seconds, retries, connections, dialect, weights_folder"
    assert refused.value.problems == [
        f"task.generation.server.time_out is unknown, only {known}; did you mean timeout_seconds?",
        "task.generation.server.model is missing",
        "task.generation.server.url='host:8000': must be an address such as http://localhost:8000",
        "task.generation.server.timeout_seconds=0: must be a number above 0, at most 86400",
        "task.generation.server.retries=-1: must be a whole number of at least 0",
        "task.generation.server.connections=0: must be a whole number of at least 1",
        "task.generation.server.dialect='sglang': must be one of vllm, openai",
        f"task.generation.server.weights_folder='': {folder_rule}",
        f"task.generation.server.api_key_env {key_rule}",
    ]


@pytest.mark.parametrize("url", ["http://", "ftp://host", "http://host:port", "http://host?x=1", 3])
def test_what_is_no_address_is_refused(url: Any) -> None:
    with pytest.raises(ConfigError, match="must be an address such as"):
        read_server({"url": url, "model": "m"})


def test_a_time_that_no_socket_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timeout_seconds=1e\+308: must be a number above 0, at most 86400"):
        read_server({"url": "http://host", "model": "m", "timeout_seconds": 1e308})


def test_a_key_does_not_stand_in_the_configuration() -> None:
    with pytest.raises(ConfigError) as refused:
        read_server({"url": "http://me:hunter2hunter2@host", "model": "m", "api_key_env": "sk-my-own-key"})

    assert "hunter2" not in str(refused.value)
    assert "sk-my-own-key" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "own", "models"),
    [
        (GKDTask, {"terms": {"forward_kl": {}}}, {"student": True, "teacher": False}),
        (GRPOTask, {"rewards": {"brevity": {}}}, {"actor": True}),
        (PPOTask, {"rewards": {"brevity": {}}}, {"actor": True, "critic": True, "reference": False}),
    ],
)
def test_a_server_that_never_sees_the_trained_weights_is_refused_before_a_model_is_built(
    kind: type[TaskModule], own: dict[str, Any], models: dict[str, bool]
) -> None:
    server = {"url": "http://host", "model": "m"}
    task, fed = (
        kind(**own, generation={"server": server | more})  # type: ignore[call-arg]
        for more in ({}, {"weights_folder": "/shared"})
    )

    for stage in ("fit", "validate"):
        (problem,) = task.check_models(models, stage=stage)
        name = next(iter(models))
        assert problem.startswith(f"task.generation.server.weights_folder is null, but models.{name} is trained")
        assert fed.check_models(models, stage=stage) == []
    assert task.check_models(models, stage="export") == []


@pytest.mark.parametrize("task", [GKDTask, GRPOTask, PPOTask])
def test_a_resumed_run_may_find_the_server_elsewhere(task: type[TaskModule]) -> None:
    assert "generation.server.url" in task.may_differ
    assert "generation.server.dialect" not in task.may_differ, "which decides how text becomes tokens"
