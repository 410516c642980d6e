"""Knows what is a secret, and hides it before anything is written or shown."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
MISSING = "???"  # OmegaConf's mark: whoever repeats the run is asked for the value by its key
SHORTEST = 8  # characters; a shorter value is found in too many harmless words

# Keys and names of environment variables. `pad_token`, `max_new_tokens`, `tokenizer` and `eos_token` are none.
_NAME = re.compile(
    r"(^|_)(api_?keys?|access_?key|private_?key|secret_?key|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|authorization|(auth|hf|hub|access|api|wandb|bearer|refresh|session|security|id|gh|github|gitlab|huggingface"
    r"|huggingfacehub|personal|private|deploy|sas)_token)$|^token$"
)
_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PAT|(API|ACCESS|SECRET|PRIVATE)_?KEY)$", re.I)
_SPECIAL = re.compile(r"(^|_)(PAD|EOS|BOS|UNK|MASK|SEP|CLS)_TOKEN$", re.I)  # of tokenizers

_REFERENCE = re.compile(r"\$\{[^{}]*\}")  # of OmegaConf, such as ${oc.env:HF_TOKEN}
_HARMLESS = re.compile(r"(?:\$\{[^{},]*(?:,\s*(?:null|''|\"\")?\s*)?\})+|\?\?\?|\*\*\*|null|none|true|false|", re.I)

# Every pattern that begins with a run of characters looks back first, or a long word takes quadratic time.
_VALUE = r"""(?P<value>\$\{[^{}]*\}|"[^"\n]*"|'[^'\n]*'|[^\s"'&,;)\]}`]+)"""
_ASSIGNED = re.compile(rf"""(?<![\w.-])(?P<name>[\w.-]+)(?P<sign>["']?\s?=\s?|["']\s?:\s?){_VALUE}""")
_IN_BRACES = re.compile(rf"""(?<=[{{,])(?P<before>\s*)(?P<name>[\w.-]+)(?P<sign>\s?:\s?){_VALUE}""")
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:key|auth|code|sig|signature|x-(?:amz|goog)-(?:signature|credential)|awsaccesskeyid)=)[^\s&#\"']+",
    re.IGNORECASE,
)
_IN_HEADER = re.compile(r"\b(?P<name>(?:authorization['\"]?\s*:\s*['\"]?\w+|bearer)\s+)(?=\S*\d)[\w.~+/=-]{8,}", re.I)
_USER = re.compile(r"""(?<![\w+.-])(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s/?#"'<>]*)@""")
# A password is often written as it is, slashes and all; a number there is a port. Bounded, or it takes cubic time.
_USER_WITH_SLASH = re.compile(
    r"""(?<![\w+.-])(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s/:@"'<>$]{1,200}:(?!\d+/)[^\s@"'<>?]{1,400})@"""
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|xox[abeprs]-[\w-]{8,}|AIza[\w-]{30,}|wandb_v1_\w{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)


_remembered: set[str] = set()  # what this process was given; the one thing that every text must not show


def remember(words: Sequence[str], config: Any = None) -> None:
    """Takes note of the secrets on a command line and in a configuration, so that no text shows them from here on."""
    given = {name: value.strip("'\"") for name, _, value in (word.partition("=") for word in words) if value}
    _remembered.update(secret_values({name.rpartition(".")[2]: value for name, value in given.items()}))
    _remembered.update(secret_values(config))


# Text ----------------------------------------------------------------------------------------------------------------


def redact(text: str, *, secrets: Collection[str] = ()) -> str:
    """Returns the text with what is secret in it replaced by ***.

    Hidden are the values of variables of the environment whose names say secret, credentials in URLs, what is assigned
    to a secret name (`api_key=...`), and the shapes of well-known keys. A reference such as ${oc.env:HF_TOKEN} stays.

    Args:
        secrets: More values to hide.
    """
    known = {form for value in (*_environment(), *_remembered, *secrets) for form in (value, quote(value, safe=""))}
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    text = _USER.sub(_without_user, _USER_WITH_SLASH.sub(_without_user, text))
    text = _IN_HEADER.sub(rf"\g<name>{HIDDEN}", _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text))
    return _IN_BRACES.sub(_without_value, _ASSIGNED.sub(_without_value, text))


def is_secret_name(name: str) -> bool:
    """Returns whether a key, the last part of a dotted one, or a variable is one whose value nobody should see."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).replace("-", "_").lower()
    return _NAME.search(words) is not None


def redact_command(command: str) -> str:
    """Returns a command line in which a value that holds a secret is `???`, which the next run asks for by its key."""
    return shlex.join(redact_word(word) for word in shlex.split(command))


def redact_word(word: str) -> str:
    """Returns one word of a command line, `key=???` for one whose value holds a secret."""
    name, sign, value = word.partition("=")
    is_hidden = (is_secret_name(name) and not _HARMLESS.fullmatch(value)) or redact(word) != word
    if not is_hidden:
        return word
    return f"{name}={MISSING}" if sign and redact(name) == name else HIDDEN


class RedactingFormatter(logging.Formatter):
    """Formats a record, its exception and its stack included, without secrets.

    Args:
        secrets: Values to hide besides those that `redact` knows.
    """

    def __init__(self, layout: str | None = None, *, secrets: Collection[str] = ()) -> None:
        super().__init__(layout)
        self.secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record), secrets=self.secrets)


def _environment() -> list[str]:
    return [
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and _VARIABLE.search(name) and not _SPECIAL.search(name)
    ]


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    bare = value[1:-1] if value[0] in "\"'" else value
    if not is_secret_name(match["name"]) or _HARMLESS.fullmatch(bare):
        return match[0]
    hidden = f"{value[0]}{HIDDEN}{value[0]}" if value[0] in "\"'" else HIDDEN
    return match[0][: match.start("value") - match.start()] + hidden


def _without_user(match: re.Match[str]) -> str:
    """Hides name and password in a URL; a name alone is a token where the scheme is http, else an account (git@)."""
    name, _, password = _REFERENCE.sub("\0", match["user"]).partition(":")
    if "\0" in password and not password.strip("\0"):
        return match[0]
    is_token = bool(name.strip("\0*")) and re.search(r"https?://$", match["scheme"]) is not None
    return f"{match['scheme']}{HIDDEN}@" if password.strip("\0") or is_token else match[0]


# Configurations ------------------------------------------------------------------------------------------------------


def without_secrets(config: Any) -> Any:
    """Returns a copy of plain containers in which secrets are hidden."""
    secrets = secret_values(config)
    return _mapped(config, "", lambda name, value: HIDDEN if _is_secret(name, value) else _redacted(value, secrets))


def ask_for_secrets(config: Any) -> Any:
    """Returns a copy of plain containers in which a value that is or holds a secret is `???`."""
    secrets = secret_values(config)

    def ask(name: str, value: Any) -> Any:
        return MISSING if _is_secret(name, value) or _redacted(value, secrets) != value else value

    return _mapped(config, "", ask)


def secret_values(config: Any) -> set[str]:
    """Returns the values of secret keys, which may stand under other keys, too, or be quoted by an error."""
    return {str(value) for name, value in _leaves(config) if _is_secret(name, value) and len(str(value)) >= SHORTEST}


def _mapped(value: Any, name: str, leaf: Callable[[str, Any], Any]) -> Any:
    """Returns the containers with every leaf replaced; below a secret key all leaves bear its name."""
    if isinstance(value, Mapping):
        return {key: _mapped(child, name if is_secret_name(name) else str(key), leaf) for key, child in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_mapped(child, name, leaf) for child in value]
    return leaf(name, value)


def _leaves(config: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    _mapped(config, "", lambda name, value: found.append((name, value)))
    return found


def _is_secret(name: str, value: Any) -> bool:
    return is_secret_name(name) and value is not None and not _HARMLESS.fullmatch(str(value))


def _redacted(value: Any, secrets: Collection[str]) -> Any:
    return redact(value, secrets=secrets) if isinstance(value, str) else value
