"""JSON over HTTP, with retries that end, and errors that name the address and the server's words."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from typing import Any

log = logging.getLogger(__name__)

PASSING = (408, 425, 429)  # besides 500 and above: answers of a server that may do better a moment later
LONGEST_WAIT = 30.0  # seconds between two tries
WORDS = 500  # characters of an answer that are shown


class ServerError(RuntimeError):
    """A server that cannot be reached, refuses, or says what makes no sense."""


class JsonClient:
    """Asks a server, and asks it again when it is busy, down, or breaks off.

    Args:
        key: Sent as a bearer token; never shown, also where the server repeats it.
        timeout_seconds: Of one try, from the request to the whole answer.
        retries: Tries after the first.
        wait_seconds: Before the second try; twice as long before each further one.
    """

    def __init__(
        self, url: str, *, key: str | None = None, timeout_seconds: float, retries: int, wait_seconds: float = 1.0
    ) -> None:
        self.url, self.timeout_seconds, self.retries, self.wait_seconds = url, timeout_seconds, retries, wait_seconds
        self._key = key

    def get(self, path: str) -> Any:
        """Returns what the server has there."""
        return self._ask(path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns what the server answers to a body; None where it answers nothing."""
        return self._ask(path, json.dumps(body if body is not None else {}).encode())

    def _ask(self, path: str, data: bytes | None) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return self._try(path, data)
            except _PassingError as error:
                if attempt == self.retries:
                    times = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise ServerError(f"{self.url}{path} was asked {times}, and at last {error}") from None
                wait = min(self.wait_seconds * 2 ** min(attempt, 20), LONGEST_WAIT)  # 2**1024 is beyond a float
                log.warning("%s%s %s; it is asked again in %.3g s", self.url, path, error, wait)
                time.sleep(wait)
        raise AssertionError("unreachable")

    def _try(self, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds) as answer:
                text = answer.read().decode("utf-8", errors="replace")
        except urllib.error.HTTPError as error:
            said = f"answered {error.code} {error.reason}: {self._words(error)}"
            if error.code in PASSING or error.code >= 500:
                raise _PassingError(said) from error
            raise ServerError(f"{self.url}{path} {said}") from None
        except TimeoutError as error:
            raise _PassingError(f"did not answer within {self.timeout_seconds:g} s (timeout_seconds)") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise _PassingError(f"could not be reached within {self.timeout_seconds:g} s") from error
            raise _PassingError(f"could not be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"broke off: {type(error).__name__}: {error}") from error
        try:
            return json.loads(text) if text.strip() else None
        except json.JSONDecodeError as error:
            raise _PassingError(f"answered what is no JSON: {self._hidden(text)[:WORDS]!r}") from error

    def _words(self, error: urllib.error.HTTPError) -> str:
        try:
            said = error.read().decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException):
            return "(its words broke off)"
        return self._hidden(" ".join(said.split()))[:WORDS]

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _PassingError(Exception):
    """What may be otherwise a moment later; its text goes on from the server's address."""
