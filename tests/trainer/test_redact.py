import logging
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from tests.test_cli import CODE, TASK, trainer
from trainer.redact import (
    RedactingFormatter,
    ask_for_secrets,
    is_secret_name,
    redact,
    redact_command,
    remember,
    secret_values,
    without_secrets,
)

SECRET = "correct-horse-battery"
HARMLESS = (
    "https://host:8080/path@v1?page=2",
    "git@github.com:me/x.git",
    "ssh://git@host/x.git",
    "hf://datasets/me/rows@main/train.jsonl",
    "lr=1e-3, max_new_tokens=48, pad_token=<pad>, eos_token='</s>', tokenizer=gpt2, unk_token: x",
    "models.student.optimizer.lr=0.1 reached token 12; secret ingredients, bearer of news",
    "token=${oc.env:HF_TOKEN} and https://me:${oc.env:PASSWORD}@host and https://${oc.env:U}:${oc.env:P}@host",
    "task-oriented-evaluation-of-models, hf_hub, 0123456789abcdef0123456789abcdef01234567",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"https://me:{SECRET}@host/x", "https://***@host/x"),
        (f"https://{SECRET}@host:80/x?y=1", "https://***@host:80/x?y=1"),
        (f"git+https://me:{SECRET}@host/x", "git+https://***@host/x"),
        (f"s3://AKI:{SECRET}/with+slash@bucket/x", "s3://***@bucket/x"),
        (f"https://me:{SECRET}p@ss@host/x", "https://***@host/x"),
        (f"https://me:{SECRET}@${{oc.env:HOST}}/", "https://***@${oc.env:HOST}/"),
        (f"https://host/x?a=1&token={SECRET}&b=2", "https://host/x?a=1&token=***&b=2"),
        (f"https://host/x?sig={SECRET}&X-Amz-Signature={SECRET}", "https://host/x?sig=***&X-Amz-Signature=***"),
        (f"api_key={SECRET}, x=1", "api_key=***, x=1"),
        (f"models.a.build.hfToken='{SECRET} and more' y", "models.a.build.hfToken='***' y"),
        (f"{{'password': '{SECRET}', 'a': 1}}", "{'password': '***', 'a': 1}"),
        (f'{{"api-key":"{SECRET}"}}', '{"api-key":"***"}'),
        (f"build={{name: a, token: {SECRET}}}", "build={name: a, token: ***}"),
        (f"Authorization: Basic {SECRET}9", "Authorization: Basic ***"),
        (f"sent Bearer {SECRET}9", "sent Bearer ***"),
    ],
)
def test_credentials_in_text_are_hidden_and_the_rest_stays(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "key",
    [
        "hf_" + "aB3" * 11,
        "sk-proj-" + "aB3" * 11,
        "ghp_" + "aB3" * 12,
        "github_pat_" + "aB3_" * 9,
        "AKIA" + "Q3" * 8,
        "xoxb-123456789-abcdef",
        "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_well_known_keys_are_hidden_wherever_they_stand(key: str) -> None:
    assert redact(f"it said: '{key}'.") == "it said: '***'."


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_values_of_secret_variables_are_hidden_also_as_part_of_a_url(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "open/sesame now")

    assert redact("say open/sesame now, or /x/open%2Fsesame%20now") == "say ***, or /x/***"


def test_short_values_and_special_tokens_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "seven77")
    monkeypatch.setenv("PAD_TOKEN", "<|endoftext|>")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-but-long")

    assert redact("seven77 <|endoftext|> false-but-long") == "seven77 <|endoftext|> false-but-long"


def test_names_of_secrets_and_their_look_alikes() -> None:
    secret = ("token", "API_KEY", "apiKey", "x.hf_token", "aws_secret", "password", "wandb-api-key", "client_secret")
    harmless = ("tokenizer", "pad_token", "eos_token", "max_new_tokens", "key_size", "tokens", "monkey", "public_key")

    assert [name for name in secret if not is_secret_name(name)] == []
    assert [name for name in harmless if is_secret_name(name)] == []


def test_a_configuration_asks_for_what_it_hides() -> None:
    config = {
        "hub": {"api_key": SECRET, "copy": f"x{SECRET}", "token": True, "password": None, "hf_token": "${oc.env:T}"},
        "credentials": {"user": "me", "keys": [SECRET, 1234]},
        "data": {"train": f"https://me:{SECRET}@host/x", "batch_size": 4, 7: "int key", "pad_token": "<pad>"},
        "auth_token": "${oc.env:T,my-default-token}",
    }

    assert ask_for_secrets(config) == {
        "hub": {"api_key": "???", "copy": "???", "token": True, "password": None, "hf_token": "${oc.env:T}"},
        "credentials": {"user": "???", "keys": ["???", "???"]},
        "data": {"train": "???", "batch_size": 4, 7: "int key", "pad_token": "<pad>"},
        "auth_token": "???",
    }
    assert without_secrets(config)["hub"] == {**ask_for_secrets(config)["hub"], "api_key": "***", "copy": "x***"}
    assert without_secrets(config)["data"]["train"] == "https://***@host/x"
    assert secret_values(config) == {SECRET, "${oc.env:T,my-default-token}"}


def test_a_command_asks_for_what_it_hides_and_stays_a_command() -> None:
    command = (
        f"python -m trainer task=a 'hub.api_key={SECRET} x' data.train=https://me:{SECRET}@h/x "
        f"'+m.b={{token: {SECRET}}}' m.token=null task.max_new_tokens=3"
    )

    assert redact_command(command) == (
        "python -m trainer task=a 'hub.api_key=???' 'data.train=???' '+m.b=???' m.token=null task.max_new_tokens=3"
    )


def test_exceptions_and_arguments_of_a_record_are_redacted() -> None:
    formatter = RedactingFormatter("%(levelname)s %(message)s", secrets=["my-own-value"])
    try:
        raise OSError(f"401 for https://host/?token={SECRET} and my-own-value")
    except OSError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "f.py", 1, "key %s", (f"password={SECRET}",), info)

    text = formatter.format(record)

    assert text.startswith("ERROR key password=***\nTraceback")
    assert SECRET not in text
    assert text.endswith("OSError: 401 for https://host/?token=*** and ***")


def test_long_words_take_no_long_time() -> None:
    began = time.perf_counter()

    for text in ("a" * 200_000, "a.b-" * 50_000, "a://" * 50_000, "x:y/" * 50_000, "{a," * 50_000, "eyJ" * 50_000):
        redact(text)

    assert time.perf_counter() - began < 5


# A whole run ---------------------------------------------------------------------------------------------------------

KEY, TOKEN, PASSWORD = "key-that-nobody-sees", "token-of-the-environment", "password-in-a-url"
OWN_CODE = """

import logging

def secret_line(width, dtype, api_key, hub_token, mirror, greeting, pad_token):
    assert (api_key, hub_token) == ("key-that-nobody-sees", "token-of-the-environment")
    logging.getLogger("mine").warning("asking %s with key %s and token %s", mirror, api_key, hub_token)
    return line(width, dtype)

class Failing(FitLine):
    def on_fit_end(self):
        try:
            raise OSError(f"no answer from https://me:password-in-a-url@host/ for key-that-nobody-sees")
        except OSError:
            logging.getLogger("mine").exception("a failure")
"""
SETTINGS = """\
  line:
    build:
      _target_: lines.secret_line
      api_key: null
      hub_token: ${oc.env:MY_HUB_TOKEN}
      mirror: https://me:password-in-a-url@host/x
      greeting: https://${oc.env:MY_USER}:${oc.env:MY_HUB_TOKEN}@host/y
      pad_token: <pad>
"""


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "conf" / "task").mkdir(parents=True)
    task = TASK.replace("lines.FitLine", "lines.Failing").replace("export: {enabled: false}\n", "")
    head, _, tail = task.partition("models: {line: {build: {_target_: lines.line, width: 3}, dtype: float32}}\n")
    models = f"models:\n{SETTINGS}      width: 3\n    dtype: float32\n"
    (folder / "conf" / "task" / "line.yaml").write_text(head + models + tail)
    (folder / "lines.py").write_text(CODE + OWN_CODE)
    return folder


@pytest.fixture(scope="module")
def whole_run(own_folder: Path) -> CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_HUB_TOKEN", TOKEN)
        patch.setenv("MY_USER", "me")
        return trainer(
            "--config-dir=conf", "task=line", "logger=[jsonl,tensorboard]", "hydra.run.dir=out",
            f"models.line.build.api_key={KEY}", cwd=own_folder,
        )  # fmt: skip


def test_a_run_leaves_and_shows_no_secret(own_folder: Path, whole_run: CompletedProcess[str]) -> None:
    out = own_folder / "out"
    assert whole_run.returncode == 0, whole_run.stderr
    shown = {"stdout": whole_run.stdout.encode(), "stderr": whole_run.stderr.encode()}
    texts = {**shown, **{str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()}}

    found = [(place, word) for place in texts for word in (KEY, TOKEN, PASSWORD) if word.encode() in texts[place]]

    assert found == []
    assert "asking https://***@host/x with key *** and token ***" in (out / "run.log").read_text()
    assert "OSError: no answer from https://***@host/ for ***" in (out / "run.log").read_text()
    assert "models.line.build.api_key=???" in (out / "export" / "line" / "README.md").read_text()


@pytest.mark.parametrize("place", ["config.yaml", "export/line/build.yaml"])
def test_references_stay_and_hidden_values_are_missing(
    place: str, own_folder: Path, whole_run: CompletedProcess[str]
) -> None:
    saved = yaml.safe_load((own_folder / "out" / place).read_text())

    build = saved["models"]["line"]["build"] if place == "config.yaml" else saved
    assert build == {
        "_target_": "lines.secret_line",
        "width": 3,
        "api_key": "???",
        "hub_token": "${oc.env:MY_HUB_TOKEN}",
        "mirror": "???",
        "greeting": "https://${oc.env:MY_USER}:${oc.env:MY_HUB_TOKEN}@host/y",
        "pad_token": "<pad>",
    }


def test_a_repeated_run_asks_for_hidden_values_by_their_keys(
    own_folder: Path, whole_run: CompletedProcess[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HUB_TOKEN", TOKEN)
    monkeypatch.setenv("MY_USER", "me")
    again = ("--config-path=out", "--config-name=config", "hydra.run.dir=again", "mode=validate")

    asked = trainer(*again, cwd=own_folder)

    assert asked.returncode == 2
    assert "models.line.build.api_key is missing" in asked.stderr
    assert "models.line.build.mirror is missing" in asked.stderr
    assert "hub_token" not in asked.stderr


def test_a_secret_of_the_command_line_is_known_from_there_on():
    remember(["+task.api_key=hunter2hunter2", "task.lr=0.1"], {"logger": {"mine": {"password": "opensesame99"}}})

    assert redact("no login with hunter2hunter2 and opensesame99") == "no login with *** and ***"
    assert redact("0.1") == "0.1"
